"""Paged attention over a ragged step: one kernel for prompts, chunks and decoding, whole or split by keys.

Tiles of keys are aligned to position 0. The state of a softmax (maximum, sum, values) is closed every SEGMENT keys, and
closed states are merged from left to right: by the same program, or by `merge` if a work list (work.py) gives them to
several. So the work list decides who computes what, and no bit. Sums of a row are made by the tensor core: its order
does not depend on the number of rows of a tile.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from quire.devices.cuda.kernels.math import LOG2E, tanh
from quire.devices.cuda.language import tl, triton
from quire.devices.cuda.launch import Launcher, launch
from quire.devices.cuda.tiles import SEGMENT
from quire.devices.cuda.work import Work, WorkShape

NONE = tl.constexpr(float("-inf"))


@triton.jit
def merged(most, total, values, most_2, total_2, values_2):
    """The state of two ranges of keys, the first one to the left of the second."""
    top = tl.maximum(most, most_2)
    safe = tl.where(top == NONE, 0.0, top)
    first, second = tl.exp2(most - safe), tl.exp2(most_2 - safe)
    return top, total * first + total_2 * second, values * first[:, None] + values_2 * second[:, None]


@triton.jit
def opened(sinks, head, inside):
    """The state before the first key: the score of a sink, if there are sinks."""
    if sinks is None:
        most = tl.where(inside, NONE, NONE)
        total = tl.where(inside, 0.0, 0.0)
    else:
        most = tl.load(sinks + head, mask=inside, other=0.0) * LOG2E
        total = tl.where(inside, 1.0, 0.0)
    return most, total


@triton.jit
def finish(out, total, values, scales, group, token, head, inside, d, N: tl.constexpr, H: tl.constexpr,
           SCALED: tl.constexpr):  # fmt: skip
    y = values / tl.where(total == 0.0, 1.0, total)[:, None]
    if SCALED:
        y *= tl.load(scales + group)
    place = (token.to(tl.int64) * N + head) * H
    tl.store(
        out + place[:, None] + d[None, :], y.to(out.dtype.element_ty), mask=inside[:, None] & (d < H)[None, :]
    )


@triton.jit
def changed(s, scale, slopes, bias, scores, token, head, inside, position, place, score_stride, positions,
            CAP: tl.constexpr, REACH: tl.constexpr):  # fmt: skip
    """Scores after all that Attention does to them, times log2(e)."""
    s = s * scale
    if CAP > 0:
        s = CAP * tanh(s / CAP)
    distance = place[None, :] - position[:, None]
    if slopes is not None:
        s += tl.load(slopes + head, mask=inside, other=0.0)[:, None] * distance.to(tl.float32)
    if bias is not None:
        near = tl.minimum(tl.maximum(distance, -REACH), REACH) + REACH
        s += tl.load(bias + head[:, None] * (2 * REACH + 1) + near, mask=inside[:, None], other=0.0)
    if scores is not None:
        added = token.to(tl.int64) * score_stride + head * positions
        known = inside[:, None] & (place < positions)[None, :]
        s += tl.load(scores + added[:, None] + place[None, :], mask=known, other=0.0).to(tl.float32)
    return s * LOG2E


@triton.jit
def seen_by(place, position, known, WINDOW: tl.constexpr, CHUNK: tl.constexpr, AHEAD: tl.constexpr,
            EVERY: tl.constexpr):  # fmt: skip
    """Tell which positions each query sees, or which entries."""
    if EVERY > 0:
        return known[None, :] & ((place[None, :] + 1) * EVERY <= position[:, None] + 1)
    seen = known[None, :] & (place[None, :] <= position[:, None] + AHEAD)
    if WINDOW > 0:
        seen &= place[None, :] > position[:, None] - WINDOW
    if CHUNK > 0:
        seen &= place[None, :] >= (position // CHUNK * CHUNK)[:, None]
    return seen


@triton.jit
def bounds(item, first, tokens, length, WINDOW: tl.constexpr, CHUNK: tl.constexpr, AHEAD: tl.constexpr,
           LISTED: tl.constexpr, SEGMENT: tl.constexpr, SPLIT: tl.constexpr):  # fmt: skip
    """The positions that any of `tokens` queries from position `first` on sees: from, to (not included).

    With SPLIT only those in the segments of the item. Of a list of LISTED positions these are places in the list.
    """
    low = first * 0
    if LISTED > 0:
        length = tl.minimum(LISTED, first + 1)
    elif WINDOW > 0:
        low = tl.maximum(low, first - WINDOW + 1)
    if CHUNK > 0 and LISTED == 0:
        low = tl.maximum(low, first // CHUNK * CHUNK)
    high = tl.minimum(tl.minimum(first + tokens, length) + AHEAD, length)
    last = tl.cdiv(high, SEGMENT)
    if SPLIT:
        segment = tl.load(item + 2)
        low = tl.maximum(low, segment * SEGMENT)
        high = tl.minimum(high, (segment + tl.load(item + 3)) * SEGMENT)
    return low, high, last


@triton.jit
def entry_bounds(item, seen, last, LISTED: tl.constexpr, EVERY: tl.constexpr, SEGMENT: tl.constexpr,
                 SPLIT: tl.constexpr):  # fmt: skip
    """The same of entries that end within the first `seen` positions; their segments follow the last one of keys."""
    low, high = seen * 0, seen // EVERY
    if LISTED > 0:
        high = tl.minimum(high, LISTED)
    if SPLIT:
        segment = tl.load(item + 2) - last
        low = tl.maximum(low, segment * SEGMENT)
        high = tl.minimum(high, (segment + tl.load(item + 3)) * SEGMENT)
    return low, high


@triton.jit
def list_of(chosen, item, group, stride, POOL: tl.constexpr, LISTED: tl.constexpr, SETS: tl.constexpr):
    """The list of a token's group, if there are lists."""
    found = item  # no function returns None to the compiler of Triton 3.6
    if LISTED > 0:
        found = chosen + tl.load(item + 1).to(tl.int64) * stride
        if SETS > 1:
            found += group * (LISTED // POOL)
    return found


@triton.jit
def weighed(s, most):
    """The weights of scores less the greatest so far, what those before are multiplied by, and the greatest."""
    top = tl.maximum(most, tl.max(s, 1))
    safe = tl.where(top == NONE, 0.0, top)
    return tl.exp2(s - safe[:, None]), tl.exp2(most - safe), top


@triton.jit
def keys_at(table, chosen, index, high, position, BLOCK: tl.constexpr, POOL: tl.constexpr, LISTED: tl.constexpr,
            EVERY: tl.constexpr):  # fmt: skip
    """Positions of keys, which of them there are, and their blocks: from an index on, or at places of a list."""
    place, known = index, index < high
    if LISTED > 0:
        number = tl.load(chosen + index // POOL, mask=known, other=-1.0).to(tl.int32)
        place = number * POOL + index % POOL
        known = (number >= 0) & (place <= position)
    return place, known, tl.load(table + last_of(place, EVERY) // BLOCK, mask=known, other=0)


@triton.jit
def last_of(place, EVERY: tl.constexpr):
    """The position in whose block a key lies: its own, or the last one of an entry."""
    return place * EVERY + (EVERY - 1) if EVERY > 0 else place


@triton.jit
def narrowed(of_q, inside, d, width, scale, NARROW: tl.constexpr, FLOAT: tl.constexpr):
    """Columns of the queries. In float16 they are scaled first: other types hold larger numbers."""
    x = tl.load(of_q[:, None] + d[None, :], mask=inside[:, None] & (d < width)[None, :], other=0.0)
    if NARROW:
        x = x.to(tl.float32) * scale
    return x.to(FLOAT)


@triton.jit
def set_aside(partial_values, partial_states, number, row, d, most, total, values):
    """Store a closed state for `merge`."""
    state = (number.to(tl.int64) * tl.num_programs(1) + tl.program_id(1)) * row.shape[0] + row
    tl.store(partial_values + state[:, None] * d.shape[0] + d[None, :], values)
    tl.store(partial_states + state * 2, most)
    tl.store(partial_states + state * 2 + 1, tl.max(total, 1))


@triton.jit
def taken_in(
    query, query_r, keys, values, key_scales, value_scales, slopes, bias, scores, chosen, table, item, partial_values,
    partial_states, most, total, sums, low, high, base, first, token, head, inside, position, group, scale, share,
    score_stride, positions,
    G: tl.constexpr, H: tl.constexpr, D: tl.constexpr, R: tl.constexpr, RD: tl.constexpr, BLOCK: tl.constexpr,
    WINDOW: tl.constexpr, CHUNK: tl.constexpr, AHEAD: tl.constexpr, CAP: tl.constexpr, POOL: tl.constexpr,
    LISTED: tl.constexpr, EVERY: tl.constexpr, REACH: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    SEGMENT: tl.constexpr, SPLIT: tl.constexpr, PLAIN: tl.constexpr, BY_TOKEN: tl.constexpr, FLOAT: tl.constexpr,
):  # fmt: skip
    """The state after the keys from `low` to `high`, or entries, one for EVERY positions (0: keys).

    With SPLIT closed states are set aside; segments are numbered from `base` on. `share` multiplies what is stored.
    """
    row, d, r, key = tl.arange(0, ROWS), tl.arange(0, D), H + tl.arange(0, RD), tl.arange(0, KEYS)
    own_most, own = tl.full([ROWS], NONE, tl.float32), tl.zeros([ROWS, D], tl.float32)
    own_total, ones = tl.zeros([ROWS, 16], tl.float32), tl.full([KEYS, 16], 1.0, FLOAT)
    # The blocks of the next tile are loaded one turn early, so that keys and values can be loaded ahead.
    begin_tile, end_tile, column = low // KEYS, tl.cdiv(high, KEYS), (d < H)[None, :]
    after, follows, blocks = keys_at(
        table, chosen, begin_tile * KEYS + key, high, first, BLOCK, POOL, LISTED, EVERY
    )
    for tile in range(begin_tile, end_tile):
        index = tile * KEYS + key
        place, known = (after, follows) if LISTED > 0 else (index, index < high)
        slot = (blocks.to(tl.int64) * G + group) * BLOCK + place % BLOCK
        if EVERY > 0:
            within = last_of(place, EVERY) % BLOCK // (EVERY if EVERY < BLOCK else BLOCK)
            slot = (blocks.to(tl.int64) * G + group) * ((BLOCK + EVERY - 1) // EVERY) + within
        after, follows, blocks = keys_at(table, chosen, index + KEYS, high, first, BLOCK, POOL, LISTED, EVERY)
        of_key = keys + slot[None, :] * (H + R)
        k = tl.load(of_key + d[:, None], mask=known[None, :] & (d < H)[:, None], other=0.0).to(FLOAT)
        s = tl.dot(query, k, input_precision="ieee")
        if R > 0:
            turns = known[None, :] & (r < H + R)[:, None]
            k_r = tl.load(of_key + r[:, None], mask=turns, other=0.0).to(FLOAT)
            s += tl.dot(query_r, k_r, input_precision="ieee")
        if values is None:  # a key is, or begins with, its value
            v = tl.trans(k)
        else:
            v = tl.load(values + slot[:, None] * H + d[None, :], mask=known[:, None] & column, other=0.0)
        if BY_TOKEN:
            s *= tl.load(key_scales + slot, mask=known, other=0.0)[None, :]
        if share is not None:
            s *= share
        if PLAIN:
            s *= scale
        else:
            s = changed(s, scale, slopes, bias, scores, token, head, inside, position, place, score_stride, positions,
                        CAP, REACH)  # fmt: skip
        s = tl.where(seen_by(place, position, known, WINDOW, CHUNK, AHEAD, EVERY), s, NONE)
        p, old, own_most = weighed(s, own_most)
        own_total = tl.dot(p.to(FLOAT), ones, own_total * old[:, None], input_precision="ieee")
        if BY_TOKEN:
            p *= tl.load(value_scales + slot, mask=known, other=0.0)[None, :]
        if share is not None:
            p *= share
        own = tl.dot(p.to(FLOAT), v.to(FLOAT), own * old[:, None], input_precision="ieee")
        if ((tile + 1) % (SEGMENT // KEYS) == 0) | (tile + 1 == end_tile):
            if SPLIT:
                number = tl.load(item + 4) + base + tile * KEYS // SEGMENT - tl.load(item + 2)
                set_aside(partial_values, partial_states, number, row, d, own_most, own_total, own)
            else:
                most, total, sums = merged(most, total, sums, own_most, tl.max(own_total, 1), own)
            own_most, own = tl.full([ROWS], NONE, tl.float32), tl.zeros([ROWS, D], tl.float32)
            own_total = tl.zeros([ROWS, 16], tl.float32)
    return most, total, sums


@triton.jit(do_not_specialize=["table_stride"])
def attention(
    q, keys, values, key_scales, value_scales, entries, entry_scales, out, sinks, slopes, bias, scores, chosen, cu_q,
    kv_len, slots, block_table, items, partial_values, partial_states, scale, table_stride, score_stride, positions,
    chosen_stride,
    N: tl.constexpr, G: tl.constexpr, H: tl.constexpr, D: tl.constexpr, R: tl.constexpr, RD: tl.constexpr,
    BLOCK: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr, AHEAD: tl.constexpr, CAP: tl.constexpr,
    POOL: tl.constexpr, LISTED: tl.constexpr, SETS: tl.constexpr, EVERY: tl.constexpr, REACH: tl.constexpr,
    HEADS: tl.constexpr, ROWS: tl.constexpr, USED: tl.constexpr, KEYS: tl.constexpr, SEGMENT: tl.constexpr,
    SPLIT: tl.constexpr, PLAIN: tl.constexpr, FIXED: tl.constexpr, BY_TOKEN: tl.constexpr, NARROW: tl.constexpr,
    FLOAT: tl.constexpr,
):  # fmt: skip
    item, tiles = items + tl.program_id(0) * 8, tl.cdiv(N // G, HEADS)
    sequence, group = tl.load(item), tl.program_id(1) // tiles
    if sequence < 0:
        return
    end, length = tl.load(cu_q + sequence + 1), tl.load(kv_len + sequence)
    row, d = tl.arange(0, ROWS), tl.arange(0, D)
    token = tl.load(item + 1) + row // HEADS
    head = group * (N // G) + tl.program_id(1) % tiles * HEADS + row % HEADS
    inside = (token < end) & (row < USED) & (head < (group + 1) * (N // G))
    position, first = length - end + token, length - end + tl.load(item + 1)
    listed: tl.constexpr = 0 if EVERY > 0 else LISTED
    tokens: tl.constexpr = 1 if LISTED > 0 else ROWS // HEADS
    low, high, last = bounds(item, first, tokens, length, WINDOW, CHUNK, AHEAD, listed, SEGMENT, SPLIT)
    if FIXED:
        scale *= tl.load(key_scales + group)
    if PLAIN:
        scale *= LOG2E
    of_q = q + (token.to(tl.int64) * N + head) * (H + R)
    query, query_r = narrowed(of_q, inside, d, H, scale, NARROW, FLOAT), None
    if R > 0:
        query_r = narrowed(of_q, inside, H + tl.arange(0, RD), H + R, scale, NARROW, FLOAT)
    scale = 1.0 if NARROW else scale
    table = block_table + tl.load(slots + sequence).to(tl.int64) * table_stride
    most, total = opened(sinks, head, inside)
    sums = tl.zeros([ROWS, D], tl.float32)
    chosen = list_of(chosen, item, group, chosen_stride, POOL, LISTED, SETS)
    most, total, sums = taken_in(
        query, query_r, keys, values, key_scales, value_scales, slopes, bias, scores, chosen, table, item,
        partial_values, partial_states, most, total, sums, low, high, 0, first, token, head, inside, position, group,
        scale, None, score_stride, positions, G, H, D, R, RD, BLOCK, WINDOW, CHUNK, AHEAD, CAP, POOL, listed, 0, REACH,
        ROWS, KEYS, SEGMENT, SPLIT, PLAIN, BY_TOKEN, FLOAT,
    )  # fmt: skip
    if EVERY > 0:
        share = None
        if FIXED:
            share = tl.div_rn(tl.load(entry_scales + group), tl.load(key_scales + group))
        seen = tl.minimum(first + tokens, length)
        low, high = entry_bounds(item, seen, last, LISTED, EVERY, SEGMENT, SPLIT)
        most, total, sums = taken_in(
            query, query_r, entries, None, entry_scales, entry_scales, None, None, None, chosen, table, item,
            partial_values, partial_states, most, total, sums, low, high, last, first, token, head, inside, position,
            group, scale, share, score_stride, positions, G, H, D, R, RD, BLOCK, 0, 0, 0, CAP, 1, LISTED, EVERY, 0,
            ROWS, KEYS, SEGMENT, SPLIT, PLAIN, BY_TOKEN, FLOAT,
        )  # fmt: skip
    if not SPLIT:
        finish(out, total, sums, value_scales, group, token, head, inside, d, N, H, FIXED)


@triton.jit
def merge(
    out, value_scales, sinks, merges, partial_values, partial_states,
    N: tl.constexpr, G: tl.constexpr, H: tl.constexpr, D: tl.constexpr, HEADS: tl.constexpr, ROWS: tl.constexpr,
    OWN_ROWS: tl.constexpr, FIXED: tl.constexpr,
):  # fmt: skip
    """Merge the closed states of one token's heads."""
    item = merges + tl.program_id(0) * 4
    token = tl.load(item)
    if token < 0:
        return
    tiles: tl.constexpr = (N // G + HEADS - 1) // HEADS
    group = tl.program_id(1) // tiles
    row, d = tl.arange(0, OWN_ROWS), tl.arange(0, D)
    head = group * (N // G) + tl.program_id(1) % tiles * HEADS + row
    inside = (row < HEADS) & (head < (group + 1) * (N // G))
    most, total = opened(sinks, head, inside)
    sums = tl.zeros([OWN_ROWS, D], tl.float32)
    begin = tl.load(item + 2)
    for segment in range(tl.load(item + 3)):
        state = (begin + segment).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
        place = state * ROWS + tl.load(item + 1) * HEADS + row
        own = tl.load(partial_values + place[:, None] * D + d[None, :], mask=inside[:, None], other=0.0)
        own_most = tl.load(partial_states + place * 2, mask=inside, other=0.0)
        own_total = tl.load(partial_states + place * 2 + 1, mask=inside, other=0.0)
        most, total, sums = merged(most, total, sums, own_most, own_total, own)
    finish(out, total, sums, value_scales, group, tl.zeros_like(row) + token, head, inside, d, N, H, FIXED)


@dataclass(frozen=True, slots=True)
class LayerCache:
    """Keys and values of a layer [blocks, G, block size, H].

    Scales are [blocks, G, block size] for int8, [G] for FP8, and None for the others.
    """

    keys: Any
    values: Any
    key_scales: Any = None
    value_scales: Any = None


@dataclass(frozen=True, slots=True)
class StepTensors:
    """The places of a step's sequences: cu_q [B + 1], kv_len [B], slots [B], block_table [S, M]; all int32."""

    cu_q: Any
    kv_len: Any
    slots: Any
    block_table: Any


@dataclass(frozen=True, slots=True)
class WorkTensors:
    """A work list on the device, and room for closed states: float32 [partials, head tiles, rows, D] and [.., 2]."""

    whole: Any
    split: Any
    merges: Any
    partial_values: Any
    partial_states: Any


@dataclass(frozen=True, slots=True)
class Changes:
    """Terms that scores take in: float32 sinks [N], slopes [N], bias [N, 2 reach + 1]; scores [T, N * positions].

    `chosen` float32 [T, sets K] are numbers of pools of `pool` positions, of all heads or of each group: ascending,
    then -1. Queries see those alone; WorkShape.listed is K pools. With `entries`, a layer that has one for each
    WorkShape.every positions, queries see these too, or those that are chosen, after the keys of their own layer.
    """

    sinks: Any = None
    slopes: Any = None
    bias: Any = None
    scores: Any = None
    chosen: Any = None
    pool: int = 1
    sets: int = 1
    entries: LayerCache | None = None


def work_tensors(work: Work, shape: WorkShape, width: int, send: Any, empty: Any) -> WorkTensors:
    """Place a work list by `send(rows)`, and make room for states `width` wide by `empty(*shape, dtype=...)`."""
    lists = (send(rows) if len(rows) else None for rows in (work.whole, work.split, work.merges))
    states, sizes = (work.partials, shape.head_tiles, shape.tile.rows), (triton.next_power_of_2(width), 2)
    return WorkTensors(*lists, *(empty(*states, size, dtype=torch.float32) for size in sizes))


def arithmetic(act: Any, kept: Any) -> Any:
    """The type of products, for activations and a cache of these types."""
    if torch.float32 in (act, kept):
        return tl.float32
    if kept in (torch.float8_e4m3fn, torch.float8_e5m2):
        return tl.float16
    wanted = act if kept == torch.int8 else kept
    return tl.bfloat16 if wanted == torch.bfloat16 else tl.float16


def attend(
    run: Launcher,
    q: Any,
    cache: LayerCache,
    out: Any,
    step: StepTensors,
    work: WorkTensors,
    shape: WorkShape,
    scale: float,
    cap: float = 0.0,
    changes: Changes | None = None,
) -> None:
    """Attention of queries [T, N H] over a layer's cache: out [T, N H].

    In latent attention (no values) `out` is [T, N C]: values are the first C elements of keys.
    """
    changes = Changes() if changes is None else changes
    _, groups, block, whole = cache.keys.shape
    width = out.shape[1] // shape.num_heads
    value_scales = cache.key_scales if cache.values is None else cache.value_scales
    kept = cache.keys.dtype
    by_token, fixed = kept == torch.int8, kept.itemsize == 1 and kept != torch.int8
    number = arithmetic(q.dtype, kept)
    tile, scores = shape.tile, changes.scores
    entries = changes.entries or LayerCache(None, None)
    common = {
        "N": shape.num_heads, "G": groups, "H": width, "D": triton.next_power_of_2(width),
        "HEADS": shape.heads_of_tile, "ROWS": tile.rows, "FIXED": fixed,
    }  # fmt: skip
    for items, split in ((work.whole, False), (work.split, True)):
        if items is None:
            continue
        launch(
            run, attention, (items.shape[0], shape.head_tiles, 1), q, cache.keys, cache.values, cache.key_scales,
            value_scales, entries.keys, entries.key_scales, out, changes.sinks, changes.slopes, changes.bias, scores,
            changes.chosen, step.cu_q, step.kv_len, step.slots, step.block_table, items, work.partial_values,
            work.partial_states, scale, step.block_table.stride(0), 0 if scores is None else scores.stride(0),
            0 if scores is None else scores.shape[1] // shape.num_heads,
            0 if changes.chosen is None else changes.chosen.stride(0), POOL=changes.pool, LISTED=shape.listed,
            SETS=changes.sets, EVERY=shape.every, USED=shape.tokens_of_tile * shape.heads_of_tile,
            R=whole - width, RD=max(16, triton.next_power_of_2(whole - width)), BLOCK=block, WINDOW=shape.window,
            CHUNK=shape.chunk, AHEAD=shape.ahead, CAP=cap, KEYS=tile.keys, SEGMENT=SEGMENT, SPLIT=split,
            REACH=0 if changes.bias is None else changes.bias.shape[1] // 2, BY_TOKEN=by_token, FLOAT=number,
            PLAIN=cap == 0 and (changes.slopes, changes.bias, scores) == (None, None, None),
            NARROW=number == tl.float16 and q.dtype == torch.bfloat16, shape=tile.shape, **common,
        )  # fmt: skip
    if work.split is not None:
        launch(
            run, merge, (work.merges.shape[0], shape.head_tiles, 1), out, value_scales, changes.sinks, work.merges,
            work.partial_values, work.partial_states, OWN_ROWS=triton.next_power_of_2(shape.heads_of_tile), **common,
        )  # fmt: skip
