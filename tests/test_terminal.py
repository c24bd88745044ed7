"""The terminal as a person uses it: a real pseudo-terminal, keys, Ctrl-C at random times."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pexpect
import pytest

CTRL_C, CTRL_D = "\x03", "\x04"
PROMPT = r">[^\n]*\x1b\[\?25h"  # drawn, and the cursor shown again


def spawn(tmp_path: Path, *args: str, **environment: str) -> Any:
    """`quire ARGS` on a terminal of 60 columns."""
    settings = {**os.environ, "TERM": "xterm", "XDG_STATE_HOME": str(tmp_path)}
    settings |= {"PROMPT_TOOLKIT_NO_CPR": "1", **environment}  # nobody answers where the cursor is
    command = ["-m", "quire.cli", *args]
    return pexpect.spawn(
        sys.executable, command, env=settings, encoding="utf-8", timeout=300, dimensions=(24, 60)
    )


@pytest.fixture
def chat(tmp_path: Path) -> Iterator[Any]:
    """`quire chat` with the model inside the package."""
    child = spawn(tmp_path, "chat", "--sampling-seed", "3", "--max-tokens", "20")
    child.expect("ends.")
    child.expect(PROMPT)
    yield child
    child.close(force=True)


def test_chat_takes_messages_commands_and_history(chat: Any, tmp_path: Path) -> None:
    chat.sendline("Tell me a story.")
    chat.expect("/more goes on")
    chat.sendline("/nothing")
    chat.expect("there is no /nothing")
    chat.sendline("/tokens")
    chat.expect(r"\d+ of 1,024 tokens")
    saved = tmp_path / "chat.json"
    chat.sendline(f"/save {saved}")
    chat.expect("saved 2 messages")
    chat.sendline("/system Be brief.")
    chat.expect("Be brief.")
    chat.sendline("/load " + str(saved))
    chat.expect("loaded 2 messages")
    chat.send("\x1b[A")  # the arrow key brings the last line back
    chat.expect("chat.json")
    chat.send(CTRL_C)
    chat.sendline("/quit")
    chat.expect(pexpect.EOF)
    assert "Tell me a story." in (tmp_path / "quire" / "chat-history").read_text()


THINKS = "{% for m in messages %}{{ m.content }}{% endfor %}<think>"


def test_reasoning_is_dimmed_or_one_line(tmp_path: Path) -> None:
    child = spawn(tmp_path, "chat", "--max-tokens", "8", "--chat-template", THINKS)
    child.expect(PROMPT)
    child.sendline("Once")
    child.expect_exact("\x1b[2mThinking...")
    child.expect("...done thinking.")
    child.expect("cut at the token limit before the answer")
    child.sendline("/reasoning hide")
    child.expect("hidden behind one line")
    child.sendline("/regen")
    child.expect(r"thinking\.\.\. \d+ s, \d tokens")
    child.expect(r"thought for \d+ s")
    child.sendline("/think off")
    child.expect("no switch")
    child.expect(PROMPT)
    child.send(CTRL_C)
    child.expect("Ctrl-D or /quit ends")
    child.sendline("/quit")
    child.expect(pexpect.EOF)


def test_pasted_lines_are_one_message(chat: Any) -> None:
    chat.send("\x1b[200~one\ntwo\x1b[201~\r")
    chat.expect("/more goes on")
    chat.sendline("/stats")
    chat.expect(r"(\d+) prompt tokens")
    assert int(chat.match.group(1)) > 2
    chat.sendline("/quit")
    chat.expect(pexpect.EOF)


def test_a_home_that_cannot_be_written_keeps_no_history(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    child = spawn(tmp_path / "file", "chat", "--max-tokens", "5")
    child.expect("What you type is not kept")
    child.expect(PROMPT)
    child.sendline("Tell me a story.")
    child.expect("goes on")
    child.sendline("/quit")
    child.expect(pexpect.EOF)
    child.wait()
    assert child.exitstatus == 0


def test_interrupts_at_random_times_stop_the_answer_and_nothing_else(tmp_path: Path) -> None:
    child = spawn(tmp_path, "chat", "--max-tokens", "900")
    child.expect(PROMPT)
    moments = random.Random(5)
    for _ in range(18):
        child.sendline("Tell me a long story.")
        time.sleep(moments.uniform(0.05, 0.4))
        child.send(CTRL_C)
        child.expect(PROMPT)
        child.sendline("/new")
        child.expect(PROMPT)
    child.send(CTRL_D)
    child.expect(pexpect.EOF)
    assert "Traceback" not in child.before
    child.wait()
    assert child.exitstatus == 0


@pytest.mark.parametrize(("tokens", "seen"), [("900", "Once upon a time"), ("900", r"\."), ("3", r"\n")])
def test_generate_stops_at_an_interrupt(tmp_path: Path, tokens: str, seen: str) -> None:
    """At its start, in its midst, and when all is written but the process has not ended."""
    child = spawn(tmp_path, "generate", "Once upon a time", "--max-tokens", tokens)
    child.delaybeforesend = None
    child.expect(seen)
    child.send(CTRL_C)
    child.expect(pexpect.EOF)
    assert "Traceback" not in child.before
    child.wait()
    assert child.exitstatus in (0, 130)


def test_a_dumb_terminal_gets_no_escape_codes(tmp_path: Path) -> None:
    child = spawn(tmp_path, "chat", "--max-tokens", "5", TERM="dumb", NO_COLOR="1")
    child.expect("> ")
    seen = child.before
    child.sendline("Tell me a story.")
    child.expect("goes on")
    assert "\x1b" not in seen + child.before
    child.sendline("/quit")
    child.expect(pexpect.EOF)


def test_serve_shows_four_lines_and_stops(tmp_path: Path) -> None:
    child = spawn(tmp_path, "serve", "--port", "0")
    child.expect("Model +quire-stories")
    child.expect("tokens of KV cache")
    child.expect(r"Page and API +(http://127.0.0.1:\d+)")
    child.expect("Ctrl-C stops.")
    child.expect("Only this machine can connect")
    child.expect("quire-stories is a toy")
    child.send(CTRL_C)
    child.expect(pexpect.EOF)
    assert "Traceback" not in child.before
    child.wait()
    assert child.exitstatus == 0


def test_serve_logs_when_nobody_watches(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "quire.cli", "serve", "--port", "0"], stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    lines = []
    for line in process.stderr:
        lines.append(line)
        if "the page is at http" in line:
            break
    with urllib.request.urlopen(f"{line.split(' at ')[1].strip().rstrip('/')}/dashboard/about") as about:
        assert json.load(about)["advice"].startswith("quire-stories is a toy")  # on the page
    process.send_signal(signal.SIGTERM)
    lines += process.stderr.read().splitlines()
    process.stderr.close()
    assert process.wait(60) == 0
    assert any("memory:" in line for line in lines)
    assert any("serving" in line and " at http" in line for line in lines)
    assert any("loading quire-stories from " in line for line in lines)
    assert sum("quire-stories is a toy" in line for line in lines) == 1
    assert not any("Ctrl-C stops" in line for line in lines)


def quire(*args: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "quire.cli", *args]
    return subprocess.run(command, input=stdin, capture_output=True, timeout=120)


def test_chat_speaks_with_a_running_server(tmp_path: Path) -> None:
    server = spawn(tmp_path, "serve", "--port", "0", "--api-key", "k")
    server.expect(r"Page and API +(http://127.0.0.1:\d+)")
    url = server.match.group(1)
    said = quire("chat", "--url", url, "--api-key", "k", "--max-tokens", "8", stdin=b"Hi\n/tokens\n/more\n")
    assert said.returncode == 0, said.stderr
    assert said.stdout.strip()
    assert b"of 1,024 tokens" in said.stderr
    refused = quire("chat", "--url", url, "--api-key", "no", stdin=b"Hi\n")
    assert refused.returncode == 1
    assert refused.stderr.startswith(b"quire: error: --url")
    server.send(CTRL_C)
    server.expect(pexpect.EOF)
    server.close()
    nobody = quire("chat", "--url", url, stdin=b"Hi\n")
    assert b"does not answer" in nobody.stderr
    assert quire("chat", "--url", "ftp://x", stdin=b"").returncode == 2


def test_input_that_is_not_utf8_says_so(tiny_model: Callable[..., str]) -> None:
    for args in (("generate", "--model"), ("chat",)):
        done = quire(*args, tiny_model(), "--max-tokens", "3", stdin=b"caf\xe9\n")
        assert done.returncode == 1
        assert done.stderr.endswith(b"standard input is not UTF-8: byte 0xe9 at position 3\n")


def test_generate_reads_a_pipe(tiny_model: Callable[..., str]) -> None:
    done = quire("generate", "--model", tiny_model(), "--max-tokens", "3", stdin=b"Once")
    assert done.stdout.startswith(b"Once")


def test_usage_errors_are_one_line_with_the_nearest_name() -> None:
    for args, said in (
        (("srve",), b"quire: error: there is no command 'srve'; did you mean serve?\n"),
        (
            ("bench", "latncy"),
            b"quire: error: there is no command 'bench latncy'; did you mean bench latency?\n",
        ),
        (
            ("serve", "--max-modle-len", "4"),
            b"quire serve: error: there is no option --max-modle-len; did you mean --max-model-len?\n",
        ),
        (("plan", "a", "b"), b"quire plan: error: 'b' is one argument too many\n"),
    ):
        done = quire(*args)
        assert (done.returncode, done.stderr) == (2, said)


def test_help_is_short_and_help_all_is_whole() -> None:
    short, whole = quire("serve", "--help").stdout, quire("serve", "--help-all").stdout
    assert b"--host" in short
    assert b"--ssl-keyfile" not in short
    assert b"--ssl-keyfile" in whole
    assert len(short.splitlines()) < 64
    assert short.splitlines()[0] == b"usage: quire serve [model] [options]"
    assert b"bench latency" in quire("bench").stdout
    assert b"bench latency" in quire("bench", "--help").stdout
    assert b"serve" in quire().stdout


@pytest.mark.parametrize(
    "command",
    ["plan", "bench latency --num-iters 1 --num-iters-warmup 0 --output-len 4", "--help", "serve --help"],
)
def test_sixty_columns_are_enough(command: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "quire.cli", *command.split()],
        env={**os.environ, "COLUMNS": "60", "NO_COLOR": "1"},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert "…" not in done.stdout
    assert "\x1b" not in done.stdout
    assert max(len(line.rstrip()) for line in done.stdout.splitlines()) <= 60
