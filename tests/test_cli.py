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
    assert "3 requests" in " ".join(result.stdout.split())  # the title wraps
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


LLAMA_3_70B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "torch_dtype": "bfloat16",
}


@pytest.fixture
def plan_70b(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., dict[str, Any]]:
    """Plan a 70B model of floats, or one with a quantization_config, on a machine with limits that are given."""

    def plan(*options: str, about: dict[str, Any] | None = None) -> dict[str, Any]:
        config = LLAMA_3_70B if about is None else {**LLAMA_3_70B, "quantization_config": about}
        (tmp_path / "config.json").write_text(json.dumps(config))
        path, given = str(tmp_path / "config.json"), ("--machine-limits", "2000,300000")
        main(["plan", "--config", path, "--json", *given, *options])
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        return found

    return plan


@pytest.mark.parametrize(
    ("name", "about", "gigabytes"),
    [
        ("awq", {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}, 40),
        ("awq_marlin", {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}, 40),
        ("gptq", {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True}, 40),
        ("squeezellm", {"quant_method": "squeezellm", "wbits": 4}, 39),
        ("modelopt", {"quant_method": "modelopt", "quant_algo": "FP8", "exclude_modules": ["lm_head"]}, 72),
        (
            "modelopt_fp4",
            {"quant_method": "modelopt", "quant_algo": "NVFP4", "exclude_modules": ["lm_head"]},
            42,
        ),
    ],
)
def test_floats_are_planned_as_a_method_would_quantize_them(
    name: str, about: dict[str, Any], gigabytes: int, plan_70b: Callable[..., dict[str, Any]]
) -> None:
    planned, own = plan_70b("--quantization", name), plan_70b(about=about)
    for key in ("weights", "weight_bytes", "workspace_bytes", "decode_tok_s_bound"):
        assert planned[key] == own[key]
    assert planned["weight_bytes"] / 1e9 == pytest.approx(gigabytes, rel=0.08)
    # A config that says how it is quantized stays as it is, and another method is refused.
    assert plan_70b("--quantization", name, about=about)["weight_bytes"] == own["weight_bytes"]


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ((), "measured now"),
        (("--machine-limits", "measure"), "measured now"),
        (("--machine-limits", "50,900"), "given"),
    ],
    ids=["nothing", "measure", "numbers"],
)
def test_a_plan_says_where_its_limits_come_from(
    given: tuple[str, ...], told: str, tiny_model: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    main(["plan", tiny_model(), *given])
    assert f"upper bounds, by limits {told}" in capsys.readouterr().out


def test_a_plan_of_another_machine(plan_70b: Callable[..., dict[str, Any]]) -> None:
    """Memory, limits, batch, price and ranks of a machine that is not here."""
    given = ("--quantization", "awq", "--memory-gb", "80", "--gpu-memory-utilization", "0.9")
    one = plan_70b(*given, "--batch-size", "1", "--price-per-hour", "2")
    many = plan_70b(*given, "--batch-size", "32", "--price-per-hour", "2")
    assert one["read_gb_s"] == 2000
    assert one["total_bytes"] <= 0.9 * 80e9
    assert one["kv_tokens"] > 32 * 1024
    assert many["batch_tok_s_bound"] > 20 * one["batch_tok_s_bound"]
    assert one["batch_tok_s_bound"] == one["decode_tok_s_bound"]
    assert 0.9 < one["decode_tok_s_bound"] * one["weight_bytes"] / 2000e9 < 1.1  # but for a table
    spent = 2 / 3600 / many["batch_tok_s_bound"] * 1e6
    assert many["cost_per_million_tokens_bound"] == pytest.approx(spent)
    divided = plan_70b(*given, "--batch-size", "32", "-tp", "2", "--link-gbit", "4000")
    assert divided["weight_bytes"] < 0.6 * many["weight_bytes"]
    assert divided["batch_tok_s_bound"] > many["batch_tok_s_bound"]


@pytest.mark.parametrize("name", ["torchao", "gguf", "quark"])
def test_methods_without_a_usual_form_are_refused_for_floats(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_3_70B))
    refused = quire("plan", "--config", str(tmp_path / "config.json"), "--quantization", name)
    assert refused.returncode == 2
    assert f"--quantization {name}" in refused.stderr


def test_a_config_that_does_not_fit_the_memory_says_so(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_3_70B))
    refused = quire("plan", "--config", str(tmp_path / "config.json"), "--memory-gb", "80")
    assert refused.returncode == 1
    assert "parameters" in refused.stdout
    assert refused.stderr.count("\n") == 1
