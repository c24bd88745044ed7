"""The command line as a user types it, in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quire.cli import COMMANDS, main


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
    idle = quire("plan", "--config", str(model / "config.json"), "--revision", "x")
    assert (idle.returncode, "--revision means nothing here" in idle.stderr) == (2, True)
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


@pytest.mark.parametrize(
    ("options", "differs"),
    [
        (["-tp", "2"], "weight_bytes"),
        (["-pp", "3"], "stages"),
        (["--price-per-hour", "12"], "cost_per_month"),
        (["--batch-size", "16"], "batch_size"),
        (["--input-len", "9"], "input_len"),
        (["--output-len", "9"], "sequence_len"),
        (["--max-num-seqs", "4", "--max-num-batched-tokens", "64"], "workspace_bytes"),
        (["--kv-cache-dtype", "int8"], "kv_bytes_per_token"),
        (["--quantization", "int8"], "weight_bytes"),
        (["--max-model-len", "32"], "sequence_bytes"),
        (["--enable-lora"], "workspace_bytes"),
    ],
)
def test_options_mean_something_to_a_plan_of_a_config(
    options: list[str], differs: str, tiny_model: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    def figures(*more: str) -> dict[str, Any]:
        main(["plan", "--config", str(Path(tiny_model()) / "config.json"), "--json", *more])
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        return found

    plain, given = figures(), figures(*options)
    assert plain.get(differs) != given[differs]
    assert "available_bytes" not in given


def test_a_plan_that_does_not_fit_shows_its_table_first(tiny_model: Callable[..., str]) -> None:
    result = quire("plan", tiny_model(), "--max-num-batched-tokens", "1e9")
    assert result.returncode == 1
    assert "workspace" in result.stdout
    assert result.stderr.count("\n") == 1
    assert "--quantization int8 or int4" in result.stderr
