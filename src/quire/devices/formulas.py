"""Every operation but attention over an array namespace, numpy or torch, executed at once: the oracle and plain torch.

Knows no model family and no scheduler. Exactness: every reduction and every transcendental function works on one row
(or one query) at a time, with shapes that depend on that row alone. In one call over all rows, BLAS, numpy and torch
choose the order of summation by the number of rows: so does a step `at_once`, for speed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

from quire.devices import element_formulas, ops, recurrent_formulas, stream_ops
from quire.devices.adapters import Change
from quire.devices.element_formulas import by_row
from quire.devices.inputs import all_gathered, all_reduced, received
from quire.devices.ops import Op
from quire.devices.protocol import Activation, Array, Expert, Matrix, Norm, Rope, Routing
from quire.devices.relative_ops import RelativeScores, padded_positions
from quire.devices.step import Step

# --- tokens and positions


def embed(step: Step, op: ops.Embed[Any]) -> Any:
    ids = step.inputs.tokens_T
    rows = step.embedded(op.table, ids)
    for change, changed in step.adapters.changes(op.path, range(len(ids))):
        for i in changed:
            y = rows[i] if change.weight is None else step.embedded(change.weight, ids[i : i + 1])[0]
            for up in change.ups:
                assert change.down is not None
                low = change.down[up.first :, ids[i]][: up.weight.shape[1]]
                y = y + step.own(up.weight) @ step.own(low)
            rows[i] = y if change.gain is None else y * step.own(change.gain)
    return step.single(rows * op.scale)


def embed_positions(step: Step, op: ops.EmbedPositions[Any]) -> Any:
    return step.single(step.embedded(op.table, step.inputs.positions_T + op.offset))


def rope_angles(step: Step, op: ops.RopeAngles[Any]) -> Any:
    return angles_at(step, op.rope, step.inputs.positions_T)


def angles_at(step: Step, rope: Rope, positions_P: Array) -> Any:
    angles_PR = positions_P.astype(np.float32)[:, None] * rope.inv_freq
    xp, scale = step.xp, rope.scale

    def turned(row: Any) -> Any:
        return xp.concatenate([xp.cos(row), xp.sin(row)], axis=-1) * scale

    return step.single(by_row(step, turned, step.own(angles_PR)))


# --- elements and rows


def add(step: Step, op: ops.Add[Any]) -> Any:
    return step.single(step.wide(op.x) + op.scale * step.wide(op.other))


def scale(step: Step, op: ops.Scale[Any]) -> Any:
    y, cap = step.wide(op.x) * op.scale, op.cap
    return step.single(y if cap is None else by_row(step, lambda row: cap * step.xp.tanh(row / cap), y))


def multiply(step: Step, op: ops.Multiply[Any]) -> Any:
    rows, parts = op.factors.shape
    each = step.wide(op.x).reshape(rows, parts, op.x.shape[1] // parts) * step.wide(op.factors)[:, :, None]
    return step.single(each.reshape(op.x.shape))


def combine(step: Step, op: stream_ops.Combine[Any]) -> Any:
    factors = step.own(op.factors)
    return mixed(step, op.x, step.xp.broadcast_to(factors, (len(op.x), *factors.shape)), op.residual)


def mix(step: Step, op: stream_ops.Mix[Any]) -> Any:
    shape = len(op.x), op.factors.shape[1] // op.vectors, op.vectors
    return mixed(step, op.x, step.wide(op.factors).reshape(shape), op.residual)


def mixed(step: Step, x: Any, factors: Any, residual: Any) -> Any:
    """Mix rows of A parts [rows, A D] -> rows of B parts [rows, B D], by the factors [rows, B, A]."""
    rows, made, parts = factors.shape
    split, totals = step.wide(x).reshape(rows, parts, x.shape[1] // parts), []
    for b in range(made):
        total = split[:, 0] * 0.0
        for a in range(parts):
            own = factors[:, b, a, None]
            total = step.xp.where(own != 0, total + own * split[:, a], total)
        totals.append(total)
    whole = step.xp.concatenate(totals, axis=1)
    return step.single(whole if residual is None else whole + residual)


def compare_parts(step: Step, op: stream_ops.CompareParts[Any]) -> Any:
    def compared(row: Any, other: Any) -> Any:
        z = (step.double(row) * step.double(other)).reshape(*row.shape[:-1], op.parts, -1).sum(-1) * op.scale
        root = step.xp.sqrt(step.xp.clip(abs(z), op.floor, None)) * step.xp.sign(z)
        return step.activate("sigmoid", root)

    return step.single(by_row(step, compared, op.x, op.other))


def match_rms(step: Step, op: stream_ops.MatchRMS[Any]) -> Any:
    def matched(row: Any, like: Any) -> Any:
        wanted = (step.double(like) ** 2).mean(-1)[..., None, None]
        parts = step.double(row).reshape(*row.shape[:-1], -1, like.shape[-1])
        found = step.xp.clip((parts * parts).mean(-1)[..., None], op.floor, None)
        return (parts * step.xp.sqrt(wanted / found)).reshape(row.shape)

    return step.single(by_row(step, matched, op.x, op.like))


def normalizer(step: Step, norm: Norm, groups: int = 1) -> Callable[[Any], Any]:
    """RMSNorm (Zhang and Sennrich 2019) or LayerNorm of the last axis, with statistics in float64.

    With several `groups`, of each equal part of a row.
    """
    weight = step.constant(norm.weight)
    bias = None if norm.bias is None else step.constant(norm.bias)

    def normalize(x: Any) -> Any:
        shape, x = x.shape, step.double(x)
        x = x if groups == 1 else x.reshape(*shape[:-1], groups, -1)
        if norm.kind == "layer":
            x = x - x.mean(-1)[..., None]
        y = (x / step.xp.sqrt((x * x).mean(-1)[..., None] + norm.eps)).reshape(shape) * weight
        return step.wide(y if bias is None else y + bias)

    return normalize


def normalize_rows(step: Step, op: ops.Normalize[Any]) -> Any:
    y = by_row(step, normalizer(step, op.norm, op.groups), op.x)
    for norm, rows in step.adapters.norms(op.path, range(len(op.x))):
        y[rows] = by_row(step, normalizer(step, norm, op.groups), op.x[rows])
    return step.single(y)


# --- products


def products(step: Step, x: Any, weight: Matrix, path: str, bias: Any, places: Sequence[int]) -> Any:
    """Compute x @ weight.T + bias as adapters change it: wide; row i of x belongs to row places[i] of the step."""
    y = step.times(weight, x)
    added = y if bias is None else y + step.constant(bias)
    for change, rows in step.adapters.changes(path, places):
        added[rows] = changed(step, change, x[rows], y[rows], bias)
    return added


def changed(step: Step, change: Change, x: Any, y: Any, bias: Any) -> Any:
    """Return the products `y` of rows x, without their bias, as an adapter changes them."""
    if change.weight is not None:
        y = step.times(change.weight, x)
    for up in change.ups:
        assert change.down is not None
        down = step.own(change.down[up.first : up.first + up.weight.shape[1]])
        low = by_row(step, partial(low_rank, down, step.own(up.weight)), x)
        y[:, up.start : up.start + len(up.weight)] += low
    if change.gain is not None:
        y = y * step.own(change.gain)
    for vector in (bias if change.bias is None else change.bias, change.shift):
        y = y if vector is None else y + step.own(vector)
    return y


def low_rank(down: Any, up: Any, row: Any) -> Any:
    return row @ down.T @ up.T


def linear(step: Step, op: ops.Linear[Any]) -> Any:
    y, kind = products(step, op.x, op.weight, op.path, op.bias, range(len(op.x))), op.activation
    if kind is not None:
        y = by_row(step, lambda row: step.activate(kind, row), y)
    return step.single(y if op.residual is None else y + op.residual)


def head_linear(step: Step, op: ops.HeadLinear[Any]) -> Any:
    width, kind = op.x.shape[1] // len(op.weights), op.activation
    parts = [step.times(weight, op.x[:, n * width :][:, :width]) for n, weight in enumerate(op.weights)]
    y = step.xp.concatenate(parts, axis=1)
    y = y if op.bias is None else y + step.constant(op.bias)
    return step.single(y if kind is None else by_row(step, lambda row: step.activate(kind, row), y))


def gate(step: Step, kind: Activation, x: Any, up: Any, limit: float) -> Any:
    """activation(x) * up; gpt-oss clamps both and multiplies with up + 1 (arXiv:2508.10925)."""
    clip = step.xp.clip
    if kind == "clamped_swiglu":
        limit = limit or 7.0
        low = clip(x, None, limit)
        return low * step.activate("sigmoid", 1.702 * low) * (clip(up, -limit, limit) + 1.0)
    if kind == "clamped_silu":
        limit = limit or float("inf")
        return step.activate("silu", clip(x, None, limit)) * clip(up, -limit, limit)
    if limit > 0:
        return clip(step.activate(kind, x), None, limit) * clip(up, -limit, limit)
    return step.activate(kind, x) * up


def gated(
    step: Step,
    x: Any,
    weight: Matrix,
    path: str,
    kind: Activation,
    bias: Any,
    places: Sequence[int],
    limit: float,
) -> Any:
    y, half = products(step, x, weight, path, bias, places), weight.shape[0] // 2
    return step.single(by_row(step, lambda row: gate(step, kind, row[..., :half], row[..., half:], limit), y))


def gated_linear(step: Step, op: ops.GatedLinear[Any]) -> Any:
    places = range(len(op.x))
    return gated(step, op.x, op.weight, op.path, op.activation, op.bias, places, op.limit)


# --- experts


def route(step: Step, op: ops.Route[Any]) -> Any:
    correction = None if op.correction is None else step.double(step.constant(op.correction))
    scales = None if op.weight_scales is None else step.double(step.constant(op.weight_scales))

    def choose(row: Any, ids: Any = None) -> Any:
        return route_row(step, row, op.routing, correction, scales, ids)

    return step.single(by_row(step, choose, *([op.scores] if op.ids is None else [op.scores, op.ids])))


def route_row(step: Step, row: Any, routing: Routing, correction: Any, scales: Any, given: Any = None) -> Any:
    """Return the choice of a token, or of each: ids, then weights. Of equal scores the lower id goes first."""
    xp, count = step.xp, routing.num_experts
    scores = step.double(row)
    logits = weights = scores[..., :count]
    if routing.sparse_mixer:
        every = [_sparse_mixer(step, one, routing) for one in logits.reshape(-1, count)]
        return step.own(np.array(every)).reshape(*logits.shape[:-1], -1)

    def softmax(x: Any) -> Any:
        shares = xp.exp(x - xp.amax(x, -1)[..., None])
        return shares / shares.sum(-1)[..., None]

    if routing.scoring == "sigmoid":
        weights = step.activate("sigmoid", weights)
    elif routing.scoring == "root_softplus":
        weights = xp.sqrt(step.activate("softplus", weights))
    elif not routing.softmax_after:
        weights = softmax(weights)
    ranks = weights if correction is None else weights + correction
    if routing.correct_logits and correction is not None:
        ranks = logits + correction
    if routing.num_groups > 1:
        groups, most = ranks.reshape(*ranks.shape[:-1], routing.num_groups, -1), 2 if routing.group_sum else 1
        best = step.taken(groups, step.order(groups)[..., -most:]).sum(-1)
        shown = step.order(step.order(-best)) < routing.top_groups
        ranks = xp.where(shown[..., None], groups, -xp.inf).reshape(ranks.shape)
    ids = step.order(-ranks)[..., : routing.top_k] if given is None else given
    numbers, weights = step.double(ids), step.taken(weights, ids)
    if routing.softmax_after:
        weights = softmax(weights)
    if routing.renormalize:
        weights = weights / (weights.sum(-1)[..., None] + routing.floor)
    weights = weights * routing.scale
    if scales is not None:
        weights = weights * step.taken(xp.broadcast_to(scales, logits.shape), ids)
    if not routing.shared:
        return xp.concatenate([numbers, weights], axis=-1)
    none = scores[..., -1:] * 0.0
    own = step.activate("sigmoid", scores[..., -1:]) if routing.shared_gate else none + 1.0
    return xp.concatenate([numbers, none + count, weights, own], axis=-1)


def _sparse_mixer(step: Step, scores: Any, routing: Routing) -> Iterable[float]:
    """SparseMixer: experts one by one; a weight is a share among the scores near the greatest left."""
    left, ids, weights = list(map(float, scores)), list[float](), list[float]()
    for _ in range(routing.top_k):
        best, top = int(np.argmax(left)), max(left)
        values = np.array(step.host(scores))
        near = (top - values) / np.maximum(np.abs(values), top) <= 2 * routing.sparse_mixer
        weights.append(routing.scale / float(np.exp(np.array(left)[near] - top).sum()))
        ids.append(best)
        left[best] = -np.inf
    return [*ids, *weights]


def run_experts(step: Step, op: ops.RunExperts[Any]) -> Any:
    chosen, width = op.routes.shape[1] // 2, op.out_width(op.x.shape[1])
    ids_TC = step.host(op.routes[:, :chosen]).astype(np.int64)
    total = step.double(step.own(np.zeros((len(ids_TC), width))))
    for number in np.unique(ids_TC).tolist():
        rows, places = np.nonzero(ids_TC == number)
        expert, weights = op.experts[number], op.routes[rows, chosen + places][:, None]
        y = op.x[rows] * weights if op.weigh_inputs else op.x[rows]
        if expert is not None:
            up, down = f"{expert.path}.gate_up", f"{expert.path}.down"
            inner = inside(step, y, expert, up, op.activation, rows.tolist())
            y = step.single(products(step, inner, expert.down, down, expert.down_bias, rows.tolist()))
        step.add_rows(total, rows, step.double(y) * (1.0 if op.weigh_inputs else step.double(weights)))
    return step.single(total)


def inside(step: Step, x: Any, expert: Expert, path: str, kind: Activation, places: Sequence[int]) -> Any:
    """Return the inner activations of an expert, gated if `up` is."""
    if expert.up.shape[0] > expert.down.shape[1]:
        return gated(step, x, expert.up, path, kind, expert.up_bias, places, expert.limit)
    y = products(step, x, expert.up, path, expert.up_bias, places)
    return step.single(by_row(step, lambda row: step.activate(kind, row), y))


# --- queries, keys and values


def head_preparer(step: Step, norm: Norm | None) -> Callable[[Any, Any], Any]:
    """Return what norms and rotates a token's queries or keys, in the norm's order: wide [N, H], or [T, N, H]."""
    normalize = None if norm is None else normalizer(step, norm)

    def normed(x_NH: Any) -> Any:
        """Normalize by one weight for all heads, one per head, or statistics over all heads together."""
        if normalize is None or norm is None:
            return x_NH
        if norm.weight.ndim == 1 and norm.weight.size == x_NH.shape[-2] * x_NH.shape[-1]:
            return normalize(x_NH.reshape(*x_NH.shape[:-2], -1)).reshape(x_NH.shape)
        return normalize(x_NH)

    def prepare(x_NH: Any, angles: Any = None) -> Any:
        x_NH = x_NH if norm is not None and norm.after_rope else normed(x_NH)
        x_NH = x_NH if angles is None else rotate(step, x_NH, angles)
        return normed(x_NH) if norm is not None and norm.after_rope else x_NH

    return prepare


def rotate(step: Step, x_NH: Any, angles: Any) -> Any:
    """Rope on the first rotary_dim elements of each head; `angles` [.., rotary_dim]: cosines, then sines."""
    half = angles.shape[-1] // 2
    angles, first, second = step.wide(angles)[..., None, :], x_NH[..., :half], x_NH[..., half : 2 * half]
    cos, sin = angles[..., :half], angles[..., half:]
    turned = [first * cos - second * sin, second * cos + first * sin]
    rest = [x_NH[..., 2 * half :]] if 2 * half < x_NH.shape[-1] else []
    return step.xp.concatenate([*turned, *rest], axis=-1)


def store_kv(step: Step, op: ops.StoreKV[Any]) -> Any:
    kept = step.kv_spec.layer(op.layer)
    groups, head_dim = kept.num_kv_heads, kept.head_dim
    count, first = len(op.qkv), op.num_heads + groups
    heads = step.wide(op.qkv).reshape(count, first + groups, head_dim)
    of_q, of_k, of_v = (head_preparer(step, norm) for norm in (op.q_norm, op.k_norm, op.v_norm))
    turns = [] if op.angles is None else [op.angles]
    keys = by_row(step, of_k, heads[:, op.num_heads : first], *turns)
    step.store(op.layer, range(count), keys, by_row(step, of_v, heads[:, first:]))
    return step.single(by_row(step, of_q, heads[:, : op.num_heads], *turns).reshape(count, -1))


def prepare_queries(step: Step, op: ops.PrepareQueries[Any]) -> Any:
    turns, count = [] if op.angles is None else [op.angles], len(op.q)
    heads = step.wide(op.q).reshape(count, op.num_heads, -1)
    return step.single(by_row(step, head_preparer(step, op.norm), heads, *turns).reshape(count, -1))


def store_latent(step: Step, op: ops.StoreLatent[Any]) -> Any:
    (count, rotary), xp = op.angles.shape, step.xp
    num_heads = op.q_rope.shape[1] // rotary
    latent = op.q_latent.shape[1] // num_heads
    if op.kv is not None and op.norm is not None:
        normed = by_row(step, normalizer(step, op.norm), op.kv[:, :latent])[:, None]
        turned = rotate(step, step.wide(op.kv)[:, None, latent:], op.angles)
        step.store(op.layer, range(count), xp.concatenate([normed, turned], axis=-1), None)
    plain = step.wide(op.q_latent).reshape(count, num_heads, latent)
    queries = rotate(step, step.wide(op.q_rope).reshape(count, num_heads, rotary), op.angles)
    return step.single(xp.concatenate([plain, queries], axis=-1).reshape(count, -1))


def relative_scores(step: Step, op: RelativeScores[Any]) -> Any:
    """Compute what distances add to scores: [T, N * positions], zero beyond the sequence."""
    count, positions = len(step.inputs.tokens_T), (len(op.places) + 1) // 2
    out = step.own(np.zeros((count, op.num_heads, padded_positions(op.places))))
    heads = np.arange(op.num_heads)[:, None]
    for start, stop in pairwise(step.inputs.cu_q_B1.tolist()):
        keys, total = np.arange(stop - start), 0.0
        queries = keys[:, None, None]
        near = op.places[keys - queries + positions - 1]
        if op.by_query is not None:
            total = step.wide(op.by_query[start:stop]).reshape(len(keys), op.num_heads, -1)[
                queries, heads, near
            ]
        if op.by_key is not None:
            every = step.wide(op.by_key[start:stop]).reshape(len(keys), op.num_heads, -1)
            total = total + every[keys, heads, near]
        out[start:stop, :, : len(keys)] = op.scale * total
    return step.single(out.reshape(count, -1))


# --- rows between steps and ranks


def all_reduce(step: Step, op: ops.AllReduce[Any]) -> Any:
    return step.single(step.own(all_reduced(step.host(op.x), op.peers)))


def all_gather(step: Step, op: ops.AllGather[Any]) -> Any:
    return step.single(step.own(all_gathered(step.host(op.x), op.widths, op.peers)))


def select_rows(step: Step, op: ops.SelectRows[Any]) -> Any:
    step.adapters.select_rows(step.inputs.logit_rows_L.tolist())
    return op.x[step.inputs.logit_rows_L.astype(np.int64)]


def receive(step: Step, op: ops.Receive[Any]) -> Any:
    return step.single(step.own(received(step.inputs, op.columns)))


def tap(step: Step, op: ops.Tap[Any]) -> Any:
    step.tapped.append(op.x)
    return op.x


Formulas = dict[type[Op[Any]], Callable[[Any, Any], Any]]

FORMULAS: Formulas = {
    ops.Receive: receive,
    ops.Embed: embed,
    ops.EmbedPositions: embed_positions,
    ops.Add: add,
    ops.Scale: scale,
    ops.Multiply: multiply,
    ops.Apply: element_formulas.apply,
    stream_ops.Combine: combine,
    stream_ops.Mix: mix,
    stream_ops.MatchRMS: match_rms,
    stream_ops.CompareParts: compare_parts,
    ops.Normalize: normalize_rows,
    ops.Linear: linear,
    ops.GatedLinear: gated_linear,
    ops.HeadLinear: head_linear,
    ops.RopeAngles: rope_angles,
    ops.StoreKV: store_kv,
    ops.PrepareQueries: prepare_queries,
    ops.StoreLatent: store_latent,
    RelativeScores: relative_scores,
    ops.Route: route,
    ops.RunExperts: run_experts,
    ops.AllReduce: all_reduce,
    ops.AllGather: all_gather,
    ops.SelectRows: select_rows,
    ops.Tap: tap,
    **recurrent_formulas.FORMULAS,
}
