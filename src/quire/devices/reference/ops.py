"""The oracle: every operation in plain numpy, executed at once. Knows no model family and no scheduler.

Weights and activations are float32 values (weights rounded to bfloat16 if asked); sums run in float64, and
each result is rounded once to float32. Weights are held as float64, 8 bytes per parameter: good for tests and
small models, not for speed.

Exactness: every reduction and every transcendental function works on one row (or one query) at a time,
with shapes that depend on that row alone. In one call over all rows, BLAS and numpy would choose the order
of summation by the number of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

from quire.devices.adapters import StepAdapters
from quire.devices.host import Float64Array, activate, all_gathered, all_reduced, normalize, received
from quire.devices.operands import padded_positions
from quire.devices.ops import (
    Add,
    AllGather,
    AllReduce,
    Apply,
    Attend,
    Combine,
    Embed,
    EmbedPositions,
    GatedLinear,
    HeadLinear,
    Linear,
    MatchRMS,
    Mix,
    Multiply,
    Normalize,
    Op,
    PrepareQueries,
    Receive,
    RelativeScores,
    RopeAngles,
    Route,
    RunExperts,
    Scale,
    SelectRows,
    StoreKV,
    StoreLatent,
    Tap,
)
from quire.devices.protocol import (
    GELU,
    Activation,
    Array,
    Clamp,
    ColumnScale,
    FloatArray,
    Matrix,
    ModelInput,
    SparseGELU,
    Temperature,
)
from quire.devices.reference.cache import ReferenceKVCache
from quire.devices.reference.rows import (
    attention_weights,
    by_row,
    gate,
    matched_rms,
    mixed,
    prepare_heads,
    rotate,
    route_row,
    sparse_gelu,
    xielu,
)
from quire.devices.reference.weights import own_matrix


def _values(weight: Matrix) -> Float64Array:
    return own_matrix(weight).values


@dataclass(frozen=True, slots=True)
class ReferenceStep:
    """One step: its input, its KV cache and its adapters, and what was tapped."""

    inputs: ModelInput
    kv: ReferenceKVCache
    adapters: StepAdapters = field(default_factory=StepAdapters)
    tapped: list[FloatArray] = field(default_factory=list)

    def product(
        self, weight: Matrix, path: str, row: FloatArray, i: int, bias: FloatArray | None
    ) -> Float64Array:
        """weight @ row + bias as the adapter of row `i` of the step changes it."""
        own = own_matrix(weight)
        change = self.adapters.change(i, path) if self.adapters.active else None
        if change is not None and change.weight is not None:
            own = own_matrix(change.weight)
        if change is not None and change.bias is not None:
            bias = change.bias
        y: Float64Array = own.values @ own.seen(row)
        for up in () if change is None else change.ups:
            assert change is not None
            assert change.down is not None
            down = change.down[up.first : up.first + up.weight.shape[1]]
            low = up.weight.astype(np.float64) @ (down.astype(np.float64) @ row.astype(np.float64))
            y[up.start : up.start + len(low)] += low
        if change is not None and change.gain is not None:
            y = y * change.gain
        y = y if bias is None else y + bias
        return y if change is None or change.shift is None else y + change.shift

    def linear(
        self,
        x: FloatArray,
        weight: Matrix,
        path: str,
        bias: FloatArray | None,
        activation: Activation | None,
        residual: FloatArray | None,
        places: Sequence[int],
    ) -> FloatArray:
        """`linear`; row i of x belongs to row places[i] of the step."""
        out = np.empty((len(x), weight.shape[0]), np.float32)
        for i, row in enumerate(x):
            y = self.product(weight, path, row, places[i], bias)
            if activation is not None:
                y = activate(activation, y)
            out[i] = y if residual is None else y + residual[i]
        return out

    def gated(
        self,
        x: FloatArray,
        weight: Matrix,
        path: str,
        activation: Activation,
        bias: FloatArray | None,
        places: Sequence[int],
        limit: float,
    ) -> FloatArray:
        half = weight.shape[0] // 2
        out = np.empty((len(x), half), np.float32)
        for i, row in enumerate(x):
            y = self.product(weight, path, row, places[i], bias)
            out[i] = gate(activation, y[:half], y[half:], limit)
        return out

    def gathered(self, cache: Array, b: int) -> Float64Array:
        """Sequence b's keys or values in order of position: [G, kv_len, H]."""
        kv_len = self.inputs.kv_len_B[b]
        blocks = self.inputs.block_table_SM[self.inputs.slots_B[b], : -(-kv_len // self.kv.block_size)]
        tokens = cache[blocks].reshape(-1, *cache.shape[2:])[:kv_len]
        return np.ascontiguousarray(tokens.astype(np.float64).transpose(1, 0, 2))

    def places(self) -> tuple[Array, Array]:
        """Block and offset in it of each token of the step."""
        slots_T = np.repeat(self.inputs.slots_B, np.diff(self.inputs.cu_q_B1))
        size = self.kv.block_size
        return self.inputs.block_table_SM[
            slots_T, self.inputs.positions_T // size
        ], self.inputs.positions_T % size


def embed(step: ReferenceStep, op: Embed[FloatArray]) -> FloatArray:
    rows = _values(op.table)[step.inputs.tokens_T]
    for i, token in enumerate(step.inputs.tokens_T.tolist() if step.adapters.active else ()):
        change = step.adapters.change(i, op.path)
        if change is None:
            continue
        y = rows[i] if change.weight is None else _values(change.weight)[token]
        for up in change.ups:
            assert change.down is not None
            y = y + up.weight.astype(np.float64) @ change.down[up.first :, token][: up.weight.shape[1]]
        rows[i] = y if change.gain is None else y * change.gain
    return (rows * op.scale).astype(np.float32)


def embed_positions(step: ReferenceStep, op: EmbedPositions[FloatArray]) -> FloatArray:
    return _values(op.table)[step.inputs.positions_T + op.offset].astype(np.float32)


def add(step: ReferenceStep, op: Add[FloatArray]) -> FloatArray:
    return (op.x.astype(np.float64) + op.scale * op.other.astype(np.float64)).astype(np.float32)


def scale(step: ReferenceStep, op: Scale[FloatArray]) -> FloatArray:
    y = op.x.astype(np.float64) * op.scale
    return (y if op.cap is None else op.cap * np.tanh(y / op.cap)).astype(np.float32)


def multiply(step: ReferenceStep, op: Multiply[FloatArray]) -> FloatArray:
    each = np.repeat(op.factors.astype(np.float64), op.x.shape[1] // op.factors.shape[1], axis=1)
    return np.asarray(op.x * each, np.float32)


def apply(step: ReferenceStep, op: Apply[FloatArray]) -> FloatArray:
    x, function = op.x, op.function
    if isinstance(function, Clamp):
        limit = np.float32(function.limit)
        bounded: FloatArray = np.minimum(np.maximum(x, -limit), limit)
        return bounded
    if isinstance(function, Temperature):
        steps = (step.inputs.positions_T + function.offset) // function.length
        scales = np.array([1 + function.beta * np.log(1.0 + step) for step in steps.tolist()])
        return np.asarray(x * scales[:, None], np.float32)
    if isinstance(function, GELU):
        return by_row(partial(activate, "gelu"), x, x.shape[1])
    if isinstance(function, ColumnScale):
        return np.asarray(x * np.array(function.factors), np.float32)
    if isinstance(function, SparseGELU):
        return by_row(partial(sparse_gelu, function), x, x.shape[1])
    return by_row(partial(xielu, function), x, x.shape[1])


def combine(step: ReferenceStep, op: Combine[FloatArray]) -> FloatArray:
    return mixed(op.x, np.broadcast_to(op.factors, (len(op.x), *op.factors.shape)), op.residual)


def mix(step: ReferenceStep, op: Mix[FloatArray]) -> FloatArray:
    return mixed(
        op.x, op.factors.reshape(len(op.x), op.factors.shape[1] // op.vectors, op.vectors), op.residual
    )


def match_rms(step: ReferenceStep, op: MatchRMS[FloatArray]) -> FloatArray:
    return matched_rms(op.x, op.like, op.floor)


def normalize_rows(step: ReferenceStep, op: Normalize[FloatArray]) -> FloatArray:
    if step.adapters.active:
        own = [
            normalize(row, step.adapters.norm(i, op.path, op.norm))
            for i, row in enumerate(op.x.astype(np.float64))
        ]
        return np.array(own, np.float32).reshape(op.x.shape)
    return by_row(lambda row: normalize(row, op.norm), op.x, op.x.shape[1])


def linear(step: ReferenceStep, op: Linear[FloatArray]) -> FloatArray:
    return step.linear(op.x, op.weight, op.path, op.bias, op.activation, op.residual, range(len(op.x)))


def gated_linear(step: ReferenceStep, op: GatedLinear[FloatArray]) -> FloatArray:
    return step.gated(op.x, op.weight, op.path, op.activation, op.bias, range(len(op.x)), op.limit)


def rope_angles(step: ReferenceStep, op: RopeAngles[FloatArray]) -> FloatArray:
    angles_TR = step.inputs.positions_T.astype(np.float32)[:, None] * op.rope.inv_freq
    return by_row(
        lambda row: op.rope.scale * np.concatenate([np.cos(row), np.sin(row)]),
        angles_TR,
        2 * len(op.rope.inv_freq),
    )


def store_kv(step: ReferenceStep, op: StoreKV[FloatArray]) -> FloatArray:
    kept = step.kv.spec.layer(op.layer)
    groups, head_dim = kept.num_kv_heads, kept.head_dim
    heads = op.qkv.reshape(len(op.qkv), op.num_heads + 2 * groups, head_dim).astype(np.float64)
    q_TNH = np.empty((len(op.qkv), op.num_heads, head_dim), np.float32)
    blocks_T, offsets_T = step.places()
    for t, heads_H in enumerate(heads):
        q, k, v = np.split(heads_H, [op.num_heads, op.num_heads + groups])
        row = None if op.angles is None else op.angles[t].astype(np.float64)
        q, k = prepare_heads(q, op.q_norm, row), prepare_heads(k, op.k_norm, row)
        v = prepare_heads(v, op.v_norm, None)
        q_TNH[t] = q
        step.kv.keys[op.layer][blocks_T[t], offsets_T[t]] = step.kv.rounded(k, step.kv.key_scales[op.layer])
        step.kv.values[op.layer][blocks_T[t], offsets_T[t]] = step.kv.rounded(
            v, step.kv.value_scales[op.layer]
        )
    return q_TNH.reshape(len(op.qkv), op.num_heads * head_dim)


def prepare_queries(step: ReferenceStep, op: PrepareQueries[FloatArray]) -> FloatArray:
    out = np.empty(op.q.shape, np.float32)
    for t, row in enumerate(op.q.reshape(len(op.q), op.num_heads, -1).astype(np.float64)):
        turn = None if op.angles is None else op.angles[t].astype(np.float64)
        out[t] = prepare_heads(row, op.norm, turn).reshape(-1)
    return out


def store_latent(step: ReferenceStep, op: StoreLatent[FloatArray]) -> FloatArray:
    latent, rotary = len(op.norm.weight), op.angles.shape[1]
    num_heads = op.q_latent.shape[1] // latent
    q_TNH = np.empty((len(op.kv), num_heads, latent + rotary), np.float32)
    blocks_T, offsets_T = step.places()
    for t, row in enumerate(op.kv.astype(np.float64)):
        turn = op.angles[t].astype(np.float64)
        key = np.concatenate([normalize(row[:latent], op.norm), rotate(row[None, latent:], turn)[0]])
        step.kv.keys[op.layer][blocks_T[t], offsets_T[t], 0] = step.kv.rounded(
            key[None], step.kv.key_scales[op.layer]
        )[0]
        q_TNH[t, :, :latent] = op.q_latent[t].reshape(num_heads, latent)
        q_TNH[t, :, latent:] = rotate(op.q_rope[t].reshape(num_heads, rotary).astype(np.float64), turn)
    return q_TNH.reshape(len(op.kv), -1)


def head_linear(step: ReferenceStep, op: HeadLinear[FloatArray]) -> FloatArray:
    heads = np.split(op.x, len(op.weights), axis=1)
    return np.concatenate(
        [linear(step, Linear(head, w)) for head, w in zip(heads, op.weights, strict=True)], axis=1
    )


def route(step: ReferenceStep, op: Route[FloatArray]) -> FloatArray:
    chosen = op.routing.top_k + op.routing.shared
    return by_row(
        lambda row: route_row(row, op.routing, op.correction, op.weight_scales), op.scores, 2 * chosen
    )


def run_experts(step: ReferenceStep, op: RunExperts[FloatArray]) -> FloatArray:
    out, chosen = np.zeros((len(op.x), op.out_width(op.x.shape[1])), np.float64), op.routes.shape[1] // 2
    for t in range(len(op.x)):
        for place in np.argsort(op.routes[t, :chosen]):
            expert, weight = op.experts[int(op.routes[t, place])], op.routes[t, chosen + place]
            row = op.x[t : t + 1] * weight if op.weigh_inputs else op.x[t : t + 1]
            weight = np.float32(1) if op.weigh_inputs else weight
            if expert is not None:
                up, down = f"{expert.path}.gate_up", f"{expert.path}.down"
                inner = step.gated(row, expert.up, up, op.activation, expert.up_bias, [t], expert.limit)
                row = step.linear(inner, expert.down, down, expert.down_bias, None, None, [t])
            out[t] += weight * row[0]
    return out.astype(np.float32)


def relative_scores(step: ReferenceStep, op: RelativeScores[FloatArray]) -> FloatArray:
    count, positions = len(step.inputs.tokens_T), (len(op.places) + 1) // 2
    out = np.zeros((count, op.num_heads, padded_positions(op.places)), np.float32)
    heads = np.arange(op.num_heads)[:, None]
    for start, stop in pairwise(step.inputs.cu_q_B1.tolist()):
        keys = np.arange(stop - start)
        for i in keys:
            near, total = op.places[keys - i + positions - 1], np.zeros((op.num_heads, len(keys)))
            if op.by_query is not None:
                total += op.by_query[start + i].reshape(op.num_heads, -1)[heads, near]
            if op.by_key is not None:
                total += op.by_key[start:stop].reshape(len(keys), op.num_heads, -1)[keys, heads, near]
            out[start + i, :, : len(keys)] = op.scale * total
    return out.reshape(count, -1)


def attend(step: ReferenceStep, op: Attend[FloatArray]) -> FloatArray:
    """One softmax over the whole row, not tiled: the result that the online form must reach."""
    kept = step.kv.spec.layer(op.layer)
    groups, head_dim = kept.num_kv_heads, kept.head_dim
    out = np.empty((len(op.q), op.num_heads, step.kv.spec.value_dim or head_dim), np.float32)
    for b, kv_len in enumerate(step.inputs.kv_len_B):
        keys_GSH = step.gathered(step.kv.keys[op.layer], b) * step.kv.key_scales[op.layer][:, None]
        values_GSH = step.gathered(step.kv.values[op.layer], b) * step.kv.value_scales[op.layer][:, None]
        start, stop = step.inputs.cu_q_B1[b], step.inputs.cu_q_B1[b + 1]
        for t in range(start, stop):
            end = kv_len - (stop - 1 - t)
            begin, own = op.attention.first_seen(int(end) - 1), int(end) - 1
            end = min(int(end) + op.attention.ahead, int(kv_len))
            q_GRH = op.q[t].astype(np.float64).reshape(groups, op.num_heads // groups, head_dim)
            for g in range(groups):
                heads = slice(g * (op.num_heads // groups), (g + 1) * (op.num_heads // groups))
                products = q_GRH[g] @ keys_GSH[g, begin:end].T
                added = None
                if op.scores is not None:
                    added = op.scores[t].reshape(op.num_heads, -1)[heads, begin:end]
                weights = attention_weights(products, op.attention, heads, own - begin, added)
                out[t, heads] = weights @ values_GSH[g, begin:end]
    return out.reshape(len(op.q), -1)


def all_reduce(step: ReferenceStep, op: AllReduce[FloatArray]) -> FloatArray:
    return all_reduced(op.x, op.peers)


def all_gather(step: ReferenceStep, op: AllGather[FloatArray]) -> FloatArray:
    return all_gathered(op.x, op.widths, op.peers)


def select_rows(step: ReferenceStep, op: SelectRows[FloatArray]) -> FloatArray:
    step.adapters.select_rows(step.inputs.logit_rows_L.tolist())
    return np.ascontiguousarray(op.x[step.inputs.logit_rows_L])


def receive(step: ReferenceStep, op: Receive[FloatArray]) -> FloatArray:
    return received(step.inputs, op.columns)


def tap(step: ReferenceStep, op: Tap[FloatArray]) -> FloatArray:
    step.tapped.append(op.x)
    return op.x


FORMULAS: dict[type[Op[Any]], Callable[[ReferenceStep, Any], FloatArray]] = {
    Receive: receive,
    Embed: embed,
    EmbedPositions: embed_positions,
    Add: add,
    Scale: scale,
    Multiply: multiply,
    Apply: apply,
    Combine: combine,
    Mix: mix,
    MatchRMS: match_rms,
    Normalize: normalize_rows,
    Linear: linear,
    GatedLinear: gated_linear,
    HeadLinear: head_linear,
    RopeAngles: rope_angles,
    StoreKV: store_kv,
    PrepareQueries: prepare_queries,
    StoreLatent: store_latent,
    RelativeScores: relative_scores,
    Attend: attend,
    Route: route,
    RunExperts: run_experts,
    AllReduce: all_reduce,
    AllGather: all_gather,
    SelectRows: select_rows,
    Tap: tap,
}
