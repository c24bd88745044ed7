"""vLLM's flags: the table covers all, the parser and `LLM` follow it, and the page shows it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, AsyncLLM
from quire.cli import Program, main
from quire.commands import flags, serve
from quire.config import SECTIONS, EngineConfig
from quire.errors import ConfigError, ModelError
from quire.flags.arguments import integer, rewritten
from quire.flags.table import ForeignFlag, engine_flags, vllm_data
from quire.ranks.numa import parse_cores
from quire.serve.options import ServerConfig, split_options
from tests.shared import REFERENCE
from tests.tiny import write_checkpoint

FOREIGN, SHARED = engine_flags(), vllm_data()["options"].split()
NAMES = REFERENCE / "vllm-0.32-names.txt"
OPTIONS = {f.name for part in (*SECTIONS.values(), ServerConfig) for f in fields(part)} | {"seed", "config"}


def parsed(
    monkeypatch: pytest.MonkeyPatch, *args: str, program: Program | None = None
) -> tuple[EngineConfig, ServerConfig]:
    seen: list[Any] = []
    monkeypatch.setattr(
        serve,
        "COMMAND",
        type(serve.COMMAND)(lambda *configs: seen.append(configs), ServerConfig, arguments=("model",)),
    )
    main(["serve", *args], program)
    engine, server = seen[0]
    return engine, server


def test_the_table_has_every_flag() -> None:
    ours = [*SHARED, *(name for name, flag in FOREIGN.items() if not flag.older)]
    assert len(ours) == len(set(ours)) == 317
    assert set(SHARED) <= OPTIONS
    in_both = OPTIONS & set(FOREIGN)  # options of the server that LLM(...) takes without effect, or refuses
    known = {"disable_log_stats", "data_parallel_size"}
    assert in_both == known, "these are options now: move them from the table to SHARED"
    if NAMES.exists():
        theirs = NAMES.read_text().partition("# flags")[2].partition("## LLM")[0].split()
        assert sorted(ours) == sorted(flag[2:].replace("-", "_") for flag in theirs)


def test_an_option_prevails_over_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that an option that is new does not vanish, or stop the server, until the table follows."""
    monkeypatch.setitem(
        FOREIGN, "enable_sleep_mode", ForeignFlag("enable_sleep_mode", "switch", "Nothing sleeps")
    )
    assert parsed(monkeypatch, "m", "--enable-sleep-mode")[1].enable_sleep_mode
    assert split_options({"enable_sleep_mode": True})[1].enable_sleep_mode


def test_the_page_shows_the_table() -> None:
    written = (Path(__file__).parents[2] / "docs" / "flags.md").read_text()
    assert written == flags.page(), "run `python -m quire.commands.flags > docs/flags.md`"


def test_values_are_written_as_vllm_takes_them(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine, server = parsed(
        monkeypatch,
        "a/model", "--served-model-name", "a", "b", "--allowed-origins", '["http://ui", "http://x"]',
        "--max_model_len=4k", "--max-num-batched-tokens", "2K", "--dtype", "half", "--enforce-eager", "-O3",
        "--pipeline-parallel-size", "1", "--trust-remote-code", "--hf-overrides.rope_theta", "1e6",
        "--hf-overrides.rope_scaling.factor=4", "--cudagraph-capture-sizes", "2", "1",
        "--cudagraph-metrics", "--ir-op-priority", "a", "b", "--max-cudagraph-capture-size", "1",
        "--no-enable-chunked-prefill",
    )  # fmt: skip
    assert server.served_model_name == ("a", "b")
    assert server.allowed_origins == ("http://ui", "http://x")
    assert (engine.model.max_model_len, engine.scheduler.max_num_batched_tokens) == (4000, 2048)
    assert (engine.model.model, engine.model.dtype) == ("a/model", "float16")
    assert engine.device.enforce_eager
    assert engine.device.cudagraph_capture_sizes == ("2", "1")
    assert engine.device.max_cudagraph_capture_size == 1
    assert engine.model.config_changes == {"rope_theta": 1e6, "rope_scaling": {"factor": 4}}
    notices = [record.getMessage() for record in caplog.records]
    assert len([line for line in notices if "changes nothing" in line]) == 4, notices
    assert all("\n" not in line for line in notices)
    assert parsed(monkeypatch, "--model", "m", "--max-model-len", "auto")[0].model.model == "m"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (
            ("--data-parallel-size-local", "2"),
            "--data-parallel-size-local 2 is not supported: a server has one engine",
        ),
        (("--default-mm-loras", "{}"), "--default-mm-loras {} is not supported"),
        (("--worker-cls", "a.B"), "--worker-cls a.B is not supported"),
        (("--mamba-ssm-cache-dtype", "bfloat16"), "recurrent states are float32"),
        (("--mamba-cache-mode", "none"), "--state-cache-fraction (0: none)"),
    ],
)
def test_flags_that_would_change_a_result_are_refused(args: tuple[str, ...], message: str) -> None:
    command = [sys.executable, "-m", "quire.cli", "serve", *args]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert result.returncode == 2
    assert message in result.stderr
    assert "nearest is" in result.stderr
    assert result.stderr.count("\n") == 1


def test_sizes() -> None:
    assert [integer(text) for text in ("7", "1k", "1K", "1.5m", "2G")] == [7, 1000, 1024, 1500000, 2 << 30]
    for text in ("k", "1.2345k", "1kb", "1e-3"):
        with pytest.raises(ValueError, match=r".*"):
            integer(text)
    assert rewritten(["--a_b.c", "x", "--a-b.d", "2"]) == ["--a-b", '{"c":"x","d":2}']
    assert parse_cores("0-2,5", "") == {0, 1, 2, 5}
    with pytest.raises(ConfigError, match="no list of cores"):
        parse_cores("0-x", "--numa-bind-cpus")


def test_yaml_files_take_them_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("max-model-len: 4k\nenforce-eager: true\nserved-model-name: [a, b]\n")
    engine, server = parsed(monkeypatch, "--config", str(path))
    assert engine.model.max_model_len == 4000
    assert server.served_model_name == ("a", "b")


def test_llm_takes_every_name_of_vllms(
    tiny_model: Callable[..., str], caplog: pytest.LogCaptureFixture
) -> None:
    with LLM(
        tiny_model(), cudagraph_metrics=True, tensor_parallel_size=1, max_model_len=64, dtype="half"
    ) as llm:
        assert llm.config.model.dtype == "float16"
    assert "--cudagraph-metrics changes nothing" in caplog.text
    with pytest.raises(ConfigError, match="data_parallel_size 2 is not supported"):
        LLM(tiny_model(), data_parallel_size=2)
    if NAMES.exists():
        line = next(part for part in NAMES.read_text().splitlines() if "__init__ ( model, runner" in part)
        for name in line.partition("(")[2].partition(")")[0].replace(" ", "").split(","):
            assert name in OPTIONS or name in FOREIGN, name


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hf_overrides": "x"}, "hf_overrides must be a JSON object"),
        ({"override_generation_config": {"temprature": 1}}, "override_generation_config: .*temprature"),
        ({"pooler_config": {"pooling_type": "SOME"}}, "pooler_config: pooling_type 'SOME'"),
        ({"pooler_config": {"task": "dance"}}, "pooler_config: task 'dance'"),
        ({"pooler_config": {"use_activation": 1}}, "pooler_config: use_activation"),
        (
            {"structured_outputs_config": {"disable_additional_properties": True}},
            "disable_additional_properties",
        ),
        ({"rope_theta": 5.0, "hf_overrides": {"rope_theta": 6.0}}, "contradicts"),
        ({"logits_processors": ("os:nothing",)}, "logits_processors 'os:nothing' cannot be imported"),
    ],
)
def test_wrong_options_are_named(
    tiny_model: Callable[..., str], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(tiny_model(), **options)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "bench serve --use-beam-search",
            "--use-beam-search is not supported: beam search is asked for in the body",
        ),
        ("bench serve --lora-modules a b", "nearest is --model"),
        ("bench latency --n 2", "--n 2 is not supported: a prompt has one output"),
        ("bench throughput --dataset-name sonnet", "nearest is --dataset-path"),
    ],
)
def test_flags_of_vllms_benchmarks_are_known(
    line: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(line.split())
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_a_program_may_have_other_defaults(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A file of options prevails over them, and a flag over the file."""
    program = Program("other", defaults={"serve": {"host": "0.0.0.0", "gpu_memory_utilization": 0.9}})
    engine, server = parsed(monkeypatch, "m", program=program)
    assert (server.host, engine.cache.gpu_memory_utilization) == ("0.0.0.0", 0.9)
    file = tmp_path / "options.yaml"
    file.write_text("host: 127.0.0.2\ngpu-memory-utilization: 0.4\n")
    engine, server = parsed(
        monkeypatch, "m", "--config", str(file), "--gpu-memory-utilization", "0.3", program=program
    )
    assert (server.host, engine.cache.gpu_memory_utilization) == ("127.0.0.2", 0.3)
    assert parsed(monkeypatch, "m")[1].host == "127.0.0.1"


def test_errors_of_both_classes_spell_options_as_arguments() -> None:
    for make in (LLM, AsyncLLM.from_options):
        with pytest.raises(ConfigError, match=r"^max_model_len 1000000000 is more than"):
            make("quire-stories", max_model_len=10**9)


def test_errors_of_models_spell_options_as_arguments_too(tmp_path: Path) -> None:
    quantized = {"quant_method": "gptq", "bits": 4, "group_size": 16}
    write_checkpoint(tmp_path, quantization_config=quantized)
    for make in (LLM, AsyncLLM.from_options):
        with pytest.raises(ModelError, match=": load_format dummy makes float weights"):
            make(str(tmp_path), load_format="dummy")
