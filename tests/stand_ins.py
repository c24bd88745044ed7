"""Makes checkpoints with random codes in published formats, where those that the formats' libraries made are absent."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import load_file, save_file

from tests.tiny import write_checkpoint

SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "head_dim": 16}
GROUP = 32
Pack = Callable[[np.random.Generator, int, int], dict[str, Any]]


def words(rng: np.random.Generator, *shape: int) -> Any:
    """Eight random codes of 4 bits in each int32."""
    return rng.integers(-(1 << 31), 1 << 31, shape, dtype=np.int64).astype(np.int32)


def scales(rng: np.random.Generator, *shape: int) -> Any:
    """Such that weights of 4 bits are of the size of the tiny models' own."""
    return rng.uniform(0.01, 0.03, shape).astype(np.float16)


def awq(rng: np.random.Generator, rows: int, columns: int) -> dict[str, Any]:
    zeros = words(rng, columns // GROUP, rows // 8)
    factors = scales(rng, columns // GROUP, rows)
    return {".qweight": words(rng, columns, rows // 8), ".qzeros": zeros, ".scales": factors}


def gptq(rng: np.random.Generator, rows: int, columns: int) -> dict[str, Any]:
    """With act-order: neighbouring columns are of different groups."""
    groups = rng.permutation(np.arange(columns, dtype=np.int32) // GROUP)
    zeros = words(rng, columns // GROUP, rows // 8)
    factors = scales(rng, columns // GROUP, rows)
    return {
        ".qweight": words(rng, columns // 8, rows),
        ".qzeros": zeros,
        ".scales": factors,
        ".g_idx": groups,
    }


def int8(rng: np.random.Generator, rows: int, columns: int) -> dict[str, Any]:
    codes = rng.integers(-127, 128, (rows, columns), dtype=np.int8)
    return {".weight": codes, ".weight_scale": scales(rng, rows, 1).astype(np.float32) / 16}


def fp8(rng: np.random.Generator, rows: int, columns: int) -> dict[str, Any]:
    codes = rng.standard_normal((rows, columns)).astype(ml_dtypes.float8_e4m3fn)
    return {".weight": codes, ".weight_scale_inv": np.full((1, 1), 0.2, np.float32)}


_INT8 = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False}
_TOKENS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
_LINEAR = {"weights": _INT8, "input_activations": _TOKENS, "targets": ["Linear"]}
METHODS: dict[str, tuple[Pack, dict[str, Any]]] = {
    "awq": (
        awq,
        {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"},
    ),
    "gptq": (
        gptq,
        {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": True, "sym": False},
    ),
    "int8": (
        int8,
        {
            "quant_method": "compressed-tensors",
            "format": "int-quantized",
            "config_groups": {"group_0": _LINEAR},
            "ignore": ["lm_head"],
        },
    ),
    "fp8": (fp8, {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}),
}


def write_quantized(path: Path, method: str) -> Path:
    """A tiny Llama whose projections have random codes in the format of `method`."""
    pack, settings = METHODS[method]
    write_checkpoint(path, "llama", "float32", **SIZES, quantization_config=settings)
    rng, tensors = np.random.default_rng(0), {}
    for name, value in load_file(path / "model.safetensors").items():
        if "_proj" in name:
            parts = pack(rng, *value.shape)
            tensors.update({name.removesuffix(".weight") + part: codes for part, codes in parts.items()})
        else:
            tensors[name] = value
    save_file(
        {name: np.ascontiguousarray(value) for name, value in tensors.items()}, path / "model.safetensors"
    )
    assert json.loads((path / "config.json").read_text())["quantization_config"] == settings
    return path
