"""Quantized checkpoints whose tensors are damaged: each is an error that names the tensor, before a value is used."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from quire.errors import ModelError
from quire.quantize import formats
from quire.quantize.grid import Grid
from quire.quantize.methods import fit_tables
from quire.weights.checkpoint import open_checkpoint
from quire.weights.checkpoint.safetensors import write_safetensors
from quire.weights.readers import load_reader
from quire.weights.readers.packed_modules import ModuleCheckpoint

ROWS, COLUMNS = 32, 128
WEIGHT = np.random.default_rng(0).standard_normal((ROWS, COLUMNS)).astype(np.float32)
E4M3 = ml_dtypes.float8_e4m3fn
Tensors = dict[str, Any]


def gptq() -> Tensors:
    return formats.gptq_tensors(Grid(4, 32, True).round(WEIGHT), 4, 32)[0]


def awq() -> Tensors:
    return formats.awq_tensors(Grid(4, 32, False).round(WEIGHT))[0]


def squeezellm() -> Tensors:
    return formats.squeezellm_tensors(*fit_tables(WEIGHT, np.ones(COLUMNS, np.float32), 4), 4)[0]


def sparse() -> Tensors:
    starts = np.arange(ROWS + 1, dtype=np.int32)
    return {**squeezellm(), "rows": starts, "cols": starts[:-1], "vals": np.ones(ROWS, np.float32)}


def fp8() -> Tensors:
    return formats.fp8_tensors(WEIGHT)[0]


def blocks() -> Tensors:
    return {"weight": WEIGHT.astype(E4M3), "weight_scale_inv": np.ones((1, 1), np.float32)}


def nvfp4() -> Tensors:
    return formats.nvfp4_tensors(WEIGHT, 4.0)[0]


def mxfp4() -> Tensors:
    return formats.mxfp4_tensors(WEIGHT)[0]


def packed() -> Tensors:
    codes = Grid(4, 32, True).round(WEIGHT)
    return {
        "weight_packed": formats.stream(codes.codes, 4).view(np.int32),
        "weight_scale": codes.scales,
        "weight_shape": np.array([ROWS, COLUMNS], np.int64),
    }


GPTQ = ("gptq", {"bits": 4, "group_size": 32})
AWQ = ("awq", {"bits": 4, "group_size": 32})
SQUEEZE = ("squeezellm", {"wbits": 4})
CT = ("compressed-tensors", {"config_groups": {"g": {"weights": {"num_bits": 4}}}})
FP8 = ("fp8", {"weight_block_size": [128, 128]})
MODELOPT = ("modelopt", {"quant_algo": "NVFP4"})
NAN = np.float32(np.nan)

CASES: list[tuple[tuple[str, dict[str, Any]], Callable[[], Tensors], dict[str, Any], str]] = [
    (GPTQ, gptq, {"scales": np.ones((5, ROWS), np.float16)}, "a.scales must be one for each group"),
    (GPTQ, gptq, {"scales": np.full((4, ROWS), NAN, np.float16)}, "a.scales must be finite"),
    (GPTQ, gptq, {"g_idx": np.full(COLUMNS, 4, np.int32)}, "a.g_idx must be groups from 0 to 3"),
    (GPTQ, gptq, {"g_idx": np.full(COLUMNS, -7, np.int32)}, "a.g_idx must be groups from 0 to 3"),
    (GPTQ, gptq, {"g_idx": np.zeros(3, np.int32)}, "a.g_idx must be int32"),
    (GPTQ, gptq, {"qzeros": np.zeros((4, 9), np.int32)}, "a.qzeros must be int32"),
    (GPTQ, gptq, {"qzeros": np.zeros((4, 4), np.int32)}, "a.qzeros must be 8 or 7 everywhere"),
    (GPTQ, gptq, {"qweight": np.zeros((16, ROWS), np.float32)}, "a.qweight must be int32"),
    (GPTQ, gptq, {"scales": None}, "a.scales is missing"),
    (("gptq", {"bits": 4, "group_size": 48}), gptq, {}, "a.scales must be one for each group of 48"),
    (("gptq", {"bits": 4, "group_size": 0}), gptq, {}, "a.scales must be one for each group of 0"),
    (AWQ, awq, {"scales": np.ones((4, 24), np.float16)}, "a.qweight must be int32"),
    (AWQ, awq, {"qzeros": None}, "a.qzeros is missing"),
    (("awq", {"bits": 4, "group_size": 100}), awq, {}, "a.scales must be one for each group of 100"),
    (SQUEEZE, squeezellm, {"lookup_table": np.ones((ROWS, 8), np.float16)}, "a.lookup_table must be"),
    (
        SQUEEZE,
        squeezellm,
        {"lookup_table": np.full((ROWS, 16), NAN, np.float16)},
        "a.lookup_table must be finite",
    ),
    (SQUEEZE, sparse, {"rows": np.arange(ROWS + 1, dtype=np.int32)[::-1].copy()}, "a.rows must be ascending"),
    (SQUEEZE, sparse, {"rows": np.zeros(ROWS + 1, np.int32)}, "a.rows must be ascending"),
    (SQUEEZE, sparse, {"cols": np.full(ROWS, COLUMNS, np.int32)}, "a.cols must be columns from 0 to 127"),
    (SQUEEZE, sparse, {"vals": np.ones((ROWS, 1), np.float32)}, "a.vals must be a vector"),
    (SQUEEZE, sparse, {"vals": np.full(ROWS, NAN, np.float32)}, "a.vals must be finite"),
    (CT, fp8, {"weight_scale": np.ones((ROWS + 1, 1), np.float32)}, "a.weight_scale must be one in all"),
    (CT, fp8, {"weight_scale": np.full((ROWS, 1), NAN)}, "a.weight_scale must be finite"),
    (CT, fp8, {"weight": np.full((ROWS, COLUMNS), 0x7F, np.uint8).view(E4M3)}, "a.weight must be finite"),
    (
        CT,
        nvfp4,
        {"weight_scale": np.full((ROWS, 8), 0x7F, np.uint8).view(E4M3)},
        "a.weight_scale must be finite",
    ),
    (
        CT,
        nvfp4,
        {"weight_global_scale": np.zeros(1, np.float32)},
        "a.weight_global_scale must be greater than 0",
    ),
    (CT, nvfp4, {"weight_global_scale": None}, "a.weight_scale_2 is missing"),
    (CT, nvfp4, {"weight_scale": np.zeros((ROWS, 7), E4M3)}, "a.weight_scale must be"),
    (CT, mxfp4, {"weight_scale": np.full((ROWS, 4), 255, np.uint8)}, "a.weight_scale must be finite"),
    (CT, packed, {"weight_shape": np.array([ROWS, 1 << 40])}, "a.weight_packed must be the codes"),
    (
        CT,
        packed,
        {"weight_scale": np.ones((ROWS, 3), np.float32)},
        "a.weight_scale must be one for each group",
    ),
    (
        CT,
        packed,
        {"weight_g_idx": np.full(COLUMNS, 9, np.int32)},
        "a.weight_g_idx must be groups from 0 to 3",
    ),
    (FP8, blocks, {"weight_scale_inv": np.ones((2, 2), np.float32)}, "a.weight_scale_inv must be one in all"),
    (
        FP8,
        blocks,
        {"weight_scale_inv": np.full((1, 1), np.inf, np.float32)},
        "a.weight_scale_inv must be finite",
    ),
    (MODELOPT, nvfp4, {"pre_quant_scale": np.ones(3, np.float32)}, "a.pre_quant_scale must be"),
]


@pytest.mark.parametrize(
    ("method", "make", "damage", "message"), CASES, ids=lambda v: v if isinstance(v, str) else ""
)
def test_damage_is_named(
    method: tuple[str, dict[str, Any]],
    make: Callable[[], Tensors],
    damage: dict[str, Any],
    message: str,
    tmp_path: Path,
) -> None:
    def read(tensors: Tensors) -> None:
        named = {f"a.{name}": array for name, array in tensors.items() if array is not None}
        write_safetensors(tmp_path / "model.safetensors", named)
        checkpoint = load_reader(method[0])(open_checkpoint(tmp_path), settings=method[1])
        assert isinstance(checkpoint, ModuleCheckpoint)
        checkpoint.get("a.weight")
        if checkpoint.layout("a.weight") is not None:
            checkpoint.quantized("a.weight", np.arange(ROWS))

    if damage:
        read(make())  # whole, it is read
    with pytest.raises(ModelError, match=message):
        read({**make(), **damage})
