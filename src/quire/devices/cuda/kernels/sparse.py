"""Choices of sparse attention: scores of index keys, and the best of them, or of pools of them, for each query.

A key's score is a float32 sum whose order depends on shapes alone. The best are found bit by bit, without sorting; of
equal scores the earlier pool's goes first.
"""

from __future__ import annotations

from typing import Any

import torch

from quire.devices.cuda.kernels.attention import LayerCache, StepTensors, arithmetic
from quire.devices.cuda.kernels.rows import sequence_of
from quire.devices.cuda.language import tl, triton
from quire.devices.cuda.launch import Launcher, launch
from quire.devices.cuda.tiles import Shape
from quire.devices.sparse_ops import Choose

KEYS, TILES, SHAPE = 64, 64, Shape(4, 2)
"""KEYS of a tile of scores, and the programs that share those of a query, at most."""
ROOM = 64 << 20
"""ROOM is the bytes of scores that are held at once, at least those of one token."""
PIECE = 1024
NONE = tl.constexpr(float("-inf"))


@triton.jit
def index_scores(
    q, weights, keys, key_scales, scores, positions, cu_q, slots, block_table, first, sequences, q_stride,
    weight_stride, table_stride, score_stride, scale,
    EACH: tl.constexpr, HEADS: tl.constexpr, H: tl.constexpr, D: tl.constexpr, EVERY: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, RELU: tl.constexpr, FIXED: tl.constexpr, BY_TOKEN: tl.constexpr,
    FLOAT: tl.constexpr, B: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Scores of the keys that a token's queries of one group see."""
    token, group = first + tl.program_id(0), tl.program_id(2)
    sequence = sequence_of(token, cu_q, sequences, B)
    row, d, key = tl.arange(0, HEADS), tl.arange(0, D), tl.arange(0, KEYS)
    head = group * EACH + row
    inside, limit = row < EACH, (tl.load(positions + token) + 1) // EVERY
    of_q = q + token.to(tl.int64) * q_stride + head * H
    query = tl.load(of_q[:, None] + d[None, :], mask=inside[:, None] & (d < H)[None, :], other=0.0).to(FLOAT)
    shares = inside.to(tl.float32)
    if weights is not None:
        shares = tl.load(weights + token.to(tl.int64) * weight_stride + head, mask=inside, other=0.0)
    if FIXED:
        scale *= tl.load(key_scales)
    table = block_table + tl.load(slots + sequence).to(tl.int64) * table_stride
    own = scores + (tl.program_id(0).to(tl.int64) * tl.num_programs(2) + group) * score_stride
    for tile in range(tl.program_id(1), tl.cdiv(limit, KEYS), tl.num_programs(1)):
        at = tile * KEYS + key
        known, last = at < limit, at * EVERY + (EVERY - 1)
        blocks = tl.load(table + last // BLOCK, mask=known, other=0).to(tl.int64)
        slot = blocks * ROWS + last % BLOCK // (EVERY if EVERY < BLOCK else BLOCK)
        there = known[None, :] & (d < H)[:, None]
        k = tl.load(keys + slot[None, :] * H + d[:, None], mask=there, other=0.0).to(FLOAT)
        s = tl.dot(query, k, input_precision="ieee") * scale
        if BY_TOKEN:
            s *= tl.load(key_scales + slot, mask=known, other=0.0)[None, :]
        if RELU:
            s = tl.maximum(s, 0.0)
        tl.store(own + at, tl.sum(s * shares.to(tl.float32)[:, None], 0), mask=known)


@triton.jit
def ranked(pools, start, count, BLOCK: tl.constexpr):
    """Scores of a piece of the pools as numbers in their order, and which of them there are."""
    at = start + tl.arange(0, BLOCK)
    v = tl.load(pools + at, mask=at < count, other=0.0) + 0.0  # -0 becomes 0
    bits = v.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64), at < count


@triton.jit
def counted(pools, count, least, BLOCK: tl.constexpr):
    """Count the pools that rank from a number on."""
    total = count * 0
    for start in range(0, count, BLOCK):
        rank, there = ranked(pools, start, count, BLOCK)
        total += tl.sum((there & (rank >= least)).to(tl.int32), 0)
    return total


@triton.jit
def choices(
    scores, pools, positions, out, first, score_stride, pool_stride, out_stride,
    SIZE: tl.constexpr, EVERY: tl.constexpr, LOCAL: tl.constexpr, TOP: tl.constexpr, TAIL: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The numbers of the pools that one group of a token's queries chooses, ascending, then -1."""
    token, group, i = first + tl.program_id(0), tl.program_id(1), tl.arange(0, BLOCK)
    row = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + group
    position, scores = tl.load(positions + token), scores + row * score_stride
    own, count, pools = position // SIZE, (position + 1) // EVERY, pools + row * pool_stride
    if EVERY == 1:
        count = own + 1
        for start in range(0, count, BLOCK):
            best = tl.full([BLOCK], NONE, tl.float32)
            for j in range(SIZE):
                at = (start + i) * SIZE + j
                best = tl.maximum(best, tl.load(scores + at, mask=at <= position, other=NONE))
            best = tl.where(start + i > own - LOCAL, float("inf"), best)
            tl.store(pools + start + i, best, mask=start + i < count)
        tl.debug_barrier()
    one = (count * 0 + 1).to(tl.int64)
    least = one * -(1 << 31) - 1
    if count > TOP:
        least = one * -(1 << 31)
        for bit in range(32):
            tried = least + (one << (31 - bit))
            least = tl.where(counted(pools, count, tried, BLOCK) >= TOP, tried, least)
    ties = TOP - counted(pools, count, least + 1, BLOCK)
    found, seen = count * 0, count * 0
    to = out + token.to(tl.int64) * out_stride + group * (TOP + TAIL)
    for start in range(0, count, BLOCK):
        rank, there = ranked(pools, start, count, BLOCK)
        equal = (there & (rank == least)).to(tl.int32)
        kept = there & ((rank > least) | ((equal > 0) & (seen + tl.cumsum(equal, 0) <= ties)))
        place = found + tl.cumsum(kept.to(tl.int32), 0) - 1
        tl.store(to + place, (start + i).to(tl.float32), mask=kept)
        found += tl.sum(kept.to(tl.int32), 0)
        seen += tl.sum(equal, 0)
    if TAIL and own >= count:
        tl.store(to + found, own.to(tl.float32))
        found += 1
    for start in range(0, TOP + TAIL, BLOCK):
        rest = start + i
        tl.store(to + rest, rest * 0.0 - 1.0, mask=(rest >= found) & (rest < TOP + TAIL))


def choose(
    run: Launcher,
    q: Any,
    weights: Any,
    cache: LayerCache,
    positions: Any,
    step: StepTensors,
    op: Choose[Any],
    every: int,
    block: int,
    out: Any,
    empty: Any,
) -> None:
    """Numbers of pools [T, groups K] float32 as Choose says, for a cache layer in blocks of `block` tokens.

    `empty(*shape, dtype=...)` makes room for scores, of as many tokens at once as fit ROOM.
    """
    rows, width = cache.keys.shape[2:]
    each, batch = op.num_heads // op.groups, step.kv_len.shape[0]
    span = step.block_table.shape[1] * block // every
    count = max(1, min(len(q), ROOM // (8 * op.groups * span)))
    scores, pools = (empty(count * op.groups, span + 1, dtype=torch.float32) for _ in range(2))
    kept = cache.keys.dtype
    by_token, fixed = kept == torch.int8, kept.itemsize == 1 and kept != torch.int8
    for first in range(0, len(q), count):
        tokens = min(count, len(q) - first)
        launch(
            run, index_scores, (tokens, min(triton.cdiv(span, KEYS), TILES), op.groups), q, weights, cache.keys,
            cache.key_scales, scores, positions, step.cu_q, step.slots, step.block_table, first, batch, q.stride(0),
            0 if weights is None else weights.stride(0), step.block_table.stride(0), span + 1, float(op.scale),
            EACH=each, HEADS=max(16, triton.next_power_of_2(each)), H=width, D=max(16, triton.next_power_of_2(width)),
            EVERY=every, BLOCK=block, ROWS=rows, RELU=op.relu, FIXED=fixed, BY_TOKEN=by_token,
            FLOAT=arithmetic(q.dtype, kept), B=triton.next_power_of_2(batch), KEYS=KEYS, shape=SHAPE,
        )  # fmt: skip
        launch(
            run, choices, (tokens, op.groups, 1), scores, pools if every == 1 else scores, positions, out, first,
            span + 1, span + 1, out.stride(0), SIZE=op.size, EVERY=every, LOCAL=op.local, TOP=op.top_k,
            TAIL=int(op.tail), BLOCK=PIECE, shape=SHAPE,
        )  # fmt: skip
