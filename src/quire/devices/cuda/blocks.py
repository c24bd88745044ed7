"""Blocks of quantized rows taken apart: codes side by side and their scales, as kernels read them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from quire.weights.layouts import Blocks
from quire.weights.layouts.blocks import KINDS
from quire.weights.layouts.blocks.scaled import floats_of
from quire.weights.tensor import Bytes, FloatArray, QuantTensor


@dataclass(frozen=True, slots=True)
class Head:
    """The scale in the first `size` bytes of a block, or of a row: how it is read, and the bytes of a scale of 1."""

    size: int
    one: bytes
    read: Callable[[Bytes], FloatArray]
    number: Any


def _power(raw: Bytes) -> FloatArray:
    return np.ldexp(np.float32(1), raw.astype(np.int32) - 127).astype(np.float32)


ONE = np.float32(1).tobytes()
HEADS: Mapping[str, Head] = {
    **{kind: Head(4, ONE, floats_of, torch.float8_e4m3fn) for kind in ("e4m3", "e4m3_32", "e4m3_128")},
    **{kind: Head(4, ONE, floats_of, torch.float8_e5m2) for kind in ("e5m2", "e5m2_32", "e5m2_128")},
    "mxfp8": Head(1, b"\x7f", _power, torch.float8_e4m3fn),
}


def taken_apart(tensor: QuantTensor) -> tuple[Any, FloatArray]:
    """The codes [O, K] of a tensor and its scales, of blocks [O, B] or of rows [O, 1].

    Codes are what the layout decodes where all scales are 1.
    """
    layout, raw = tensor.layout, np.array(tensor.codes)
    assert isinstance(layout, Blocks)
    kind, head = KINDS[layout.kind], HEADS[layout.kind]
    blocks = raw[:, None] if kind.row else raw.reshape(len(raw), -1, kind.nbytes)
    scales = head.read(blocks[..., : head.size].copy()).reshape(len(raw), -1)
    blocks[..., : head.size] = np.frombuffer(head.one, np.uint8)
    codes = torch.from_numpy(layout.dequantize(layout.tensor(raw))).to(head.number)
    return codes, scales
