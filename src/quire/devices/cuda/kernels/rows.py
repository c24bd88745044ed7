"""Rows of tables and of steps: embeddings, chosen rows, the places of tokens in a cache, copies of blocks."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

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


@triton.jit(do_not_specialize=["tokens"])
def find_places(positions, cu_q, slots, block_table, out, tokens, table_stride, scratch, SEQUENCES: tl.constexpr,
                HALVINGS: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """block * block size + offset of each token; tokens behind the last sequence lie at `scratch`."""
    t = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    low, high = t * 0, t * 0 + SEQUENCES
    for _ in tl.static_range(HALVINGS):  # the last sequence that begins at or before the token
        middle = (low + high) // 2
        before = tl.load(cu_q + middle) <= t
        low, high = tl.where(before, middle, low), tl.where(before, high, middle)
    inside = t < tl.load(cu_q + SEQUENCES)
    position = tl.load(positions + t, mask=inside, other=0)
    slot = tl.load(slots + low, mask=inside, other=0).to(tl.int64)
    block = tl.load(block_table + slot * table_stride + position // BLOCK_SIZE, mask=inside, other=0).to(
        tl.int64
    )
    place = tl.where(inside, block * BLOCK_SIZE + position % BLOCK_SIZE, scratch)
    tl.store(out + t, place, mask=t < tokens)


@triton.jit
def copy(words, pairs, size, BLOCK: tl.constexpr):
    """Copy one piece of a block to another block; their order does not matter where no block is read and written."""
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    source, destination = tl.load(pairs + tl.program_id(0) * 2), tl.load(pairs + tl.program_id(0) * 2 + 1)
    if source >= 0:
        v = tl.load(words + source.to(tl.int64) * size + at, mask=at < size)
        tl.store(words + destination.to(tl.int64) * size + at, v, mask=at < size)


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


def places(
    run: Launcher,
    positions: Any,
    cu_q: Any,
    slots: Any,
    block_table: Any,
    block_size: int,
    scratch: int,
    out: Any,
) -> None:
    """Where the tokens of a step lie in the cache: int64 [T]. Padding tokens lie at the place `scratch`."""
    sequences, tokens = slots.shape[0], out.shape[0]
    launch(
        run, find_places, (triton.cdiv(tokens, 256), 1, 1), positions, cu_q, slots, block_table, out, tokens,
        block_table.stride(0), scratch, SEQUENCES=sequences, HALVINGS=max(1, (sequences - 1).bit_length()),
        BLOCK_SIZE=block_size, BLOCK=256,
    )  # fmt: skip


def copy_blocks(run: Launcher, side: Any, pairs: Any) -> None:
    """Copy blocks (source, destination) int32 [n, 2] of a cache [blocks, ...]; a source of -1 copies nothing.

    No block may be both a source and a destination.
    """
    words = side.view(side.shape[0], -1)
    size = words.shape[1]
    grid = pairs.shape[0], triton.cdiv(size, BLOCK), 1
    launch(run, copy, grid, words, pairs, size, BLOCK=BLOCK)
