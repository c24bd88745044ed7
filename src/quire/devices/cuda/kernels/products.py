"""Products with weights of float32, bfloat16 and float16: out = activation(x @ weight.T + bias) + residual.

A tile has rows of the weight as its rows and tokens as its columns, so that Hopper and Blackwell use one instruction
from one token to thousands. K is summed in one order, in float32.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from quire.devices.cuda.kernels.math import activate, gate
from quire.devices.cuda.launch import Launcher, launch
from quire.devices.cuda.tiles import SINGLE, WIDE, ProductTiles


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
    x, weight, bias, residual, out,
    tokens, rows, columns, x_stride, weight_stride, out_stride, weight_head, x_head, out_head,
    ACTIVATION: tl.constexpr, GATED: tl.constexpr, LIMIT: tl.constexpr, WHOLE: tl.constexpr,
    ROWS: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(2).to(tl.int64)
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    t = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    k = tl.arange(0, COLUMNS)
    of_weight = (
        weight
        + head * weight_head
        + tl.minimum(n, rows - 1).to(tl.int64)[:, None] * weight_stride
        + k[None, :]
    )
    of_x = x + head * x_head + tl.minimum(t, tokens - 1).to(tl.int64)[None, :] * x_stride + k[:, None]
    total = tl.zeros([ROWS, TOKENS], tl.float32)
    for start in range(0, columns, COLUMNS):
        if WHOLE:
            w = tl.load(of_weight + start)
            seen = tl.load(of_x + start)
        else:
            w = tl.load(of_weight + start, mask=start + k[None, :] < columns, other=0.0)
            seen = tl.load(of_x + start, mask=start + k[:, None] < columns, other=0.0)
        total = tl.dot(w, seen, total, input_precision="ieee")
    if bias is not None:
        bias += head * out_head
    closed(total, bias, residual, out, head * out_head, t, tokens, rows, out_stride, ACTIVATION, GATED, LIMIT)


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
    count, rows, _ = weights.shape
    tokens, columns = x.shape[0], x.shape[1] // count
    tiles = product_tiles(run, x.dtype)
    tile = tiles.of(tokens)
    grid = triton.cdiv(rows, tile.rows), triton.cdiv(tokens, tile.tokens), count
    launch(
        run, product, grid, x, weights, bias, residual, out, tokens, rows, columns, x.stride(0), weights.stride(1),
        out.stride(0), weights.stride(0), columns, rows, ACTIVATION=activation or "", GATED=is_gated, LIMIT=limit,
        WHOLE=columns % tiles.columns == 0, ROWS=tile.rows, TOKENS=tile.tokens, COLUMNS=tiles.columns,
        shape=tile.shape,
    )  # fmt: skip
