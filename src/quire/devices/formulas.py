"""Every operation but attention over an array namespace, numpy or torch, executed at once: the oracle and plain torch.

Knows no model family and no scheduler. Exactness: every reduction and every transcendental function works on one row
(or one query) at a time, with shapes that depend on that row alone. In one call over all rows, BLAS, numpy and torch
would choose the order of summation by the number of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np

from quire.devices import element_formulas, ops, recurrent_formulas, stream_ops
from quire.devices.element_formulas import by_row
from quire.devices.inputs import all_gathered, all_reduced, received
from quire.devices.ops import Op
from quire.devices.protocol import (
    Activation,
    Array,
    Expert,
    Matrix,
    Norm,
    Rope,
    Routing,
)
from quire.devices.relative_ops import RelativeScores, padded_positions
from quire.devices.step import Step

# --- tokens and positions


def embed(step: Step, op: ops.Embed[Any]) -> Any:
    rows = step.embedded(op.table, step.inputs.tokens_T)
    for i, token in enumerate(step.inputs.tokens_T.tolist() if step.adapters.active else ()):
        change = step.adapters.change(i, op.path)
        if change is None:
            continue
        y = rows[i] if change.weight is None else step.embedded(change.weight, [token])[0]
        for up in change.ups:
            assert change.down is not None
            low = change.down[up.first :, token][: up.weight.shape[1]]
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
    turned = by_row(step, lambda row: xp.concatenate([xp.cos(row), xp.sin(row)]) * scale, step.own(angles_PR))
    return step.single(turned)


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
    """Rows of A parts [rows, A D] -> rows of B parts [rows, B D], by the factors [rows, B, A]."""
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
        z = (step.double(row) * step.double(other)).reshape(op.parts, -1).sum(1) * op.scale
        root = step.xp.sqrt(step.xp.clip(abs(z), op.floor, None)) * step.xp.sign(z)
        return step.activate("sigmoid", root)

    return step.single(by_row(step, compared, op.x, op.other))


def match_rms(step: Step, op: stream_ops.MatchRMS[Any]) -> Any:
    def matched(row: Any, like: Any) -> Any:
        wanted, parts = (step.double(like) ** 2).mean(), step.double(row).reshape(-1, len(like))
        found = [step.xp.clip((part * part).mean(), op.floor, None) for part in parts]
        scaled = [part * step.xp.sqrt(wanted / own) for part, own in zip(parts, found, strict=True)]
        return step.xp.concatenate(scaled)

    return step.single(by_row(step, matched, op.x, op.like))


def normalizer(step: Step, norm: Norm, groups: int = 1) -> Callable[[Any], Any]:
    """RMSNorm (Zhang and Sennrich 2019) or LayerNorm of the last axis, with statistics in float64.

    With several `groups`, of each equal part of a row.
    """
    weight = step.own(norm.weight)
    bias = None if norm.bias is None else step.own(norm.bias)
    if groups > 1:
        whole = normalizer(
            step, msgspec.structs.replace(norm, weight=np.ones(weight.shape[0] // groups), bias=None)
        )

        def normalize_groups(x: Any) -> Any:
            y = whole(x.reshape(groups, -1)).reshape(-1) * weight
            return y if bias is None else y + bias

        return normalize_groups

    def normalize(x: Any) -> Any:
        x = step.double(x)
        if norm.kind == "layer":
            x = x - x.mean(-1)[..., None]
        y = x / step.xp.sqrt((x * x).mean(-1)[..., None] + norm.eps) * weight
        return step.wide(y if bias is None else y + bias)

    return normalize


def normalize_rows(step: Step, op: ops.Normalize[Any]) -> Any:
    if not step.adapters.active:
        return step.single(by_row(step, normalizer(step, op.norm, op.groups), op.x))
    norms = [step.adapters.norm(i, op.path, op.norm) for i in range(len(op.x))]
    rows = [normalizer(step, norm, op.groups)(step.row(op.x, i)) for i, norm in enumerate(norms)]
    return step.single(step.xp.stack(rows))


# --- products


def products(step: Step, x: Any, weight: Matrix, path: str, bias: Any, places: Sequence[int]) -> Any:
    """x @ weight.T + bias as adapters change it: wide; row i of x belongs to row places[i] of the step."""
    rows = [step.times(weight, x, i) for i in range(len(x))]
    plain = None if bias is None else step.own(bias)
    y = step.xp.stack(rows) if rows else step.own(np.zeros((0, weight.shape[0])))
    added = y if plain is None else y + plain
    for i, place in enumerate(places if step.adapters.active else ()):
        change = step.adapters.change(place, path)
        if change is None:
            continue
        row = rows[i] if change.weight is None else step.times(change.weight, x, i)
        for up in change.ups:
            assert change.down is not None
            down = step.own(change.down[up.first : up.first + up.weight.shape[1]])
            low = step.own(up.weight) @ (down @ step.row(x, i))
            row[up.start : up.start + len(low)] += low
        if change.gain is not None:
            row = row * step.own(change.gain)
        for vector in (bias if change.bias is None else change.bias, change.shift):
            row = row if vector is None else row + step.own(vector)
        added[i] = row
    return added


def linear(step: Step, op: ops.Linear[Any]) -> Any:
    y, kind = products(step, op.x, op.weight, op.path, op.bias, range(len(op.x))), op.activation
    if kind is not None:
        y = by_row(step, lambda row: step.activate(kind, row), y)
    return step.single(y if op.residual is None else y + op.residual)


def head_linear(step: Step, op: ops.HeadLinear[Any]) -> Any:
    heads, made = len(op.weights), []
    width = op.x.shape[1] // heads
    biases = [None] * heads if op.bias is None else np.split(op.bias, heads)
    for n, weight in enumerate(op.weights):
        x = op.x[:, n * width : (n + 1) * width]
        made.append(linear(step, ops.Linear(x, weight, biases[n], op.activation)))
    return step.xp.concatenate(made, axis=1)


def gate(step: Step, kind: Activation, x: Any, up: Any, limit: float) -> Any:
    """activation(x) * up of one row; gpt-oss clamps both and multiplies with up + 1 (arXiv:2508.10925)."""
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
    return step.single(by_row(step, lambda row: gate(step, kind, row[:half], row[half:], limit), y))


def gated_linear(step: Step, op: ops.GatedLinear[Any]) -> Any:
    places = range(len(op.x))
    return gated(step, op.x, op.weight, op.path, op.activation, op.bias, places, op.limit)


# --- experts


def route(step: Step, op: ops.Route[Any]) -> Any:
    correction = None if op.correction is None else step.double(step.own(op.correction))
    scales = None if op.weight_scales is None else step.double(step.own(op.weight_scales))

    def choose(row: Any, ids: Any = None) -> Any:
        return route_row(step, row, op.routing, correction, scales, ids)

    return step.single(by_row(step, choose, *([op.scores] if op.ids is None else [op.scores, op.ids])))


def route_row(step: Step, row: Any, routing: Routing, correction: Any, scales: Any, given: Any = None) -> Any:
    """One token's choice: ids, then weights. Of equal scores the lower id goes first."""
    xp, count = step.xp, routing.num_experts
    scores = step.double(row)
    logits = weights = scores[:count]
    if routing.sparse_mixer:
        return step.own(np.array(_sparse_mixer(step, logits, routing)))

    def softmax(x: Any) -> Any:
        shares = xp.exp(x - x.max())
        return shares / shares.sum()

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
        groups, most = ranks.reshape(routing.num_groups, -1), 2 if routing.group_sum else 1
        best = xp.stack([group[step.order(group)[-most:]].sum() for group in groups])
        hidden = np.full(routing.num_groups, -np.inf)
        hidden[step.order(-best)[: routing.top_groups].tolist()] = 0
        ranks = (groups + step.own(hidden)[:, None]).reshape(-1)
    ids = step.order(-ranks)[: routing.top_k] if given is None else [int(number) for number in given]
    numbers = step.double(ids if given is None else given)
    weights = weights[ids]
    if routing.softmax_after:
        weights = softmax(weights)
    if routing.renormalize:
        weights = weights / (weights.sum() + routing.floor)
    weights = weights * routing.scale
    weights = weights if scales is None else weights * scales[ids]
    if not routing.shared:
        return xp.concatenate([numbers, weights])
    own = step.activate("sigmoid", scores[-1:]) if routing.shared_gate else step.double(step.own(np.ones(1)))
    last = step.double(step.own(np.array([float(count)])))
    return xp.concatenate([numbers, last, weights, own])


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
    chosen, width, rows = op.routes.shape[1] // 2, op.out_width(op.x.shape[1]), []
    ids_TC = step.host(op.routes[:, :chosen]).astype(np.int64)
    for t, ids in enumerate(ids_TC):
        total = step.double(step.own(np.zeros(width)))
        for place in np.argsort(ids).tolist():
            expert, weight = op.experts[ids[place]], op.routes[t, chosen + place]
            y = op.x[t : t + 1] * weight if op.weigh_inputs else op.x[t : t + 1]
            if expert is not None:
                up, down = f"{expert.path}.gate_up", f"{expert.path}.down"
                inner = inside(step, y, expert, up, op.activation, t)
                y = step.single(products(step, inner, expert.down, down, expert.down_bias, [t]))
            total = total + step.double(y[0]) * (1.0 if op.weigh_inputs else step.double(weight))
        rows.append(total)
    return step.single(step.xp.stack(rows))


def inside(step: Step, x: Any, expert: Expert, path: str, kind: Activation, t: int) -> Any:
    """The inner activations of an expert, gated if `up` is."""
    if expert.up.shape[0] > expert.down.shape[1]:
        return gated(step, x, expert.up, path, kind, expert.up_bias, [t], expert.limit)
    y = products(step, x, expert.up, path, expert.up_bias, [t])
    return step.single(by_row(step, lambda row: step.activate(kind, row), y))


# --- queries, keys and values


def head_preparer(step: Step, norm: Norm | None) -> Callable[[Any, Any], Any]:
    """Return what norms and rotates one token's queries or keys, in the norm's order: wide [N, H]."""
    normalize = None if norm is None else normalizer(step, norm)

    def normed(x_NH: Any) -> Any:
        """One weight for all heads, one per head, or statistics over all heads together."""
        if normalize is None or norm is None:
            return x_NH
        if norm.weight.ndim == 1 and norm.weight.size == x_NH.shape[0] * x_NH.shape[1]:
            return normalize(x_NH.reshape(-1)).reshape(x_NH.shape)
        return normalize(x_NH)

    def prepare(x_NH: Any, angles: Any) -> Any:
        x_NH = x_NH if norm is not None and norm.after_rope else normed(x_NH)
        x_NH = x_NH if angles is None else rotate(step, x_NH, angles)
        return normed(x_NH) if norm is not None and norm.after_rope else x_NH

    return prepare


def rotate(step: Step, x_NH: Any, angles: Any) -> Any:
    """Rope on the first rotary_dim elements of each head; `angles` [rotary_dim]: cosines, then sines."""
    half = len(angles) // 2
    angles, first, second = step.wide(angles), x_NH[:, :half], x_NH[:, half : 2 * half]
    cos, sin = angles[:half], angles[half:]
    turned = [first * cos - second * sin, second * cos + first * sin]
    rest = [x_NH[:, 2 * half :]] if 2 * half < x_NH.shape[1] else []
    return step.xp.concatenate([*turned, *rest], axis=1)


def store_kv(step: Step, op: ops.StoreKV[Any]) -> Any:
    kept = step.kv_spec.layer(op.layer)
    groups, head_dim = kept.num_kv_heads, kept.head_dim
    heads = step.wide(op.qkv).reshape(len(op.qkv), op.num_heads + 2 * groups, head_dim)
    of_q, of_k, of_v = (head_preparer(step, norm) for norm in (op.q_norm, op.k_norm, op.v_norm))
    queries, first = [], op.num_heads + groups
    for t, x_NH in enumerate(heads):
        turn = None if op.angles is None else op.angles[t]
        queries.append(of_q(x_NH[: op.num_heads], turn).reshape(-1))
        step.store(op.layer, t, of_k(x_NH[op.num_heads : first], turn), of_v(x_NH[first:], None))
    return step.single(step.xp.stack(queries))


def prepare_queries(step: Step, op: ops.PrepareQueries[Any]) -> Any:
    heads, prepare = step.wide(op.q).reshape(len(op.q), op.num_heads, -1), head_preparer(step, op.norm)
    turns = [None] * len(op.q) if op.angles is None else op.angles
    rows = [prepare(x_NH, turn).reshape(-1) for x_NH, turn in zip(heads, turns, strict=True)]
    return step.single(step.xp.stack(rows))


def store_latent(step: Step, op: ops.StoreLatent[Any]) -> Any:
    rotary, xp = op.angles.shape[1], step.xp
    num_heads, queries = op.q_rope.shape[1] // rotary, list[Any]()
    latent = op.q_latent.shape[1] // num_heads
    normalize = None if op.norm is None else normalizer(step, op.norm)
    for t, turn in enumerate(op.angles):
        if op.kv is not None and normalize is not None:
            row = step.row(op.kv, t)
            key = xp.concatenate([normalize(row[:latent]), rotate(step, row[None, latent:], turn)[0]])
            step.store(op.layer, t, key[None], None)
        plain = step.wide(op.q_latent[t]).reshape(num_heads, latent)
        turned = rotate(step, step.wide(op.q_rope[t]).reshape(num_heads, rotary), turn)
        queries.append(xp.concatenate([plain, turned], axis=1).reshape(-1))
    return step.single(xp.stack(queries))


def relative_scores(step: Step, op: RelativeScores[Any]) -> Any:
    """What distances add to scores, query by query: [T, N * positions], zero beyond the sequence."""
    count, positions = len(step.inputs.tokens_T), (len(op.places) + 1) // 2
    out = step.own(np.zeros((count, op.num_heads, padded_positions(op.places))))
    heads = np.arange(op.num_heads)[:, None]
    for start, stop in pairwise(step.inputs.cu_q_B1.tolist()):
        keys = np.arange(stop - start)
        for i in keys:
            near, total = op.places[keys - i + positions - 1], 0.0
            if op.by_query is not None:
                total = step.wide(op.by_query[start + i]).reshape(op.num_heads, -1)[heads, near]
            if op.by_key is not None:
                every = step.wide(op.by_key[start:stop]).reshape(len(keys), op.num_heads, -1)
                total = total + every[keys, heads, near]
            out[start + i, :, : len(keys)] = op.scale * total
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
