"""Sums of products by other forms than products.py has, and the end of a product whose sums are there.

The bits of a form are its own, so none of these is for exact answers.
"""

from __future__ import annotations

from typing import Any

from quire.devices.cuda.kernels.products import closed, heads, product_tiles
from quire.devices.cuda.language import tl, triton
from quire.devices.cuda.launch import Launcher, launch
from quire.devices.cuda.tiles import Shape

BLOCK = 1024


@triton.jit
def vector(x, weight, out, rows, columns, x_stride, weight_stride, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Some rows of the weight times one row of x, without the matrix unit."""
    n, k, t = (
        tl.program_id(0) * ROWS + tl.arange(0, ROWS),
        tl.arange(0, COLUMNS),
        tl.program_id(1).to(tl.int64),
    )
    of_weight = weight + tl.minimum(n, rows - 1).to(tl.int64)[:, None] * weight_stride + k[None, :]
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, columns, COLUMNS):
        known = start + k < columns
        seen = tl.load(x + t * x_stride + start + k, mask=known, other=0.0).to(tl.float32)
        total += tl.load(of_weight + start, mask=known[None, :], other=0.0).to(tl.float32) * seen[None, :]
    tl.store(out + t * rows + n, tl.sum(total, 1), mask=n < rows)


@triton.jit(do_not_specialize=["parts", "tokens"])
def ended(sums, bias, residual, out, parts, tokens, rows, out_stride, ACTIVATION: tl.constexpr, GATED: tl.constexpr,
          LIMIT: tl.constexpr, BLOCK: tl.constexpr, TOKENS: tl.constexpr):  # fmt: skip
    """Pieces of rows: their sums by part, added in their order, then what products do after their sums."""
    n, t = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    of_row = sums + t.to(tl.int64)[None, :] * parts * rows + n[:, None]
    total = tl.zeros([BLOCK, TOKENS], tl.float32)
    for part in range(0, parts):
        inside = (n < rows)[:, None] & (t < tokens)[None, :]
        total += tl.load(of_row + part * rows, mask=inside, other=0.0).to(tl.float32)
    closed(total, bias, residual, out, 0, t, tokens, rows, out_stride, ACTIVATION, GATED, LIMIT)


def slices(run: Launcher, weight: Any) -> int:
    """The slices of K that fill a device, of equal width and a tile or more; 1: there is but one."""
    (rows, columns), tile = weight.shape, product_tiles(run, weight.dtype).columns
    most = min(max(2, 2 * run.target.processors // triton.cdiv(rows, 64)), columns // tile)
    return max((count for count in range(1, most + 1) if columns % (16 * count) == 0), default=1)


def multiply_slices(run: Launcher, x: Any, weight: Any, sums: Any) -> None:
    """Sums of x @ weight.T over slices of K: [T, K], [O, K] -> float32 [T, slices, O]."""
    heads(run, x, weight.unflatten(1, (sums.shape[1], -1)).transpose(0, 1), sums.flatten(1))


def multiply_vectors(run: Launcher, x: Any, weight: Any, sums: Any) -> None:
    """Sums of x @ weight.T, row by row: [T, K], [O, K] -> float32 [T, 1, O]."""
    (rows, columns), tile = weight.shape, 1024 if run.target.family == "interpreter" else 8
    grid, strides = (triton.cdiv(rows, tile), len(x), 1), (x.stride(0), weight.stride(0))
    launch(
        run, vector, grid, x, weight, sums, rows, columns, *strides, ROWS=tile, COLUMNS=512, shape=Shape(4, 2)
    )


def end(
    run: Launcher, sums: Any, out: Any, bias: Any = None, activation: str | None = None, residual: Any = None,
    limit: float = 0.0, is_gated: bool = False,
) -> None:  # fmt: skip
    """End a product of sums [T, parts, O] as products.linear or products.gated does."""
    (tokens, parts, rows), wide = sums.shape, 128 if run.target.family == "interpreter" else 1
    launch(
        run, ended, (triton.cdiv(rows, BLOCK), triton.cdiv(tokens, wide), 1), sums, bias, residual, out, parts, tokens,
        rows, out.stride(0), ACTIVATION=activation or "", GATED=is_gated, LIMIT=limit, BLOCK=BLOCK, TOKENS=wide,
    )  # fmt: skip
