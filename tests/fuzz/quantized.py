"""Fuzzes the readers of quantized checkpoints: settings, shapes, types and values that do not fit each other."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from quire.weights.checkpoint import open_checkpoint
from quire.weights.readers import load_reader
from tests.fuzz.mutate import mutate_json

Tensors = dict[str, Any]


def _i32(*shape: int) -> Any:
    return np.arange(np.prod(shape), dtype=np.int32).reshape(shape) * 0x01234567


def _f16(*shape: int) -> Any:
    return np.linspace(-1, 1, int(np.prod(shape)), dtype=np.float16).reshape(shape)


def _u8(*shape: int) -> Any:
    return np.arange(np.prod(shape), dtype=np.uint8).reshape(shape)


_GROUPS = {"config_groups": {"0": {"weights": {"num_bits": 4, "block_structure": [16, 16]}}}, "format": "x"}
_STATE = np.frombuffer(
    b'{"shape": [8, 64], "blocksize": 64, "nested_blocksize": 8, "nested_offset": 0.5}', np.uint8
)
SOUND: tuple[tuple[str, dict[str, Any], Tensors], ...] = (
    ("gptq", {"bits": 4, "group_size": 16, "sym": False, "dynamic": {"+:b": {"bits": 8}}},
     {"a.qweight": _i32(8, 16), "a.qzeros": _i32(4, 2), "a.scales": _f16(4, 16),
      "a.g_idx": np.arange(64, dtype=np.int32) // 16}),
    ("gptq", {"bits": 3, "group_size": -1, "sym": True}, {"a.qweight": _i32(6, 32), "a.scales": _f16(1, 32)}),
    ("awq", {"version": "gemm", "group_size": 32},
     {"a.qweight": _i32(64, 2), "a.qzeros": _i32(2, 2), "a.scales": _f16(2, 16)}),
    ("awq", {"version": "gemv", "group_size": 32},
     {"a.qweight": _i32(16, 8), "a.qzeros": _i32(16, 1), "a.scales": _f16(16, 8)}),
    ("auto-round", {"bits": 4, "group_size": 32, "packing_format": "auto_round:auto_gptq"},
     {"a.qweight": _i32(8, 16), "a.scales": _f16(2, 16)}),
    ("compressed-tensors", _GROUPS,
     {"a.weight_packed": _i32(8, 4), "a.weight_scale": _f16(8, 2), "a.weight_shape": np.array([8, 32]),
      "a.weight_zero_point": _i32(1, 2)}),
    ("compressed-tensors", _GROUPS, {"a.weight": _u8(8, 32).view(np.int8), "a.weight_scale": _f16(8, 1)}),
    ("modelopt", {"quantization": {"quant_algo": "W4A16_AWQ"}},
     {"a.weight": _u8(8, 32), "a.weight_scale": _f16(16, 2), "a.pre_quant_scale": _f16(32)}),
    ("quark", {}, {"a.weight": _u8(8, 32), "a.weight_scale": _u8(8, 2)}),
    ("bitsandbytes", {},
     {"a.weight": _u8(256, 1), "a.weight.absmax": _u8(8), "a.weight.quant_map": _f16(16),
      "a.weight.nested_quant_map": _f16(256), "a.weight.nested_absmax": _f16(1),
      "a.weight.quant_state.bitsandbytes__nf4": _STATE}),
    ("squeezellm", {"wbits": 4},
     {"a.qweight": _i32(8, 16), "a.lookup_table": _f16(16, 16), "a.rows": np.arange(17, dtype=np.int32),
      "a.cols": np.arange(16, dtype=np.int32), "a.vals": _f16(16)}),
    ("hqq", {},
     {"a.W_q": _u8(8, 32), "a.scale": _f16(16, 1), "a.zero": _f16(16, 1), "a.shape": np.array([8, 64]),
      "a.nbits": np.int32(4), "a.group_size": np.int32(32), "a.axis": np.int32(1)}),
    ("torchao", {},
     {"a._weight_qdata": _u8(8, 32).view(np.int8), "a._weight_scale": _f16(8, 2),
      "a._weight_zero_point": _u8(8, 2).view(np.int8)}),
    ("mxfp4", {}, {"a_blocks": _u8(2, 3, 2, 16), "a_scales": _u8(2, 3, 2)}),
)  # fmt: skip
VALUES = (0, -1, 1, 127, (1 << 31) - 1, -(1 << 31), 1 << 20)
DTYPES = (np.uint8, np.int8, np.int32, np.int64, np.float16, np.float32)


def fuzz_quantized(folder: Path) -> Callable[[Random], None]:
    def case(rng: Random) -> None:
        method, settings, sound = rng.choice(SOUND)
        tensors = {name: np.array(value) for name, value in sound.items()}
        if rng.random() < 0.3:
            settings = mutate_json(rng, settings)
        for _ in range(rng.randint(0, 2)):
            spoil(rng, tensors)
        save_file(
            {name: np.ascontiguousarray(t) for name, t in tensors.items()}, folder / "model.safetensors"
        )
        checkpoint = load_reader(method)(open_checkpoint(folder), settings)
        for name in checkpoint.names():
            shape = checkpoint.shape(name)
            assert checkpoint.get(name).shape == shape
            if checkpoint.layout(name) is not None:
                rows = np.arange(np.prod(shape[:-1]), dtype=np.intp)
                assert checkpoint.quantized(name, rows).dequantize().shape == (len(rows), shape[-1])

    return case


def spoil(rng: Random, tensors: Tensors) -> None:
    """Remove, retype, reshape or fill one tensor, or give it a value at the edge."""
    name = rng.choice(list(tensors))
    tensor, kind = tensors[name], rng.randrange(6)
    if kind == 0 and len(tensors) > 1:
        del tensors[name]
    elif kind == 1:
        with np.errstate(all="ignore"):
            tensors[name] = tensor.astype(rng.choice(DTYPES))
    elif kind == 2:
        tensors[name] = tensor.reshape(rng.choice(((-1,), (1, -1), (-1, 1))))
    elif kind == 3 and tensor.ndim:
        tensors[name] = tensor[: rng.randrange(len(tensor) + 1)]
    elif tensor.size:
        edge = rng.choice((np.nan, np.inf)) if tensor.dtype.kind == "f" else rng.choice(VALUES)
        flat = tensor.reshape(-1)
        count = 1 if kind == 4 else flat.size
        flat[rng.randrange(flat.size) :][:count] = np.array([edge]).astype(tensor.dtype)[0]
