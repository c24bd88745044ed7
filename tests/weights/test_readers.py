"""Quantized checkpoints: how their method is found, and that none without a reader is taken for plain weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from quire.errors import ModelError
from quire.weights.checkpoint import open_checkpoint
from quire.weights.readers import find_quantization
from quire.weights.readers.mxfp4 import MXFP4Checkpoint
from tests.models import inspect_model
from tests.tiny import write_checkpoint

MODELOPT = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}}


@pytest.mark.parametrize(
    ("file", "settings", "method"),
    [
        ("hf_quant_config.json", MODELOPT, "modelopt"),
        ("quantize_config.json", {"bits": 4, "group_size": 128}, "gptq"),
        ("quant_config.json", {"w_bit": 4, "version": "gemm"}, "awq"),
        ("quant_config.json", {"wbits": 4}, "squeezellm"),
        ("quantization_config.json", {"quant_method": "intel/auto-round"}, "auto-round"),
    ],
)
def test_a_method_named_beside_the_config_is_not_overlooked(
    file: str, settings: dict[str, Any], method: str, tmp_path: Path
) -> None:
    (tmp_path / file).write_text(json.dumps(settings))
    found = find_quantization({}, "config.json", tmp_path)
    assert found is not None
    assert found.method == method
    assert found.reader()


@pytest.mark.parametrize(
    ("name", "method", "settings"),
    [
        ("gptq_model-4bit-128g.safetensors", "gptq", {"bits": 4, "group_size": 128}),
        ("gptq_model-8bit--1g.safetensors", "gptq", {"bits": 8, "group_size": -1}),
        ("Wizard-7B-GPTQ-4bit-128g.act.order.safetensors", "gptq", {"bits": 4, "desc_act": True}),
        ("sq-llama-7b-w3-s0.pt", "squeezellm", {"wbits": 3}),
        ("model.safetensors", None, {}),
        ("vicuna.safetensors", None, {}),
    ],
)
def test_old_repositories_tell_the_method_in_the_name_of_their_file(
    name: str, method: str | None, settings: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / name).touch()
    found = find_quantization({}, "config.json", tmp_path)
    assert (None if found is None else found.method) == method
    assert found is None or settings.items() <= found.settings.items()


def test_weights_of_any_single_name_are_found(tmp_path: Path) -> None:
    save_file({"a": np.ones(3, np.float32)}, tmp_path / "4bit-128g-00001-of-00001.safetensors")
    index = {"weight_map": {"a": "4bit-128g-00001-of-00001.safetensors"}}
    (tmp_path / "4bit-128g.safetensors.index.json").write_text(json.dumps(index))
    assert list(open_checkpoint(tmp_path).names()) == ["a"]


def test_a_method_without_a_reader_is_refused(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "model", quantization_config={"quant_method": "aqlm"})
    with pytest.raises(ModelError, match=r"quantized .* \(aqlm\)"):
        inspect_model(directory)


def test_floats_under_a_quantization_are_taken_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = write_checkpoint(tmp_path / "model", quantization_config={"quant_method": "fp8"})
    inspect_model(directory)
    assert "no quantized weight" in caplog.text


def test_the_config_prevails_over_files_beside_it(tmp_path: Path) -> None:
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(MODELOPT))
    found = find_quantization({"quantization_config": {"quant_method": "mxfp4"}}, "config.json", tmp_path)
    assert found is not None
    assert (found.method, found.where) == ("mxfp4", "config.json: quantization_config")
    assert found.section()["quant_method"] == "mxfp4"
    assert find_quantization({}, "config.json", None) is None


@pytest.mark.parametrize("content", ["[]", "{", '"fp8"'])
def test_a_file_that_is_no_object_is_refused(content: str, tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "model")
    (directory / "hf_quant_config.json").write_text(content)
    with pytest.raises(ModelError, match=r"hf_quant_config\.json"):
        inspect_model(directory)


def mxfp4_file(path: Path, **changes: Any) -> MXFP4Checkpoint:
    rng = np.random.default_rng(0)
    tensors = {
        "experts.up_blocks": rng.integers(0, 256, (2, 3, 4, 16), np.uint8),
        "experts.up_scales": rng.integers(120, 130, (2, 3, 4), np.uint8),
        "norm.weight": np.ones(8, np.float32),
    }
    tensors |= changes
    save_file({name: t for name, t in tensors.items() if t is not None}, path / "model.safetensors")
    return MXFP4Checkpoint(open_checkpoint(path), {})


def test_mxfp4_blocks_are_one_weight(tmp_path: Path) -> None:
    checkpoint = mxfp4_file(tmp_path)
    assert set(checkpoint.names()) == {"experts.up", "norm.weight"}
    assert checkpoint.shape("experts.up") == (2, 3, 128)
    values = checkpoint.get("experts.up").astype(np.float32)
    blocks, scales = (open_checkpoint(tmp_path).get(f"experts.up_{part}") for part in ("blocks", "scales"))
    fp4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
    assert values[1, 2, 33] == fp4[blocks[1, 2, 1, 0] >> 4] * 2.0 ** (int(scales[1, 2, 1]) - 127)
    some = checkpoint.quantized("experts.up", np.array([5, 0]))
    assert some.dequantize().tobytes() == values.reshape(6, 128)[[5, 0]].tobytes()
    assert checkpoint.layout("norm.weight") is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"experts.up_scales": None}, "missing tensor experts.up_scales"),
        ({"experts.up_scales": np.zeros((2, 3, 4), np.float32)}, "MXFP4 is uint8"),
        ({"experts.up_scales": np.zeros((2, 3, 5), np.uint8)}, "do not fit"),
        ({"experts.up_blocks": np.zeros((2, 3, 4, 8), np.uint8)}, "do not fit"),
    ],
)
def test_mxfp4_that_is_not_whole_is_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=message):
        mxfp4_file(tmp_path, **changes)
