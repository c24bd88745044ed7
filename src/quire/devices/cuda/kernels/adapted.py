"""Products that adapters change: what is added to rows of a sum, then the end of the product.

The sums of a product are float32 here. Rows of no adapter end as they do in the product itself, bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from quire.devices.cuda.kernels.experts import Weights, expert_tile, multiply_pairs
from quire.devices.cuda.kernels.math import activate, gate
from quire.devices.cuda.kernels.products import product_tiles
from quire.devices.cuda.kernels.routing import sort_pairs
from quire.devices.cuda.language import tl, triton
from quire.devices.cuda.launch import Launcher, launch
from quire.devices.cuda.tiles import ProductTile

BLOCK, RANKS = 1024, 16


@triton.jit
def finished(total, low, slots, ranks, gains, shifts, bias, residual, out, width, residual_stride, out_stride, factor,
             ACTIVATION: tl.constexpr, GATED: tl.constexpr, LIMIT: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """A piece of a row: gain * (total + low) + shift in rows of adapters, and what products do after their sums."""
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside, slot = at < width, tl.load(slots + row)
    changed, table = inside & (slot >= 0), tl.maximum(slot, 0).to(tl.int64) * width + at
    y = tl.load(total + row * width + at, mask=inside, other=0.0)
    if low is not None:
        ranked = changed & (tl.load(ranks + tl.maximum(slot, 0)) > 0)
        y = tl.where(ranked, y + tl.load(low + row * width + at, mask=ranked, other=0.0), y)
    if gains is not None:
        y = tl.where(changed, y * tl.load(gains + table, mask=changed, other=1.0), y)
    added = y
    if bias is not None:
        added = y + tl.load(bias + at, mask=inside, other=0.0)
    if shifts is not None:
        added = tl.where(changed, y + tl.load(shifts + table, mask=changed, other=0.0), added)
    if GATED:
        opened, up = tl.split(tl.reshape(added, [BLOCK // 2, 2]))
        added = gate(opened, up, ACTIVATION, LIMIT)
        at = tl.program_id(1) * (BLOCK // 2) + tl.arange(0, BLOCK // 2)
        inside = at < width // 2
    else:
        added = activate(added, ACTIVATION) * factor
    if residual is not None:
        added += tl.load(residual + row * residual_stride + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * out_stride + at, added.to(out.dtype.element_ty), mask=inside)


@dataclass(frozen=True, slots=True)
class Changes:
    """The changes of one product by the adapters in slots, on the device.

    downs, ups: weights [R, K] and [O, R]. R by slot is in `ranks` int32 [S], a multiple of
    RANKS, at most `largest`; 0: no change.
    gains, shifts float32 [S, O], the base's own bias in them; None: no slot has one.
    """

    downs: Any
    ups: Any
    ranks: Any
    largest: int
    gains: Any = None
    shifts: Any = None

    def take(self, other: Changes) -> bool:
        """Become other changes in the same memory, for launches that have it; False if they do not fit."""
        pairs = [
            (self.downs.table, other.downs.table), (self.ups.table, other.ups.table), (self.ranks, other.ranks),
            (self.gains, other.gains), (self.shifts, other.shifts),
        ]  # fmt: skip
        if other.largest > self.largest or any((own is None) != (new is None) for own, new in pairs):
            return False
        for own, new in pairs:
            if own is not None:
                own.copy_(new)
        return True


@dataclass(frozen=True, slots=True)
class SortedRows:
    """Rows of a step sorted by their slots int32 [T], -1 for rows of no adapter: tiles as of routing.sort_pairs."""

    slots: Any
    tile: ProductTile
    tile_experts: Any
    pairs: Any


def sort_rows(run: Launcher, slots: Any, count: int, dtype: Any, empty: Any) -> SortedRows:
    """Sort rows by their slots, of which there are `count`; `empty(*shape, dtype=...)` makes room."""
    tile, most = expert_tile(run, slots.shape[0], 1, count, Weights(None, dtype))
    counts, tiles, pairs = (empty(size, dtype=slots.dtype) for size in (count, most, most * tile.tokens))
    sort_pairs(run, slots[:, None], None, counts, tiles, pairs, tile.tokens)
    return SortedRows(slots, tile, tiles, pairs)


def shrink(run: Launcher, x: Any, changes: Changes, rows: SortedRows, out: Any) -> None:
    """x down.T in rows of adapters: [T, K] -> [T, largest]."""
    whole = x.shape[1] % product_tiles(run, x.dtype).columns == 0
    multiply_pairs(
        run, x, changes.downs, changes.ranks, None, out, None, rows.tile_experts, rows.pairs, rows.tile,
        changes.largest, x.shape[1], up=True, whole=whole,
    )  # fmt: skip


def expand(run: Launcher, x: Any, changes: Changes, rows: SortedRows, out: Any) -> None:
    """x up.T in rows of adapters: [T, largest] -> float32 [T, O]."""
    multiply_pairs(
        run, x, changes.ups, changes.ranks, None, out, None, rows.tile_experts, rows.pairs, rows.tile, out.shape[1],
        out.shape[1], up=False, whole=True, columns=RANKS,
    )  # fmt: skip


def finish(
    run: Launcher,
    total: Any,
    low: Any,
    slots: Any,
    changes: Changes,
    out: Any,
    bias: Any = None,
    activation: str | None = None,
    residual: Any = None,
    limit: float = 0.0,
    is_gated: bool = False,
    factor: float = 1.0,
) -> None:
    """End a product of sums [T, O] float32, or without an activation multiply it by `factor`."""
    rows, width = total.shape
    launch(
        run, finished, (rows, triton.cdiv(width, BLOCK), 1), total, low, slots, changes.ranks, changes.gains,
        changes.shifts, bias, residual, out, width, 0 if residual is None else residual.stride(0), out.stride(0),
        float(factor), ACTIVATION=activation or "", GATED=is_gated, LIMIT=limit, BLOCK=BLOCK,
    )  # fmt: skip
