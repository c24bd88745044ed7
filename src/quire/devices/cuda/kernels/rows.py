"""Rows of tables and of steps: embeddings, chosen rows, and rows as a weight's columns see them."""

from __future__ import annotations

from typing import Any

from quire.devices.cuda.language import tl, triton
from quire.devices.cuda.launch import Launcher, launch

BLOCK = 1024


@triton.jit
def gather(
    table, ids, out, width, table_stride, out_stride, offset, scale, SCALED: tl.constexpr, BLOCK: tl.constexpr
):
    row, d = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    source = (tl.load(ids + row) + offset).to(tl.int64)
    v = tl.load(table + source * table_stride + d, mask=d < width, other=0.0)
    if SCALED:
        v = v.to(tl.float32) * scale
    tl.store(out + row * out_stride + d, v.to(out.dtype.element_ty), mask=d < width)


@triton.jit
def arranged(
    x, inputs, ids, sizes, out, width, x_stride, out_stride, EACH: tl.constexpr, BLOCK: tl.constexpr
):
    """A piece of a row as a weight's columns see it: those of the row's expert, if rows have `ids`."""
    row, d = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    known = d < width
    if ids is not None:
        expert = tl.load(ids + row)
        address = tl.load(inputs + expert)
        inputs = address.to(tl.pointer_type(tl.float32))
        if sizes is not None:
            width = tl.load(sizes + expert)
        known = (d < width) & (address != 0)
    source = tl.where(known, tl.load(inputs + d, mask=known, other=0.0).to(tl.int32), d)
    v = tl.load(x + row // EACH * x_stride + source, mask=d < width, other=0.0).to(tl.float32)
    v *= tl.load(inputs + width + d, mask=known, other=1.0)
    tl.store(out + row * out_stride + d, v.to(out.dtype.element_ty), mask=d < width)


@triton.jit
def sequence_of(token, cu_q, sequences, B: tl.constexpr):
    """The sequence of a token; the last one for tokens behind all."""
    b = tl.arange(0, B)
    ends = tl.load(cu_q + 1 + b, mask=b < sequences, other=0x7FFFFFFF)
    return tl.minimum(tl.sum((ends <= token).to(tl.int32), 0), sequences - 1)


def embed(run: Launcher, table: Any, ids: Any, out: Any, scale: float = 1.0, offset: int = 0) -> None:
    """Rows ids + offset of a table [V, D], times scale: [T, D]."""
    width = table.shape[1]
    grid = ids.shape[0], triton.cdiv(width, BLOCK), 1
    launch(
        run, gather, grid, table, ids, out, width, table.stride(0), out.stride(0), offset, float(scale),
        SCALED=scale != 1.0, BLOCK=BLOCK,
    )  # fmt: skip


def select(run: Launcher, x: Any, rows: Any, out: Any) -> None:
    """Rows of x [T, D]: [L, D]."""
    embed(run, x, rows, out)


def arrange(run: Launcher, x: Any, inputs: Any, out: Any, ids: Any = None, sizes: Any = None) -> None:
    """Rows of x [T, K] in the order of a weight's columns, times their factors: `inputs` float32 [2, K] are both.

    With `ids` [T, C] there is a row for each pair of a token and an expert; `inputs` are addresses, 0 for those that
    leave x as it is, and with `sizes` rows are as wide as these say of the expert.
    """
    (rows, width), strides = out.shape, (x.stride(0), out.stride(0))
    launch(
        run, arranged, (rows, triton.cdiv(width, BLOCK), 1), x, inputs, ids, sizes, out, width, *strides,
        EACH=rows // x.shape[0], BLOCK=BLOCK,
    )  # fmt: skip
