"""Weights and KV in few bits, as users ask for them: from the command line, in Python, built, and measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams, _native
from quire.build import build_engine
from quire.cli import main
from quire.config import EngineConfig
from quire.engine.directory import ASSETS, SHIPPED_MODEL
from quire.engine.plan import plan_engine
from quire.errors import ConfigError, ModelError
from quire.model.engine_dir import read_manifest
from quire.model.info import EngineLimits
from quire.weights.schemes import scheme, weights_name

MODEL = str(ASSETS / SHIPPED_MODEL)
KINDS: list[dict[str, Any]] = [
    {"quantization": "int8"},
    {"quantization": "int8wo"},
    {"quantization": "int4", "quantization_group_size": 32},
    {"quantization": "int4", "quantization_symmetric": False},
    {"quantization": "int4", "quantization_pure": True},
    {"quantization": "int4wo", "quantization_group_size": 128},
    {"quantization": "int8", "kv_cache_dtype": "int8"},
    {"quantization": "fp8", "kv_cache_dtype": "fp8"},
    {"quantization": "mxfp4"},
    {"quantization": "nvfp4", "quantization_activations": "int8"},
]
TEXT = (
    "Once upon a time there was a small boat with a red sail. It lived near a big bridge. Every day the boat "
    "asked the wind to play. One day the wind was tired and did not come. The boat was sad and waited. Then a "
    'little girl came to the water and said, "I can blow too!" She blew and blew, and the boat moved a bit. '
    "They laughed. The wind woke up, saw them and wanted to play again. From then on they all played together. "
) * 3


@pytest.mark.parametrize("options", KINDS, ids=lambda o: " ".join(map(str, o.values())))
def test_a_quantized_model_is_smaller_and_still_writes(options: dict[str, Any]) -> None:
    plain = plan_engine(EngineConfig.from_options(model=MODEL))
    small = plan_engine(EngineConfig.from_options(model=MODEL, **options))
    assert small.memory.weights < 0.65 * plain.memory.weights
    llm = LLM(MODEL, **options)
    params = SamplingParams(temperature=0, max_tokens=12)
    (output,) = llm.generate("Once upon a time", params, use_tqdm=False)
    assert output.outputs[0].text.startswith(", there was a little")


@pytest.mark.parametrize("options", KINDS[:5], ids=lambda o: " ".join(map(str, o.values())))
def test_the_backends_agree(options: dict[str, Any]) -> None:
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
    found = []
    for backend in ("native", "reference"):
        llm = LLM(MODEL, backend=backend, **options)
        (output,) = llm.generate(TEXT[:100], params, use_tqdm=False)
        rows = zip(output.prompt_token_ids, output.prompt_logprobs or [], strict=True)
        found.append([row[token].logprob for token, row in rows if row])
    # int8 rounding falls either way where sums differ in the last bit.
    assert found[0] == pytest.approx(found[1], abs=0.15)


@pytest.mark.parametrize("options", KINDS[:6], ids=lambda o: " ".join(map(str, o.values())))
def test_a_built_engine_writes_what_loading_does(options: dict[str, Any], tmp_path: Path) -> None:
    engine = tmp_path / "engine"
    build_engine(EngineConfig.from_options(model=MODEL, **options), engine, EngineLimits())
    params = SamplingParams(temperature=0.7, seed=5, max_tokens=24, logprobs=3)
    ours, theirs = (
        llm.generate("The dog", params, use_tqdm=False)[0].outputs[0]
        for llm in (LLM(str(engine)), LLM(MODEL, **options))
    )
    assert ours.token_ids == theirs.token_ids
    assert ours.logprobs == theirs.logprobs
    assert read_manifest(engine).quantized == scheme(**_scheme_of(options))


def _scheme_of(options: dict[str, Any]) -> dict[str, Any]:
    known = {
        "quantization": "name",
        "quantization_group_size": "group_size",
        "quantization_symmetric": "symmetric",
        "quantization_pure": "pure",
    }
    return {known[key]: value for key, value in options.items() if key in known}


def test_a_built_engine_cannot_be_quantized_otherwise(tmp_path: Path) -> None:
    engine = tmp_path / "engine"
    build_engine(EngineConfig.from_options(model=MODEL, quantization="int8"), engine, EngineLimits())
    LLM(str(engine), quantization="int8")
    with pytest.raises(ModelError, match="built with other weights"):
        LLM(str(engine), quantization="int4")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"quantization": "int3"}, "quantization must be one of auto, int8, int8wo, int4, int4wo"),
        ({"quantization": "int4", "quantization_group_size": 48}, "must be 32, 64 or 128, got 48"),
        (
            {"quantization": "int8", "quantization_pure": True},
            "quantization_pure is for quantization int4",
        ),
        ({"quantization_pure": True}, "quantization_pure is for quantization int4"),
        ({"kv_cache_dtype": "fp4"}, "kv_cache_dtype must be one of"),
    ],
)
def test_bad_options_say_what_is_allowed(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(MODEL, **options)


def test_names() -> None:
    assert scheme("auto") is None
    assert weights_name(None, "bfloat16") == "bfloat16"
    assert weights_name(scheme("int8"), "bfloat16") == "int8"
    assert weights_name(scheme("int4wo", 32, False), "float32") == "int4wo, groups of 32, asymmetric"
    assert weights_name(scheme("int4", pure=True), "float32") == "int4, groups of 64, pure"


def test_the_command_line_quantizes(capsys: pytest.CaptureFixture[str]) -> None:
    main(
        ["generate", "Once upon a time", "--temperature", "0", "--max-tokens", "8", "--quantization", "int8"]
    )
    assert "there was a little" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "most"),
    [
        (["--quantization", "int8"], 0.005),
        (["--quantization", "int4"], 0.1),
        (["--quantization", "int4", "--quantization-pure"], 0.15),
        (["--kv-cache-dtype", "int8"], 0.001),
    ],
    ids=lambda f: f[-1] if isinstance(f, list) else "",
)
def test_quality_is_measured(flags: list[str], most: float, tmp_path: Path) -> None:
    text, figures = tmp_path / "text.txt", tmp_path / "figures.json"
    text.write_text(TEXT)
    main(
        [
            "bench",
            "quality",
            MODEL,
            "--text",
            str(text),
            "--window",
            "64",
            *flags,
            "--output-json",
            str(figures),
        ]
    )
    found = json.loads(figures.read_text())
    assert 0 < found["kl_mean"] < most
    assert found["perplexity"] == pytest.approx(found["perplexity_float32"], rel=0.1)
    assert 80 < found["top1_agreement"] <= 100


def test_quality_in_float32_is_no_loss(tmp_path: Path) -> None:
    text, figures = tmp_path / "text.txt", tmp_path / "figures.json"
    text.write_text(TEXT)
    main(
        ["bench", "quality", MODEL, "--text", str(text), "--dtype", "float32", "--kv-cache-dtype", "float32"]
        + ["--output-json", str(figures)]
    )
    found = json.loads(figures.read_text())
    assert found["kl_mean"] == 0
    assert found["top1_agreement"] == 100


def test_an_empty_base_is_the_model_inside_the_package(tmp_path: Path) -> None:
    text, figures, output = tmp_path / "text.txt", tmp_path / "figures.json", str(tmp_path / "small")
    text.write_text(TEXT)
    main(["quantize", "-o", output, "--method", "rtn", "--bits", "4"])
    main(["bench", "quality", output, "--base", "", "--text", str(text), "--output-json", str(figures)])
    assert json.loads(figures.read_text())["kl_mean"] > 1e-3


@pytest.mark.parametrize(
    ("content", "message"), [(None, "name a text"), (b"", "too short"), (b"\xff\xfe", "cannot be read")]
)
def test_quality_wants_a_text(
    content: bytes | None, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "text.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(SystemExit):
        main(["bench", "quality", MODEL, *([] if content is None else ["--text", str(path)])])
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"quantization": "int8"}, "int8"),
        ({"quantization": "int4"}, "int8"),
        ({"quantization": "int8wo"}, "fp32"),
        ({"isa": "scalar", "dtype": "bfloat16"}, "fp32"),
        ({"isa": "avx512_bf16", "dtype": "bfloat16"}, "bf16"),
        ({"isa": "avx512_bf16", "dtype": "float32"}, "fp32"),
    ],
)
def test_speeds_stand_beside_the_peak_of_what_is_computed(options: dict[str, str], expected: str) -> None:
    if options.get("isa", "scalar") not in _native.available_isas():
        pytest.skip(f"this CPU has no {options['isa']}")
    assert plan_engine(EngineConfig.from_options(model=MODEL, **options)).arithmetic == expected


def test_quantized_checkpoints_stand_beside_the_same_peaks(tmp_path: Path) -> None:
    output = str(tmp_path / "small")
    main(["quantize", "-o", output, "--method", "rtn", "--bits", "4"])
    for activations, isa, expected in [
        ("float", "avx512_bf16", "bf16"),
        ("float", "scalar", "fp32"),
        ("int8", "scalar", "int8"),
    ]:
        if isa in _native.available_isas():
            options = {"isa": isa, "quantization_activations": activations}
            assert plan_engine(EngineConfig.from_options(model=output, **options)).arithmetic == expected
