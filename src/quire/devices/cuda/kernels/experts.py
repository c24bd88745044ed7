"""Products of mixtures: tiles of pairs (token, expert) that share an expert, and the sum over a token's experts.

Weights are found by a table of addresses. A pair's result depends on its own row alone; a token's experts are summed in
ascending order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from quire.devices.cuda.kernels import packed
from quire.devices.cuda.kernels.math import NUMBERS
from quire.devices.cuda.kernels.packed import Form
from quire.devices.cuda.kernels.products import FLOATS, closed, product_tiles, sums
from quire.devices.cuda.kernels.routing import sort_pairs
from quire.devices.cuda.kernels.rows import arrange
from quire.devices.cuda.language import tl, triton
from quire.devices.cuda.launch import Launcher, launch
from quire.devices.cuda.tiles import ProductTile, ProductTiles


@triton.jit
def expert_product(
    x, x_scales, addresses, scales, zeros, offsets, table, sizes, bias, out, weights, tile_experts, pairs, width,
    x_stride, out_stride, bias_stride,
    UP: tl.constexpr, CHOSEN: tl.constexpr, WEIGH: tl.constexpr, ACTIVATION: tl.constexpr, GATED: tl.constexpr,
    LIMIT: tl.constexpr, LATER: tl.constexpr, SPLIT: tl.constexpr, NUMBER: tl.constexpr, BITS: tl.constexpr,
    GROUP: tl.constexpr, FINE: tl.constexpr, E2M1: tl.constexpr, WHOLE: tl.constexpr, ROWS: tl.constexpr,
    TOKENS: tl.constexpr, COLUMNS: tl.constexpr,
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
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    pair = tl.load(pairs + tl.program_id(1) * TOKENS + tl.arange(0, TOKENS))
    source = (tl.maximum(pair, 0) // CHOSEN).to(tl.int64)
    weight = tl.multiple_of(tl.load(addresses + expert).to(tl.pointer_type(NUMBER)), 16)
    stride, scale_stride = columns, columns
    if BITS > 0:
        stride, scale_stride = tl.cdiv(columns, 128) * (16 * BITS), 1
        if GROUP + FINE > 0:
            scale_stride = tl.cdiv(columns, GROUP + FINE)
        scales = tl.load(scales + expert).to(tl.pointer_type(tl.float32))
        if zeros is not None:
            zeros = tl.load(zeros + expert).to(tl.pointer_type(tl.uint8))
        if offsets is not None:
            offsets = tl.load(offsets + expert).to(tl.pointer_type(tl.float32))
        if table is not None:
            table = tl.load(table + expert).to(tl.pointer_type(tl.float32))
    factor, byte = None, tl.arange(0, COLUMNS * BITS // 8 if BITS > 0 else COLUMNS)
    of_weight = weight + tl.minimum(n, rows - 1).to(tl.int64)[:, None] * stride + byte[None, :]
    of_x = x + source[None, :] * x_stride + tl.arange(0, COLUMNS)[:, None]
    if WEIGH:
        factor = tl.load(weights + pair, mask=pair >= 0, other=0.0)[None, :]
    total = sums(of_weight, of_x, factor, scales, zeros, offsets, table, n, rows, columns, scale_stride, BITS, GROUP,
                 FINE, E2M1, x_scales is not None, WHOLE, COLUMNS)  # fmt: skip
    if x_scales is not None:
        total *= tl.load(x_scales + source)[None, :]
    if bias is not None:
        bias += expert.to(tl.int64) * bias_stride
    if SPLIT > 0:
        if expert < SPLIT:
            closed(total, bias, None, out, 0, pair, 0x7FFFFFFF, rows, out_stride, ACTIVATION, GATED, LIMIT)
        else:
            closed(total, bias, None, out, 0, pair, 0x7FFFFFFF, rows, out_stride, ACTIVATION, GATED, LATER)
    else:
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
class Weights:
    """One weight of each expert, by addresses int64 [E]: 0 for an expert that returns x.

    `form` is that of packed weights; None: they are floats. Their other tensors have tables like `table`; so have
    `inputs` (rows.arrange), if any has them. With `rounds`, products round their inputs to int8.
    """

    table: Any
    number: Any
    form: Form | None = None
    scales: Any = None
    zeros: Any = None
    offsets: Any = None
    values: Any = None
    rounds: bool = False
    inputs: Any = None

    def tiles(self, run: Launcher) -> ProductTiles:
        return product_tiles(run, self.number) if self.form is None else self.form.tiles(run)

    def constants(self, run: Launcher) -> dict[str, Any]:
        if self.form is not None:
            return self.form.constants(run)
        return {**FLOATS, "COLUMNS": self.columns(run)}

    def columns(self, run: Launcher) -> int:
        """The columns of a tile."""
        return self.tiles(run).columns if self.form is None else self.form.columns(run)


@dataclass(frozen=True, slots=True)
class Experts:
    """Experts on the device; rows of gated `up` are those of products.gated.

    `sizes` int32 [E] are the inner widths, `largest` of them the greatest. Biases are float32 [E, rows], or None.
    `aligned`: all widths are multiples of tiles' columns. The limit of experts from `split` on is `later`, if not 0.
    """

    up: Weights
    down: Weights
    sizes: Any
    largest: int
    activation: str
    gated: bool = True
    limit: float = 0.0
    weigh_inputs: bool = False
    up_bias: Any = None
    down_bias: Any = None
    aligned: bool = False
    later: float = 0.0
    split: int = 0


@dataclass(frozen=True, slots=True)
class ExpertScratch:
    """Room for a step: int32 counts [E], tile_experts [tiles], pairs [tiles * tokens]; inner [T C, largest], outer
    [T C, D] of the activations' type; int8 `codes` and float32 scales [T C] of rounded inputs; `arranged` inputs.
    """

    counts: Any
    tile_experts: Any
    pairs: Any
    inner: Any
    outer: Any
    codes: Any = None
    scales: Any = None
    arranged: Any = None


def addresses(weights: Sequence[Any], device: Any) -> Any:
    """A table of the places of contiguous tensors, 0 for None. They must outlive it."""
    found = [0 if weight is None else weight.data_ptr() for weight in weights]
    return torch.tensor(found, dtype=torch.int64, device=device)


def expert_tile(
    run: Launcher, tokens: int, chosen: int, experts: int, weights: Weights
) -> tuple[ProductTile, int]:
    """The tile of a step, and the most tiles that it may need."""
    total = tokens * chosen
    tile = weights.tiles(run).of(-(-total // experts))
    return tile, total // tile.tokens + min(total, experts)


def expert_scratch(
    run: Launcher, x: Any, chosen: int, experts: Experts, width: int, empty: Any
) -> ExpertScratch:
    """Make room for a mixture of rows x that returns rows `width` wide, by `empty(*shape, dtype=...)`."""
    pairs, count = len(x) * chosen, experts.sizes.shape[0]
    tile, most = expert_tile(run, len(x), chosen, count, experts.up)
    integers = (empty(size, dtype=torch.int32) for size in (count, most, most * tile.tokens))
    rows = [empty(pairs, size, dtype=x.dtype) for size in (experts.largest, width)]
    widest, sides = max(experts.largest, x.shape[1]), (experts.up, experts.down)
    optional: list[Any] = [None, None, None]
    if any(side.rounds for side in sides):
        optional[:2] = empty(pairs, widest, dtype=torch.int8), empty(pairs, dtype=torch.float32)
    if any(side.inputs is not None for side in sides):
        optional[2] = empty(pairs, widest, dtype=x.dtype)
    return ExpertScratch(*integers, *rows, *optional)


def multiply_pairs(
    run: Launcher,
    x: Any,
    table: Weights,
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
    x_scales: Any = None,
    chosen: int = 1,
    weigh: bool = False,
    activation: str = "",
    gated: bool = False,
    limit: float = 0.0,
    later: float = 0.0,
    split: int = 0,
    whole: bool = False,
    columns: int | None = None,
) -> None:
    """Multiply sorted pairs by their experts' weights, of at most `rows` rows: `up` from `width`, or down to it.

    A row of x belongs to `chosen` pairs.
    """
    launch(
        run, expert_product, (triton.cdiv(rows, tile.rows), tile_experts.shape[0], 1), x, x_scales, table.table,
        table.scales, table.zeros, table.offsets, table.values, sizes, bias, out, weights, tile_experts, pairs, width,
        x.stride(0), out.stride(0), 0 if bias is None else bias.stride(0), UP=up, CHOSEN=chosen, WEIGH=weigh,
        ACTIVATION=activation, GATED=gated, LIMIT=limit, LATER=later, SPLIT=split, NUMBER=NUMBERS[table.number],
        WHOLE=whole, ROWS=tile.rows, TOKENS=tile.tokens, shape=tile.shape,
        **(table.constants(run) if columns is None else {**table.constants(run), "COLUMNS": columns}),
    )  # fmt: skip


def run_experts(
    run: Launcher, x: Any, ids: Any, weights: Any, experts: Experts, scratch: ExpertScratch, out: Any
) -> None:
    """Sum over a token's experts, in ascending order, of weight * down(inner(up(x))): [T, D] -> [T, D]."""
    (tokens, chosen), count = ids.shape, experts.sizes.shape[0]
    tile, _ = expert_tile(run, tokens, chosen, count, experts.up)
    sort_pairs(run, ids, experts.up.table, scratch.counts, scratch.tile_experts, scratch.pairs, tile.tokens)

    def product(up: bool, x: Any, table: Weights, bias: Any, out: Any, rows: int, width: int) -> None:
        weigh, each, scales = up and experts.weigh_inputs, chosen if up else 1, None
        narrow = {} if up else {"ids": ids, "sizes": experts.sizes}
        if table.inputs is not None:
            own = scratch.arranged.view(-1)[: ids.numel() * x.shape[1]].view(-1, x.shape[1])
            arrange(run, x, table.inputs, own, **{"ids": ids, **narrow})
            x, each = own, 1
        if table.rounds:
            codes, scales = scratch.codes.view(-1)[: x.numel() * (each if weigh else 1)], scratch.scales
            codes, factors = codes.view(-1, x.shape[1]), weights.view(-1, each) if weigh else None
            packed.round_rows(run, x, codes, scales, weights=factors, **narrow)
            x, each, weigh = codes, 1 if weigh else each, False
        multiply_pairs(
            run, x, table, experts.sizes, bias, out, weights, scratch.tile_experts, scratch.pairs, tile, rows, width,
            up=up, x_scales=scales, chosen=each, weigh=weigh, activation=experts.activation if up else "",
            gated=up and experts.gated, limit=experts.limit, later=experts.later, split=experts.split,
            whole=experts.aligned,
        )  # fmt: skip

    rows, width = experts.largest * (2 if experts.gated else 1), out.shape[1]
    product(True, x, experts.up, experts.up_bias, scratch.inner, rows, x.shape[1])
    product(False, scratch.inner, experts.down, experts.down_bias, scratch.outer, width, width)
    launch(
        run, sum_experts, (tokens, triton.cdiv(width, 1024), 1), scratch.outer, x, ids, weights, experts.up.table, out,
        width, x.stride(0), out.stride(0), CHOSEN=chosen, C=triton.next_power_of_2(chosen),
        WEIGHED=experts.weigh_inputs, BLOCK=1024,
    )  # fmt: skip
