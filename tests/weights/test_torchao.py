"""Weights that torchao packs here. It is no dependency of the tests, because transformers imports it wherever it is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.weights.test_libraries import COLUMNS, ROWS, check, weight

torchao = pytest.importorskip("torchao.quantization")
flattening = pytest.importorskip("torchao.prototype.safetensors.safetensors_support")


def flattened(path: Path, config: Any) -> Any:
    """A linear layer that torchao quantized, written to a file; returns its weight."""
    module = torch.nn.ModuleDict({"a": torch.nn.Linear(COLUMNS, ROWS, bias=False)})
    module["a"].weight = torch.nn.Parameter(weight())
    torchao.quantize_(module, config)
    tensors, metadata = flattening.flatten_tensor_state_dict(module.state_dict())
    texts = {k: v if isinstance(v, str) else json.dumps(v) for k, v in metadata.items()}
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()}, path / "model.safetensors", texts
    )
    return module["a"].weight


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 8])
@pytest.mark.parametrize("size", [32, 128, None])
def test_torchao_integers(bits: int, size: int | None, tmp_path: Path) -> None:
    grain = torchao.PerAxis(0) if size is None else torchao.PerGroup(size)
    config = torchao.IntxWeightOnlyConfig(weight_dtype=getattr(torch, f"int{bits}"), granularity=grain)
    check(tmp_path, "torchao", {}, flattened(tmp_path, config).dequantize(), 1e-6)


@pytest.mark.parametrize(
    "config",
    [
        torchao.Int8WeightOnlyConfig(version=2),
        torchao.Int8DynamicActivationInt8WeightConfig(version=2),
        torchao.Float8WeightOnlyConfig(version=2),
    ],
    ids=lambda config: type(config).__name__,
)
def test_torchao_bytes(config: Any, tmp_path: Path) -> None:
    check(tmp_path, "torchao", {}, flattened(tmp_path, config).dequantize(), 1e-6)
