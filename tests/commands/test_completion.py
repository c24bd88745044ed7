"""`quire completion`: bash completes by the script, and at a terminal zsh and fish too, where they are installed."""

from __future__ import annotations

import os
import pty
import select
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from quire.cli import COMMANDS
from tests.hub_server import quire


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bash") / "quire.bash"
    path.write_text(quire("completion", "bash").stdout)
    return path


def completed(script: Path, line: str) -> set[str]:
    """What bash offers for the last word of `line`."""
    words = line.split(" ")
    array = " ".join(f"'{word}'" for word in words)
    code = (
        f"source {script}; COMP_WORDS=({array}); COMP_CWORD={len(words) - 1}; _quire; echo ${{COMPREPLY[@]}}"
    )
    done = subprocess.run(["bash", "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    return set(done.stdout.split())


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("quire ser", {"serve"}),
        ("quire bench st", {"startup"}),
        ("quire bench ", {"latency", "throughput", "quality", "serve", "startup", "host"}),
        ("quire models w", {"where"}),
        ("quire serve --por", {"--port"}),
        ("quire serve some/model --api-key-f", {"--api-key-file"}),
        ("quire bench serve --num-pro", {"--num-prompts"}),
        ("quire chat --reasoning ", {"show", "hide"}),
        ("quire serve --log-format j", {"json"}),
        ("quire completion f", {"fish"}),
        ("quire serve --config ", set()),
    ],
)
def test_bash_completes(script: Path, line: str, offered: set[str]) -> None:
    assert completed(script, line) == offered


def test_every_command_is_offered(script: Path) -> None:
    assert completed(script, "quire ") >= {name.split()[0] for name in COMMANDS}


SHELLS = {
    "bash": ("bash --norc --noprofile -i", 'quire() { echo "got[$*]"; }'),
    "zsh": ("zsh -f -i", 'quire() { echo "got[$*]" }'),
    "fish": ("fish -i", 'function quire; echo "got[$argv]"; end'),
}


def scripted(shell: str, folder: Path) -> Path:
    """The script that the command prints for this shell, in a file."""
    done = quire("completion", shell)
    assert (done.returncode, done.stderr) == (0, "")
    assert "--api-key-file" in done.stdout or "-l api-key-file" in done.stdout
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    path = folder / "script"
    path.write_text(done.stdout)
    return path


def read_until(terminal: int, mark: bytes) -> str:
    """What a shell writes up to `mark`."""
    found, end = b"", time.monotonic() + 60
    while mark not in found and time.monotonic() < end:
        if select.select([terminal], [], [], 0.2)[0]:
            found += os.read(terminal, 65536)
    assert mark in found, found
    return found.decode(errors="replace")


@pytest.mark.parametrize("shell", SHELLS)
def test_keys_complete_at_a_terminal(shell: str, tmp_path: Path) -> None:
    """Each line is typed up to a tab in a real shell, where `quire` is a function that shows its arguments."""
    script = scripted(shell, tmp_path)
    hub = tmp_path / "hub"
    for name in ("models--Qwen--Qwen3-4B-GGUF", "models--me--a-b", "datasets--Qwen--none"):
        (hub / name).mkdir(parents=True)
    command, function = SHELLS[shell]
    state = {
        "HF_HUB_CACHE": str(hub),
        "TERM": "dumb",
        "HOME": str(tmp_path),
        "XDG_CONFIG_HOME": str(tmp_path),
    }
    child, terminal = pty.fork()
    if child == 0:
        os.chdir(tmp_path)
        os.execvpe(command.split()[0], command.split(), {**os.environ, **state})
    try:
        os.write(terminal, f"{function}\nsource {script}; echo rea''dy\n".encode())
        read_until(terminal, b"ready\r\n")
        for typed, completed in [
            ("serv", "serve"),
            ("help qua", "help quantize"),
            ("bench lat", "bench latency"),
            ("models r", "models rm"),
            ("models rm --y", "models rm --yes"),
            ("serve --api-key-f", "serve --api-key-file"),
            ("chat --reasoning hi", "chat --reasoning hide"),
            ("chat --reasoning=hi", "chat --reasoning=hide"),
            ("completion fi", "completion fish"),
            ("chat Qw", "chat Qwen/Qwen3-4B-GGUF"),
            ("bench latency me/", "bench latency me/a-b"),
            ("serve --port 80 Qw", "serve --port 80 Qwen/Qwen3-4B-GGUF"),
            ("generate --model quire-stories-dr", "generate --model quire-stories-draft"),
            ("serve --spec-model quire-stories-eag", "serve --spec-model quire-stories-eagle3"),
            ("chat Qwen/Qwen3-4B-GGUF Qw", "chat Qwen/Qwen3-4B-GGUF Qw"),
        ]:
            os.write(terminal, f"quire {typed}\t\n".encode())
            said = read_until(terminal, b"]\r\n")
            assert f"got[{completed}]" in said.replace(" ]", "]"), (typed, said)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(terminal)


@pytest.mark.parametrize("shell", SHELLS)
def test_the_shell_reads_the_script(shell: str, tmp_path: Path) -> None:
    checked = subprocess.run([shell, "-n", str(scripted(shell, tmp_path))], capture_output=True, text=True)
    assert (checked.returncode, checked.stderr) == (0, "")


def test_models_are_names_of_the_cache_and_the_package(
    script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the variables that the hub's client reads; where there is no cache, the package's own remain."""
    own = {
        "quire-stories",
        "quire-stories-draft",
        "quire-stories-eagle3",
        "quire-stories-mlp",
        "quire-stories-mtp",
    }
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    assert completed(script, "quire serve ") == own
    (tmp_path / "hub" / "models--me--a").mkdir(parents=True)
    assert completed(script, "quire serve ") == own | {"me/a"}
    assert completed(script, "quire pull me") == {"me/a"}
