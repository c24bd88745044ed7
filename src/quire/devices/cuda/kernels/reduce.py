"""Reduces rows of logits: one program a row, in blocks of fixed size."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from quire.devices.cuda.launch import Launcher, launch
from quire.devices.cuda.tiles import Shape

BLOCK, WIDE = 4096, Shape(8, 1)
LOWEST = tl.constexpr(float("-inf"))


@triton.jit
def find_largest(logits, values, ids, width, stride, BLOCK: tl.constexpr):
    """The largest of a row and its lowest id: exact in any order."""
    row, at = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    best, where = tl.full([BLOCK], LOWEST, tl.float32), at
    for start in range(0, width, BLOCK):
        v = tl.load(logits + row * stride + start + at, mask=start + at < width, other=LOWEST)
        where = tl.where(v > best, start + at, where)
        best = tl.maximum(best, v)
    top = tl.max(best, 0)
    tl.store(values + row, top)
    tl.store(ids + row, tl.min(tl.where(best == top, where, width - 1), 0))


def largest(run: Launcher, logits: Any, values: Any, ids: Any) -> None:
    """The largest of each row [L, V] of float32 logits: values [L], and its id [L] int32, the lowest of equal ones."""
    grid = logits.shape[0], 1, 1
    launch(
        run, find_largest, grid, logits, values, ids, logits.shape[1], logits.stride(0), BLOCK=BLOCK, shape=WIDE
    )  # fmt: skip
