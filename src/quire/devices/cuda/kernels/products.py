"""Products out = activation(x @ weight.T + bias) + residual, with weights of float32, bfloat16 and float16, or packed.

A tile has rows of the weight as its rows and tokens as its columns, so that Hopper and Blackwell use one instruction
from one token to thousands. K is summed in one order, in float32; what packed weights add to that is in packed.py.
"""

from __future__ import annotations

from typing import Any

import torch

from quire.devices.cuda.kernels.math import activate, gate
from quire.devices.cuda.language import tl, triton
from quire.devices.cuda.launch import Launcher, launch
from quire.devices.cuda.tiles import SINGLE, WIDE, ProductTile, ProductTiles


@triton.jit
def numbers(codes, zeros, table, start, n, rows, scale_stride, BITS: tl.constexpr, GROUP: tl.constexpr,
            E2M1: tl.constexpr, PLAIN: tl.constexpr):  # fmt: skip
    """A tile of numbers [rows, K] from codes: two in a byte, the low half first, if BITS is 4.

    They are whole, or float32 of a `table` of 16 for each row.
    """
    if BITS == 4:
        w = tl.interleave(codes & 15, codes >> 4).to(tl.int8)
        if table is not None:
            w = tl.gather(table, w.to(tl.int32), 1)
        elif E2M1:  # twice their values
            m = w & 7
            m += tl.maximum(m - 4, 0) + 2 * tl.maximum(m - 6, 0)
            w = tl.where(w > 7, -m, m)
        elif zeros is not None:
            zero = tl.load(zeros + n * scale_stride + start // GROUP, mask=n < rows, other=0)
            w -= zero.to(tl.int8)[:, None]
        elif not PLAIN:
            w -= 8
    else:
        w = codes
    return w


@triton.jit
def spread(table, start, n, rows, stride, FINE: tl.constexpr, COLUMNS: tl.constexpr):
    """Numbers of groups of FINE columns, for each column of a tile: [rows, COLUMNS]."""
    group = start // FINE + tl.arange(0, COLUMNS // FINE)
    there = (n < rows)[:, None] & (group < stride)[None, :]
    found = tl.load(table + n[:, None] * stride + group[None, :], mask=there, other=0.0)
    wide = tl.broadcast_to(found[:, :, None], [n.shape[0], COLUMNS // FINE, FINE])
    return tl.reshape(wide, [n.shape[0], COLUMNS])


@triton.jit
def sums(of_weight, of_x, factor, scales, zeros, offsets, table, n, rows, columns, scale_stride, BITS: tl.constexpr,
         GROUP: tl.constexpr, FINE: tl.constexpr, E2M1: tl.constexpr, INTEGER: tl.constexpr, WHOLE: tl.constexpr,
         COLUMNS: tl.constexpr):  # fmt: skip
    """The sums of a tile, rows n of the weight by tokens: over floats, or over codes of BITS bits if that is not 0.

    A scale multiplies the sum of a group of GROUP columns, of all (0), or each number of a group of FINE.
    """
    kind: tl.constexpr = tl.int32 if INTEGER else tl.float32
    k = tl.arange(0, COLUMNS)
    total = tl.zeros([of_weight.shape[0], of_x.shape[1]], tl.float32 if GROUP > 0 else kind)
    if table is not None:
        table = tl.load(table + tl.minimum(n, rows - 1)[:, None] * 16 + tl.arange(0, 16)[None, :])
    for start in range(0, columns, COLUMNS):
        known = start + k < columns
        if BITS > 0:
            w = tl.load(of_weight + start * BITS // 8)
        else:
            w = (
                tl.load(of_weight + start)
                if WHOLE
                else tl.load(of_weight + start, mask=known[None, :], other=0)
            )
        seen = tl.load(of_x + start) if WHOLE else tl.load(of_x + start, mask=known[:, None], other=0)
        if BITS > 0:
            w = numbers(w, zeros, table, start, n, rows, scale_stride, BITS, GROUP, E2M1, offsets is not None)
        if FINE > 0:
            w = w.to(tl.float32) * spread(scales, start, n, rows, scale_stride, FINE, COLUMNS)
            if offsets is not None:
                w -= spread(offsets, start, n, rows, scale_stride, FINE, COLUMNS)
        if not INTEGER:
            w = w.to(seen.dtype)
        if factor is not None:
            seen = (seen.to(tl.float32) * factor).to(seen.dtype)
        if GROUP > 0:
            scale = tl.load(scales + n * scale_stride + start // GROUP, mask=n < rows, other=0.0)
            part = tl.dot(w, seen, out_dtype=kind, input_precision="ieee")
            total += part.to(tl.float32) * scale[:, None]
        else:
            total = tl.dot(w, seen, total, out_dtype=kind, input_precision="ieee")
    total = total.to(tl.float32)
    if BITS > 0 and GROUP == 0 and FINE == 0:
        total *= tl.load(scales + n, mask=n < rows, other=0.0)[:, None]
    return total


@triton.jit
def closed(total, bias, residual, out, first, t, tokens, rows, out_stride, ACTIVATION: tl.constexpr,
           GATED: tl.constexpr, LIMIT: tl.constexpr):  # fmt: skip
    """Finish a tile of a product, rows of the weight by tokens t, and store it in rows of `out` from `first` on."""
    made: tl.constexpr = total.shape[0]
    n = tl.program_id(0) * made + tl.arange(0, made)
    if bias is not None:
        total += tl.load(bias + n, mask=n < rows, other=0.0)[:, None]
    if GATED:
        opened, up = tl.split(tl.permute(tl.reshape(total, [made // 2, 2, total.shape[1]]), [0, 2, 1]))
        total = gate(opened, up, ACTIVATION, LIMIT)
        n, rows = tl.program_id(0) * (made // 2) + tl.arange(0, made // 2), rows // 2
    else:
        total = activate(total, ACTIVATION)
    place = first + t.to(tl.int64)[None, :] * out_stride + n[:, None]
    inside = (t >= 0)[None, :] & (t < tokens)[None, :] & (n[:, None] < rows)
    if residual is not None:
        total += tl.load(residual + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + place, total.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["tokens"])
def product(
    x, x_scales, weight, scales, zeros, offsets, table, bias, residual, out,
    tokens, rows, columns, x_stride, head_stride, weight_stride, scale_stride, out_stride,
    ACTIVATION: tl.constexpr, GATED: tl.constexpr, LIMIT: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr,
    FINE: tl.constexpr, E2M1: tl.constexpr, INTEGER: tl.constexpr, WHOLE: tl.constexpr, ROWS: tl.constexpr,
    TOKENS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """A tile of one head's product. Heads have equal parts of rows of x, and `rows` rows of the weight each."""
    head, heads = tl.program_id(2).to(tl.int64), tl.num_programs(2)
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    t = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    first, nearest = head * rows, tl.minimum(t, tokens - 1).to(tl.int64)
    byte = tl.arange(0, COLUMNS * BITS // 8 if BITS > 0 else COLUMNS)
    of_weight = weight + head * head_stride
    of_weight += tl.minimum(n, rows - 1).to(tl.int64)[:, None] * weight_stride + byte[None, :]
    of_x = x + head * columns + nearest[None, :] * x_stride + tl.arange(0, COLUMNS)[:, None]
    if scales is not None:
        scales += first * scale_stride
    if zeros is not None:
        zeros += first * scale_stride
    if offsets is not None:
        offsets += first * scale_stride
    if table is not None:
        table += first * 16
    total = sums(of_weight, of_x, None, scales, zeros, offsets, table, n, rows, columns, scale_stride, BITS, GROUP,
                 FINE, E2M1, INTEGER, WHOLE, COLUMNS)  # fmt: skip
    if INTEGER:
        total *= tl.load(x_scales + nearest * heads + head)[None, :]
    if bias is not None:
        bias += first
    closed(total, bias, residual, out, first, t, tokens, rows, out_stride, ACTIVATION, GATED, LIMIT)


def linear(
    run: Launcher,
    x: Any,
    weight: Any,
    out: Any,
    bias: Any = None,
    activation: str | None = None,
    residual: Any = None,
) -> None:
    """activation(x @ weight.T + bias) + residual: [T, K], [O, K] -> [T, O]."""
    _launch(run, x, weight[None], out, bias, activation, residual)


def gated(
    run: Launcher, x: Any, weight: Any, out: Any, activation: str, bias: Any = None, limit: float = 0.0
) -> None:
    """activation(gate) * up: [T, K], [2 I, K] -> [T, I]. Row 2 i of the weight is row i of the gate, 2 i + 1 of up."""
    _launch(run, x, weight[None], out, bias, activation, limit=limit, is_gated=True)


def heads(
    run: Launcher, x: Any, weights: Any, out: Any, bias: Any = None, activation: str | None = None
) -> None:
    """activation(head n of x times weights[n].T + bias [N O]): [T, N K], [N, O, K] -> [T, N O]."""
    _launch(run, x, weights, out, bias, activation)


def product_tiles(run: Launcher, dtype: Any) -> ProductTiles:
    return (SINGLE if dtype == torch.float32 else WIDE)[run.target.family]


def _launch(
    run: Launcher,
    x: Any,
    weights: Any,
    out: Any,
    bias: Any = None,
    activation: str | None = None,
    residual: Any = None,
    limit: float = 0.0,
    is_gated: bool = False,
) -> None:
    count, rows, columns = weights.shape
    tiles = product_tiles(run, x.dtype)
    tile = tiles.of(x.shape[0])
    launch(
        run, product, product_grid(x, rows, tile, count), x, None, weights, None, None, None, None, bias, residual,
        out, x.shape[0], rows, columns, x.stride(0), weights.stride(0), weights.stride(1), 0, out.stride(0),
        ACTIVATION=activation or "", GATED=is_gated, LIMIT=limit, **FLOATS, INTEGER=False,
        WHOLE=columns % tiles.columns == 0, ROWS=tile.rows, TOKENS=tile.tokens, COLUMNS=tiles.columns, shape=tile.shape,
    )  # fmt: skip


FLOATS = {"BITS": 0, "GROUP": 0, "FINE": 0, "E2M1": False}
"""FLOATS are the constants of products with weights that are no codes."""


def product_grid(x: Any, rows: int, tile: ProductTile, heads: int = 1) -> tuple[int, int, int]:
    """The programs of a product with `rows` rows of the weight for each head."""
    return triton.cdiv(rows, tile.rows), triton.cdiv(x.shape[0], tile.tokens), heads
