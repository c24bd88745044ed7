"""MXFP4 as gpt-oss publishes it: NAME_blocks [..., O, K / 32, 16] and NAME_scales [..., O, K / 32] are the weight NAME.

A byte of a block holds two elements, the first in its low half. A scale is an exponent: 2^(scale - 127).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from quire.errors import ModelError
from quire.weights.checkpoint.protocol import Checkpoint, Unquantized
from quire.weights.layouts import AnyLayout, Blocks
from quire.weights.layouts.blocks.make import mxfp4_rows
from quire.weights.tensor import Array, Bytes, QuantTensor, Rows

BLOCKS, SCALES = "_blocks", "_scales"
BYTES = np.dtype(np.uint8)
MXFP4_BLOCKS = Blocks("mxfp4")
VALUES = np.dtype(ml_dtypes.bfloat16)  # holds every value of the format


class MXFP4Checkpoint(Unquantized):
    """A `Checkpoint` of weights [..., O, K]. Raises ModelError for blocks that are not whole."""

    def __init__(self, checkpoint: Checkpoint, settings: Mapping[str, Any]) -> None:
        self._inner = checkpoint
        present = list(checkpoint.names())
        self._quantized = {n.removesuffix(BLOCKS) for n in present if n.endswith(BLOCKS)}
        parts = {name + suffix for name in self._quantized for suffix in (BLOCKS, SCALES)}
        self._names = [*(name for name in present if name not in parts), *sorted(self._quantized)]
        for name in self._quantized:
            self._check(name, present)

    def _check(self, name: str, present: list[str]) -> None:
        blocks, scales, inner = name + BLOCKS, name + SCALES, self._inner
        if scales not in present:
            raise ModelError(f"{inner.path(blocks)}: missing tensor {scales}: MXFP4 blocks need their scales")
        for part in (blocks, scales):
            if inner.dtype(part) != BYTES:
                raise ModelError(f"{inner.path(part)}: tensor {part} is {inner.dtype(part)}; MXFP4 is uint8")
        shape = inner.shape(scales)
        if len(shape) < 2 or inner.shape(blocks) != (*shape, 16):
            found = list(inner.shape(blocks)), list(shape)
            raise ModelError(
                f"{inner.path(blocks)}: tensor {name}: blocks {found[0]} do not fit scales {found[1]}"
            )

    def names(self) -> Iterable[str]:
        return self._names

    def shape(self, name: str) -> tuple[int, ...]:
        if name not in self._quantized:
            return self._inner.shape(name)
        *rows, groups = self._inner.shape(name + SCALES)
        return (*rows, groups * 32)

    def dtype(self, name: str) -> np.dtype[Any]:
        return VALUES if name in self._quantized else self._inner.dtype(name)

    def path(self, name: str) -> Path:
        return self._inner.path(name + BLOCKS if name in self._quantized else name)

    def get(self, name: str) -> Array:
        if name not in self._quantized:
            return self._inner.get(name)
        shape = self.shape(name)
        rows = np.arange(np.prod(shape[:-1]), dtype=np.intp)
        return self.quantized(name, rows).dequantize().astype(VALUES).reshape(shape)

    def layout(self, name: str) -> AnyLayout | None:
        return MXFP4_BLOCKS if name in self._quantized else None

    def quantized(self, name: str, rows: Rows) -> QuantTensor:
        blocks, scales = self._inner.get(name + BLOCKS), self._inner.get(name + SCALES)
        groups = scales.shape[-1]
        return mxfp4_blocks(blocks.reshape(-1, groups, 16)[rows], scales.reshape(-1, groups)[rows])


def mxfp4_blocks(packed: Bytes, exponents: Bytes) -> QuantTensor:
    """Make rows of blocks of 16 bytes [O, G, 16], neighbouring elements in a byte, and their exponents [O, G]."""
    return MXFP4_BLOCKS.tensor(mxfp4_rows(packed, exponents))
