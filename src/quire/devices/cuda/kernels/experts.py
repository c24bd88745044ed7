"""Products of mixtures: tiles of pairs (token, expert) that share an expert, and the sum over a token's experts.

Weights are found by a table of addresses. A pair's result depends on its own row alone; a token's experts are summed in
ascending order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from quire.devices.cuda.kernels.products import closed, product_tiles
from quire.devices.cuda.kernels.routing import sort_pairs
from quire.devices.cuda.launch import Launcher, launch
from quire.devices.cuda.tiles import ProductTile

NUMBERS = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit
def expert_product(
    x, addresses, sizes, bias, out, weights, tile_experts, pairs, width, x_stride, out_stride, bias_stride,
    UP: tl.constexpr, CHOSEN: tl.constexpr, WEIGH: tl.constexpr, ACTIVATION: tl.constexpr, GATED: tl.constexpr,
    LIMIT: tl.constexpr, WHOLE: tl.constexpr, NUMBER: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    expert = tl.load(tile_experts + tl.program_id(1))
    if expert < 0:
        return
    size = tl.load(sizes + expert)
    if UP:
        rows, columns = size * (2 if GATED else 1), width
    else:
        rows, columns = width, size
    if tl.program_id(0) * ROWS >= rows:
        return
    if WHOLE:
        columns = tl.multiple_of(columns, 16)
    n, k = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    pair = tl.load(pairs + tl.program_id(1) * TOKENS + tl.arange(0, TOKENS))
    source = (tl.maximum(pair, 0) // CHOSEN if UP else tl.maximum(pair, 0)).to(tl.int64)
    weight = tl.multiple_of(tl.load(addresses + expert).to(tl.pointer_type(NUMBER)), 16)
    of_weight = weight + tl.minimum(n, rows - 1).to(tl.int64)[:, None] * columns + k[None, :]
    of_x = x + source[None, :] * x_stride + k[:, None]
    if WEIGH:
        factor = tl.load(weights + pair, mask=pair >= 0, other=0.0)[None, :]
    total = tl.zeros([ROWS, TOKENS], tl.float32)
    for start in range(0, columns, COLUMNS):
        if WHOLE:
            w, seen = tl.load(of_weight + start), tl.load(of_x + start)
        else:
            w = tl.load(of_weight + start, mask=start + k[None, :] < columns, other=0.0)
            seen = tl.load(of_x + start, mask=start + k[:, None] < columns, other=0.0)
        if WEIGH:
            seen = (seen.to(tl.float32) * factor).to(NUMBER)
        total = tl.dot(w, seen, total, input_precision="ieee")
    if bias is not None:
        bias += expert.to(tl.int64) * bias_stride
    closed(total, bias, None, out, 0, pair, 0x7FFFFFFF, rows, out_stride, ACTIVATION, GATED, LIMIT)


@triton.jit
def sum_experts(y, x, ids, weights, addresses, out, width, x_stride, out_stride, CHOSEN: tl.constexpr,
                C: tl.constexpr, WEIGHED: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Sum a piece of a token's results by ascending expert; one without weights returns x."""
    token, slot = tl.program_id(0).to(tl.int64), tl.arange(0, C)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside, total = d < width, tl.zeros([BLOCK], tl.float32)
    order = tl.load(ids + token * CHOSEN + slot, mask=slot < CHOSEN, other=0) * C + slot
    last = tl.min(order, 0) * 0 - 1
    for _ in range(CHOSEN):
        last = tl.min(tl.where((slot < CHOSEN) & (order > last), order, 0x7FFFFFFF), 0)
        pair, has = token * CHOSEN + last % C, tl.load(addresses + last // C) != 0
        own = tl.load(y + pair * width + d, mask=inside & has, other=0.0).to(tl.float32)
        own += tl.load(x + token * x_stride + d, mask=inside & (has == 0), other=0.0).to(tl.float32)
        factor = tl.load(weights + pair)
        if WEIGHED:  # the inputs were: only those that no expert has seen still have to be
            factor = tl.where(has, 1.0, factor)
        total += own * factor
    tl.store(out + token * out_stride + d, total.to(out.dtype.element_ty), mask=inside)


@dataclass(frozen=True, slots=True)
class Experts:
    """Experts on the device: addresses int64 [E] of their weights, rows as those of products.gated.

    `sizes` int32 [E] are the inner widths, `largest` of them the greatest. Biases are float32 [E, rows], or None.
    `aligned`: all widths are multiples of a tile's columns. An expert whose address is 0 returns x.
    """

    up: Any
    down: Any
    sizes: Any
    largest: int
    number: Any
    activation: str
    gated: bool = True
    limit: float = 0.0
    weigh_inputs: bool = False
    up_bias: Any = None
    down_bias: Any = None
    aligned: bool = False


@dataclass(frozen=True, slots=True)
class ExpertScratch:
    """Room for a step: int32 counts [E], tile_experts [tiles], pairs [tiles * tokens]; inner [T C, largest], outer
    [T C, D] of the activations' type.
    """

    counts: Any
    tile_experts: Any
    pairs: Any
    inner: Any
    outer: Any


def addresses(weights: Sequence[Any], device: Any) -> Any:
    """A table of the places of contiguous tensors, 0 for None. They must outlive it."""
    found = [0 if weight is None else weight.data_ptr() for weight in weights]
    return torch.tensor(found, dtype=torch.int64, device=device)


def expert_tile(run: Launcher, tokens: int, chosen: int, experts: int, dtype: Any) -> tuple[ProductTile, int]:
    """The tile of a step, and the most tiles that it may need."""
    total = tokens * chosen
    tile = product_tiles(run, dtype).of(-(-total // experts))
    return tile, total // tile.tokens + min(total, experts)


def expert_scratch(
    run: Launcher, tokens: int, chosen: int, experts: Experts, width: int, empty: Any
) -> ExpertScratch:
    """Make room for a mixture that returns rows `width` wide, by `empty(*shape, dtype=...)`."""
    count, number = experts.sizes.shape[0], experts.number
    tile, most = expert_tile(run, tokens, chosen, count, number)
    integers = (empty(size, dtype=torch.int32) for size in (count, most, most * tile.tokens))
    rows = (empty(tokens * chosen, size, dtype=number) for size in (experts.largest, width))
    return ExpertScratch(*integers, *rows)


def multiply_pairs(
    run: Launcher,
    x: Any,
    table: Any,
    sizes: Any,
    bias: Any,
    out: Any,
    weights: Any,
    tile_experts: Any,
    pairs: Any,
    tile: ProductTile,
    rows: int,
    width: int,
    *,
    up: bool,
    number: Any,
    chosen: int = 1,
    weigh: bool = False,
    activation: str = "",
    gated: bool = False,
    limit: float = 0.0,
    whole: bool = False,
    columns: int | None = None,
) -> None:
    """Multiply sorted pairs by their experts' weights, of at most `rows` rows: `up` from `width`, or down to it."""
    launch(
        run, expert_product, (triton.cdiv(rows, tile.rows), tile_experts.shape[0], 1), x, table, sizes, bias, out,
        weights, tile_experts, pairs, width, x.stride(0), out.stride(0), 0 if bias is None else bias.stride(0), UP=up,
        CHOSEN=chosen, WEIGH=weigh, ACTIVATION=activation, GATED=gated, LIMIT=limit, WHOLE=whole,
        NUMBER=NUMBERS[number], ROWS=tile.rows, TOKENS=tile.tokens,
        COLUMNS=columns or product_tiles(run, x.dtype).columns, shape=tile.shape,
    )  # fmt: skip


def run_experts(
    run: Launcher, x: Any, ids: Any, weights: Any, experts: Experts, scratch: ExpertScratch, out: Any
) -> None:
    """Sum over a token's experts, in ascending order, of weight * down(inner(up(x))): [T, D] -> [T, D]."""
    (tokens, chosen), count = ids.shape, experts.up.shape[0]
    tile, _ = expert_tile(run, tokens, chosen, count, x.dtype)
    sort_pairs(run, ids, experts.up, scratch.counts, scratch.tile_experts, scratch.pairs, tile.tokens)

    def product(up: bool, x: Any, table: Any, bias: Any, out: Any, rows: int, width: int) -> None:
        multiply_pairs(
            run, x, table, experts.sizes, bias, out, weights, scratch.tile_experts, scratch.pairs, tile, rows, width,
            up=up, number=experts.number, chosen=chosen, weigh=up and experts.weigh_inputs,
            activation=experts.activation if up else "", gated=up and experts.gated, limit=experts.limit,
            whole=experts.aligned,
        )  # fmt: skip

    rows, width = experts.largest * (2 if experts.gated else 1), out.shape[1]
    product(True, x, experts.up, experts.up_bias, scratch.inner, rows, x.shape[1])
    product(False, scratch.inner, experts.down, experts.down_bias, scratch.outer, width, width)
    launch(
        run, sum_experts, (tokens, triton.cdiv(width, 1024), 1), scratch.outer, x, ids, weights, experts.up, out, width,
        x.stride(0), out.stride(0), CHOSEN=chosen, C=triton.next_power_of_2(chosen), WEIGHED=experts.weigh_inputs,
        BLOCK=1024,
    )  # fmt: skip
