"""The command line as a user types it, in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from quire.cli import COMMANDS


def quire(*args: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "quire.cli", *args], capture_output=True, text=True, input=stdin, timeout=120
    )


def test_help_lists_every_command() -> None:
    result = quire("--help")
    assert result.returncode == 0
    assert all(name.split()[0] in result.stdout for name in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command: str) -> None:
    result = quire(*command.split(), "--help")
    assert result.returncode == 0, result.stderr
    assert "--help" in result.stdout


def test_generate_prints_prompt_and_continuation(tiny_model: Callable[..., str]) -> None:
    args = ("generate", "Once", "--model", tiny_model(), "--temperature", "0", "--max-tokens", "5")
    first, second = quire(*args), quire(*args)
    assert first.returncode == 0, first.stderr
    assert first.stdout.startswith("Once")
    assert len(first.stdout) > len("Once\n")
    assert first.stdout == second.stdout
    from_stdin = quire("generate", "-", *args[2:], stdin="Once")
    assert from_stdin.stdout == first.stdout


def test_chat_answers_each_line(tiny_model: Callable[..., str]) -> None:
    args = ("chat", tiny_model(), "--max-tokens", "6", "--sampling-seed", "1")
    result = quire(*args, stdin="hello\n\n/new\nhello\n/quit\nnever read\n")
    assert result.returncode == 0, result.stderr
    answers = result.stdout.split("\n")
    assert len(result.stdout) > 0
    assert result.stdout[: len(result.stdout) // 2] == result.stdout[len(result.stdout) // 2 :], answers


def test_plan_counts_bytes(tiny_model: Callable[..., str]) -> None:
    result = quire("plan", tiny_model(dtype="bfloat16"), "--json")
    assert result.returncode == 0, result.stderr
    figures = json.loads(result.stdout)
    assert figures["kv_bytes_per_token"] == 2 * 3 * 2 * 16 * 2
    assert figures["parameters"] == sum(
        (320 * 48 * 2, 3 * (2 * 64 * 48 + 2 * 32 * 48 + 3 * 96 * 48), 3 * 2 * 48 + 48)
    )
    assert figures["total_bytes"] <= figures["available_bytes"]
    table = quire("plan", tiny_model())
    assert "KV per token" in table.stdout


def test_plan_needs_only_a_config(tiny_model: Callable[..., str], tmp_path: Path) -> None:
    model = Path(tiny_model(dtype="bfloat16"))
    whole = json.loads(quire("plan", str(model), "--json").stdout)
    result = quire("plan", "--config", str(model / "config.json"), "--json")
    assert result.returncode == 0, result.stderr
    figures = json.loads(result.stdout)
    same = ("parameters", "dtype", "kv_dtype", "weight_bytes", "kv_bytes_per_token")
    assert {key: figures[key] for key in same} == {key: whole[key] for key in same}
    assert "KV per token" in quire("plan", "--config", str(model / "config.json")).stdout
    values = json.loads((model / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**values, "attn_logit_softcapping": 30.0}))
    refused = quire("plan", "--config", str(tmp_path / "config.json"))
    assert refused.returncode == 1
    assert "attn_logit_softcapping = 30.0 is not understood" in refused.stderr
    both = quire("plan", str(model), "--config", str(tmp_path / "config.json"))
    assert "takes the place of a model" in both.stderr


def test_bench_latency_and_throughput_report_figures(tiny_model: Callable[..., str], tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    common = ("--model", tiny_model(), "--num-iters", "1", "--output-json", str(out))
    result = quire("bench", "latency", *common, "--input-len", "8", "--output-len", "4")
    assert result.returncode == 0, result.stderr
    figures = json.loads(out.read_text())
    assert figures["decode_tok_s"] > 0
    assert figures["decode_gb_s_limit"] > 0.01
    result = quire(
        "bench", "throughput", *common, "--num-prompts", "5", "--input-len", "8", "--output-len", "4"
    )
    assert result.returncode == 0, result.stderr
    assert json.loads(out.read_text())["output_tok_s"] > 0


def test_bench_throughput_reads_conversations(tiny_model: Callable[..., str], tmp_path: Path) -> None:
    talk = {"conversations": [{"from": "human", "value": "hello"}, {"from": "gpt", "value": "hi there"}]}
    (tmp_path / "talks.json").write_text(json.dumps([talk] * 3))
    args = ("bench", "throughput", "--model", tiny_model(), "--num-iters", "1", "--dataset-path")
    result = quire(*args, str(tmp_path / "talks.json"))
    assert result.returncode == 0, result.stderr
    assert "3 requests" in result.stdout
    bad = quire(*args, str(tmp_path / "none.json"))
    assert bad.returncode == 2
    assert "is not a ShareGPT JSON file" in bad.stderr


@pytest.mark.parametrize(
    ("args", "status", "message"),
    [
        (
            ("generate", "a", "--model", "./nowhere"),
            1,
            "quire: error: './nowhere' is neither",
        ),
        (("generate", "a", "--block-size", "0"), 2, "quire: error: --block-size must be at least 1"),
        (
            ("generate", "a", "--blocksize", "8"),
            2,
            "there is no option --blocksize; did you mean --block-size?",
        ),
        (("generate", "a", "--dtype", "float8"), 2, "--dtype"),
        (("generate", "a", "--top-p", "3"), 2, "--top-p must be at most 1"),
        (("nonsense",), 2, "there is no command 'nonsense'"),
    ],
)
def test_mistakes_are_one_clear_line(args: tuple[str, ...], status: int, message: str) -> None:
    result = quire(*args)
    assert result.returncode == status
    assert message in result.stderr
    assert "Traceback" not in result.stderr
