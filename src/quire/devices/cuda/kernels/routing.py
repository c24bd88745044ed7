"""Mixtures of experts before their products: which experts a token takes, and which tokens an expert computes."""

from __future__ import annotations

from typing import Any

from quire.devices.cuda.kernels.math import activate, exp, sigmoid
from quire.devices.cuda.language import tl, triton
from quire.devices.cuda.launch import Launcher, launch
from quire.devices.cuda.tiles import Shape
from quire.devices.operands import Routing

NONE = tl.constexpr(float("-inf"))
NARROW = Shape(4, 1)


@triton.jit
def every(x):
    """The sum of a tile."""
    return tl.sum(tl.sum(x, 1), 0)


@triton.jit
def best_groups(ranks, p, TOP: tl.constexpr, BY_TWO: tl.constexpr):
    """Tell which groups [G] are the best by their best expert, or by their best two; of equal ones the first."""
    best, g = tl.max(ranks, 1), tl.arange(0, ranks.shape[0])
    if BY_TWO:
        first = tl.min(tl.where(ranks == best[:, None], p, ranks.shape[1]), 1)
        best += tl.max(tl.where(p == first[:, None], NONE, ranks), 1)
    taken = g < 0
    for _ in range(TOP):
        top = tl.max(tl.where(taken, NONE, best), 0)
        taken = taken | (g == tl.min(tl.where(taken | (best != top), ranks.shape[0], g), 0))
    return taken


@triton.jit
def choose_experts(
    scores, given, correction, weight_scales, ids, weights, stride, scale, floor, threshold,
    E: tl.constexpr, GROUPS: tl.constexpr, G: tl.constexpr, P: tl.constexpr, TOP: tl.constexpr,
    TOP_GROUPS: tl.constexpr, BY_TWO: tl.constexpr, CHOSEN: tl.constexpr, C: tl.constexpr, SCORING: tl.constexpr,
    AFTER: tl.constexpr, RENORMALIZE: tl.constexpr, MIXER: tl.constexpr, CORRECT_LOGITS: tl.constexpr,
    GATE: tl.constexpr,
):  # fmt: skip
    """The experts of one token by operands.Routing, in a tile of groups and their experts."""
    token, g, p, slot = (
        tl.program_id(0).to(tl.int64),
        tl.arange(0, G)[:, None],
        tl.arange(0, P)[None, :],
        tl.arange(0, C),
    )
    at, there = g * (E // GROUPS) + p, (g < GROUPS) & (p < E // GROUPS)
    logits = tl.load(scores + token * stride + at, mask=there, other=NONE).to(tl.float32)
    own = logits
    if SCORING == "sigmoid":
        own = sigmoid(logits)
    elif SCORING == "root_softplus":
        own = tl.sqrt_rn(activate(logits, "softplus"))
    elif not AFTER and not MIXER:
        shares = tl.where(there, exp(logits - tl.max(tl.max(logits, 1), 0)), 0.0)
        own = tl.div_rn(shares, every(shares))
    ranks = logits if CORRECT_LOGITS else own
    if correction is not None:
        ranks += tl.load(correction + at, mask=there, other=0.0)
    ranks = tl.where(there, ranks, NONE)
    if GROUPS > 1:
        ranks = tl.where(best_groups(ranks, p, TOP_GROUPS, BY_TWO)[:, None], ranks, NONE)
    numbers, shares = slot * 0, slot * 0.0
    for i in range(TOP):
        top = tl.max(tl.max(ranks, 1), 0)
        if given is None:
            number = tl.min(tl.min(tl.where((ranks == top) & there, at, E - 1), 1), 0)
        else:
            number = tl.load(given + token * TOP + i).to(tl.int32)
        share = every(tl.where((at == number) & there, own, 0.0))
        if MIXER:
            near = there & (tl.div_rn(top - logits, tl.maximum(tl.abs(logits), top)) <= threshold)
            share = tl.div_rn(1.0, every(tl.where(near, exp(ranks - top), 0.0)))
        numbers, shares = tl.where(slot == i, number, numbers), tl.where(slot == i, share, shares)
        ranks = tl.where(at == number, NONE, ranks)
    if AFTER:
        top = tl.max(tl.where(slot < TOP, shares, NONE), 0)
        shares = tl.where(slot < TOP, exp(shares - top), 0.0)
        shares = tl.div_rn(shares, tl.sum(shares, 0))
    if RENORMALIZE:
        shares = tl.div_rn(shares, tl.sum(shares, 0) + floor)
    shares *= scale
    if weight_scales is not None:
        shares *= tl.load(weight_scales + numbers, mask=slot < TOP, other=0.0)
    if CHOSEN > TOP:
        last = tl.load(scores + token * stride + E).to(tl.float32) if GATE else 1.0
        share = sigmoid(last) if GATE else last
        numbers, shares = tl.where(slot == TOP, E, numbers), tl.where(slot == TOP, share, shares)
    tl.store(ids + token * CHOSEN + slot, numbers, mask=slot < CHOSEN)
    tl.store(weights + token * CHOSEN + slot, shares, mask=slot < CHOSEN)


@triton.jit(do_not_specialize=["total"])
def count_pairs(ids, addresses, counts, total, BLOCK: tl.constexpr):
    """Count an expert's pairs; experts without weights compute none."""
    expert, at, found = tl.program_id(0), tl.arange(0, BLOCK), tl.zeros([BLOCK], tl.int32)
    for start in range(0, total, BLOCK):
        number = tl.load(ids + start + at, mask=start + at < total, other=-1)
        found += (number == expert).to(tl.int32)
    own = tl.sum(found, 0)
    if addresses is not None:
        own = tl.where(tl.load(addresses + expert) == 0, 0, own)
    tl.store(counts + expert, own)


@triton.jit(do_not_specialize=["total", "most"])
def place_pairs(ids, counts, tile_experts, pairs, total, most, E: tl.constexpr, EXPERTS: tl.constexpr,
                TOKENS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Write the numbers of an expert's pairs, ascending, into tiles of its own; -1 fills the last one."""
    expert, e, at = tl.program_id(0), tl.arange(0, EXPERTS), tl.arange(0, BLOCK)
    every_count = tl.load(counts + e, mask=e < E, other=0)
    tiles = (every_count + TOKENS - 1) // TOKENS
    first, count = tl.sum(tl.where(e < expert, tiles, 0), 0), tl.load(counts + expert)
    own = (count + TOKENS - 1) // TOKENS
    done = count * 0
    if count > 0:
        for start in range(0, total, BLOCK):
            number = tl.load(ids + start + at, mask=start + at < total, other=-1)
            is_own = (number == expert).to(tl.int32)
            place = first * TOKENS + done + tl.cumsum(is_own, 0) - 1
            tl.store(pairs + place, start + at, mask=is_own > 0)
            done += tl.sum(is_own, 0)
    rest = count + tl.arange(0, TOKENS)
    tl.store(pairs + first * TOKENS + rest, rest * 0 - 1, mask=rest < own * TOKENS)
    for start in range(0, own, BLOCK):
        tl.store(tile_experts + first + start + at, at * 0 + expert, mask=start + at < own)
    if expert == 0:
        for start in range(tl.sum(tiles, 0), most, BLOCK):
            tl.store(tile_experts + start + at, at * 0 - 1, mask=start + at < most)


def route(
    run: Launcher,
    scores: Any,
    routing: Routing,
    ids: Any,
    weights: Any,
    correction: Any = None,
    weight_scales: Any = None,
    given: Any = None,
) -> None:
    """Choose experts by scores [T, E], and one more for a gated shared expert: ids int32 and weights float32 [T, C].

    `given` [T, top_k] are the chosen ones, of which scores give the weights.
    """
    count, groups = routing.num_experts, routing.num_groups
    chosen = routing.top_k + routing.shared
    mixer, size = routing.sparse_mixer != 0, triton.next_power_of_2
    launch(
        run, choose_experts, (scores.shape[0], 1, 1), scores, given, correction, weight_scales, ids, weights,
        scores.stride(0), float(routing.scale), routing.floor, 2.0 * routing.sparse_mixer,
        E=count, GROUPS=groups, G=size(groups), P=size(count // groups), TOP=routing.top_k,
        TOP_GROUPS=routing.top_groups, BY_TWO=routing.group_sum, CHOSEN=chosen, C=size(chosen),
        SCORING=routing.scoring, AFTER=routing.softmax_after and not mixer, MIXER=mixer,
        RENORMALIZE=routing.renormalize and not mixer, CORRECT_LOGITS=routing.correct_logits,
        GATE=routing.shared_gate, shape=NARROW,
    )  # fmt: skip


def sort_pairs(
    run: Launcher, ids: Any, addresses: Any, counts: Any, tile_experts: Any, pairs: Any, tokens: int
) -> None:
    """Sort pairs (token, place) of ids [T, C] by expert: tiles of `tokens` pairs of one expert, in ascending order.

    counts [E], tile_experts [tiles] (-1: no tile) and pairs [tiles * tokens] (-1: no pair) are int32. There are at most
    as many tiles as experts.expert_tile counts. An address of 0 means no weights; `addresses` is None if all have some.
    """
    experts, total = counts.shape[0], ids.numel()
    grid = experts, 1, 1
    launch(run, count_pairs, grid, ids, addresses, counts, total, BLOCK=1024, shape=NARROW)
    launch(
        run, place_pairs, grid, ids, counts, tile_experts, pairs, total, tile_experts.shape[0], E=experts,
        EXPERTS=triton.next_power_of_2(experts), TOKENS=tokens, BLOCK=1024, shape=NARROW,
    )  # fmt: skip
