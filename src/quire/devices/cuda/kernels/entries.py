"""Entries of the cache, one for each whole window of tokens, made of the tokens' rows that a layer keeps."""

from __future__ import annotations

from typing import Any

import torch

from quire.devices.cuda.kernels.attention import LayerCache, StepTensors
from quire.devices.cuda.kernels.math import exp
from quire.devices.cuda.kernels.norm import NONE, NormTensors, root_mean_square
from quire.devices.cuda.kernels.rope_store import keep, kept_as, normed, rotated
from quire.devices.cuda.kernels.rows import sequence_of
from quire.devices.cuda.language import tl, triton
from quire.devices.cuda.launch import Launcher, launch
from quire.devices.cuda.tiles import Shape

LEAST = tl.constexpr(float("-inf"))


@triton.jit
def kept(raw, scales, table, position, column, inside, W: tl.constexpr, BLOCK: tl.constexpr, FIXED: tl.constexpr,
         BY_TOKEN: tl.constexpr):  # fmt: skip
    """Columns of a token's row in the cache, float32."""
    slot = tl.load(table + position // BLOCK).to(tl.int64) * BLOCK + position % BLOCK
    v = tl.load(raw + slot * W + column, mask=inside, other=0.0).to(tl.float32)
    if BY_TOKEN:
        v *= tl.load(scales + slot)
    if FIXED:
        v *= tl.load(scales)
    return v


@triton.jit
def pooled(raw, scales, bias, table, first, d, inside, SIZE: tl.constexpr, H: tl.constexpr, W: tl.constexpr,
           BLOCK: tl.constexpr, OVERLAP: tl.constexpr, FIXED: tl.constexpr, BY_TOKEN: tl.constexpr):  # fmt: skip
    """Columns d of the mean of a window's rows or, with a `bias`, of a sum weighted by their gates."""
    total = tl.zeros(d.shape, tl.float32)
    if bias is None:
        for i in range(SIZE):
            total += kept(raw, scales, table, first + i, d, inside, W, BLOCK, FIXED, BY_TOKEN)
        return total / SIZE
    begin, most, shares = first * 0, total + LEAST, total
    if OVERLAP:  # the first half of the channels of the window before
        begin = tl.where(first > 0, -SIZE, 0)
    for i in range(begin, SIZE):
        own = d + (H if OVERLAP and i >= 0 else 0)
        gate = kept(raw, scales, table, first + i, W // 2 + own, inside, W, BLOCK, FIXED, BY_TOKEN)
        gate += tl.load(bias + (i + SIZE) % SIZE * (W // 2) + own, mask=inside, other=0.0)
        most = tl.maximum(most, gate)
    for i in range(begin, SIZE):
        own = d + (H if OVERLAP and i >= 0 else 0)
        gate = kept(raw, scales, table, first + i, W // 2 + own, inside, W, BLOCK, FIXED, BY_TOKEN)
        gate += tl.load(bias + (i + SIZE) % SIZE * (W // 2) + own, mask=inside, other=0.0)
        share = exp(gate - most)
        total += share * kept(raw, scales, table, first + i, own, inside, W, BLOCK, FIXED, BY_TOKEN)
        shares += share
    return total / shares


@triton.jit
def entry_store(
    raw, raw_scales, keys, key_scales, bias, weight, norm_bias, angles, positions, places, cu_q, slots, block_table,
    sequences, table_stride, eps,
    SIZE: tl.constexpr, EVERY: tl.constexpr, H: tl.constexpr, D: tl.constexpr, W: tl.constexpr, HALF: tl.constexpr,
    TOKENS: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr, LAYER: tl.constexpr, FIXED: tl.constexpr,
    MOST: tl.constexpr, BY_TOKEN: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """The entry of the window that ends with a token, if one does: pooled, normed, rotated by its first position."""
    token = tl.program_id(0)
    first = tl.load(positions + token) + 1 - SIZE
    if (first + SIZE) % SIZE != 0:
        return
    sequence, d = sequence_of(token, cu_q, sequences, B), tl.arange(0, D)
    table = block_table + tl.load(slots + sequence).to(tl.int64) * table_stride
    v = pooled(raw, raw_scales, bias, table, first, d, d < H, SIZE, H, W, TOKENS, OVERLAP, FIXED, BY_TOKEN)
    v, mean, root = tl.where(d < H, v, 0.0), 0.0, 1.0
    if weight is not None:
        if LAYER:
            mean = tl.sum(v, 0) / H
        root = root_mean_square(tl.where(d < H, v - mean, 0.0), H, eps)
        v = normed(v, mean, root, weight, norm_bias, d, d < H)
    if HALF > 0:
        other, turns = tl.where(d < HALF, d + HALF, d - HALF), d < 2 * HALF
        partner = pooled(
            raw, raw_scales, bias, table, first, other, turns, SIZE, H, W, TOKENS, OVERLAP, FIXED, BY_TOKEN
        )
        if weight is not None:
            partner = normed(partner, mean, root, weight, norm_bias, other, turns)
        v = rotated(v, partner, angles + token.to(tl.int64) * 2 * HALF, d, HALF)
    place = tl.load(places + token)
    place = place // TOKENS * BLOCK + place % TOKENS // (EVERY if EVERY < TOKENS else TOKENS)
    keep(v, keys, key_scales, place, 0, d, 1, H, BLOCK, MOST, BY_TOKEN)


def store_entries(
    run: Launcher,
    raw: LayerCache,
    cache: LayerCache,
    step: StepTensors,
    positions: Any,
    places: Any,
    size: int,
    every: int,
    bias: Any = None,
    is_overlapping: bool = False,
    norm: NormTensors | None = None,
    angles: Any = None,
) -> None:
    """Store the entries of windows of `size` tokens that end in the step, of rows that layer `raw` holds.

    `bias` float32 [size, C] is of gates, which follow C keys in a row. `angles` [T, R] are of the first position of a
    window that ends with the token.
    """
    norm, batch, held = norm or NONE, step.kv_len.shape[0], raw.keys.dtype
    tokens, width, about = raw.keys.shape[2], cache.keys.shape[3], kept_as(cache)
    launch(
        run, entry_store, (positions.shape[0], 1, 1), raw.keys, raw.key_scales, cache.keys, cache.key_scales, bias,
        norm.weight, norm.bias, angles, positions, places, step.cu_q, step.slots, step.block_table, batch,
        step.block_table.stride(0), norm.eps, SIZE=size, EVERY=every, H=width, D=triton.next_power_of_2(width),
        W=raw.keys.shape[3], HALF=0 if angles is None else angles.shape[1] // 2, TOKENS=tokens, OVERLAP=is_overlapping,
        LAYER=norm.kind == "layer", FIXED=held.itemsize == 1 and held != torch.int8,
        B=triton.next_power_of_2(batch), shape=Shape(4, 2), **about,
    )  # fmt: skip
