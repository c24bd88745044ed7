"""Fields of blocks in numpy: float16, packed bits, scales by group. Knows no kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.weights.tensor import Bytes

Floats = NDArray[np.float32]
Decoder = Callable[[Bytes], Floats]


def half(blocks: Bytes, at: int) -> Floats:
    """The float16 at byte `at` of each block: [B, 1]."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view("<f2").astype(np.float32)


def nibbles(packed: Bytes, run: int) -> Bytes:
    """[B, n] -> [B, 2 n]: of each `run` bytes first the low halves, then the high halves."""
    pairs = packed.reshape(len(packed), -1, 1, run) >> np.array([[0], [4]], np.uint8)
    return (pairs & np.uint8(15)).reshape(len(packed), -1)


def crumbs(packed: Bytes) -> Bytes:
    """[B, n] -> [B, 4 n] of two bits: of each 32 bytes the lowest pairs, then the next."""
    parts = packed.reshape(len(packed), -1, 1, 32) >> np.array([[0], [2], [4], [6]], np.uint8)
    return (parts & np.uint8(3)).reshape(len(packed), -1)


def planes(packed: Bytes) -> Bytes:
    """[B, 32] -> [B, 256] of one bit: bit 0 of all bytes, then bit 1."""
    bits = packed[:, None, :] >> np.arange(8, dtype=np.uint8)[:, None]
    return (bits & np.uint8(1)).reshape(len(packed), -1)


def fifth_bits(packed: Bytes) -> Bytes:
    """Four bytes, little-endian: bit i belongs to element i; given as 16 or 0."""
    return np.unpackbits(packed, axis=1, bitorder="little") << np.uint8(4)


def by_group(scales: Floats, quanta: NDArray[Any], minima: Floats | None = None) -> Floats:
    """scales [B, G] times quanta [B, G n], less minima [B, G]."""
    values = scales[..., None] * quanta.reshape(*scales.shape, -1).astype(np.float32)
    if minima is not None:
        values -= minima[..., None]
    return np.asarray(values.reshape(len(scales), -1), np.float32)
