"""The oracle: every operation in plain numpy, executed at once. Knows no model family and no scheduler.

Weights and activations are float32 values (weights rounded to bfloat16 if asked); sums run in float64, and
each result is rounded once to float32. Weights are held as float64, 8 bytes per parameter: good for tests and
small models, not for speed.

Exactness: every reduction and every transcendental function works on one row (or one query) at a time,
with shapes that depend on that row alone. In one call over all rows, BLAS and numpy would choose the order
of summation by the number of rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise

import numpy as np

from quire.devices.adapters import StepAdapters
from quire.devices.host import Float64Array, activate, all_gathered, all_reduced, normalize, received
from quire.devices.operands import padded_positions
from quire.devices.protocol import (
    GELU,
    Activation,
    Array,
    Attention,
    Clamp,
    ColumnScale,
    Elementwise,
    Expert,
    FloatArray,
    IntArray,
    Matrix,
    ModelInput,
    Norm,
    Peers,
    Rope,
    Routing,
    SparseGELU,
    Temperature,
    experts_width,
)
from quire.devices.reference.cache import ReferenceKVCache
from quire.devices.reference.rows import (
    attention_weights,
    by_row,
    first_seen,
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
class ReferenceOps:
    """`Ops` over one step."""

    inputs: ModelInput
    kv: ReferenceKVCache
    adapters: StepAdapters = field(default_factory=StepAdapters)
    tapped: list[FloatArray] = field(default_factory=list)

    def embed(self, table: Matrix, scale: float = 1.0) -> FloatArray:
        rows = _values(table)[self.inputs.tokens_T]
        for i, token in enumerate(self.inputs.tokens_T.tolist() if self.adapters.active else ()):
            change = self.adapters.embedding(i, table)
            if change is None:
                continue
            y = rows[i] if change.weight is None else _values(change.weight)[token]
            for up in change.ups:
                assert change.down is not None
                y = y + up.weight.astype(np.float64) @ change.down[up.first :, token][: up.weight.shape[1]]
            rows[i] = y if change.gain is None else y * change.gain
        return (rows * scale).astype(np.float32)

    def embed_positions(self, table: Matrix, offset: int) -> FloatArray:
        return _values(table)[self.inputs.positions_T + offset].astype(np.float32)

    def add(self, x: FloatArray, other: FloatArray, scale: float = 1.0) -> FloatArray:
        return (x.astype(np.float64) + scale * other.astype(np.float64)).astype(np.float32)

    def scale(self, x: FloatArray, scale: float, cap: float | None = None) -> FloatArray:
        y = x.astype(np.float64) * scale
        return (y if cap is None else cap * np.tanh(y / cap)).astype(np.float32)

    def multiply(self, x: FloatArray, factors: FloatArray) -> FloatArray:
        each = np.repeat(factors.astype(np.float64), x.shape[1] // factors.shape[1], axis=1)
        return np.asarray(x * each, np.float32)

    def elementwise(self, x: FloatArray, op: Elementwise) -> FloatArray:
        if isinstance(op, Clamp):
            bounded: FloatArray = np.minimum(np.maximum(x, np.float32(-op.limit)), np.float32(op.limit))
            return bounded
        if isinstance(op, Temperature):
            steps = (self.inputs.positions_T + op.offset) // op.length
            scales = np.array([1 + op.beta * np.log(1.0 + step) for step in steps.tolist()])
            return np.asarray(x * scales[:, None], np.float32)
        if isinstance(op, GELU):
            return by_row(partial(activate, "gelu"), x, x.shape[1])
        if isinstance(op, ColumnScale):
            return np.asarray(x * np.array(op.factors), np.float32)
        if isinstance(op, SparseGELU):
            return by_row(partial(sparse_gelu, op), x, x.shape[1])
        return by_row(partial(xielu, op), x, x.shape[1])

    def combine(self, x: FloatArray, factors: FloatArray, residual: FloatArray | None = None) -> FloatArray:
        return mixed(x, np.broadcast_to(factors, (len(x), *factors.shape)), residual)

    def mix(
        self, x: FloatArray, factors: FloatArray, vectors: int, residual: FloatArray | None = None
    ) -> FloatArray:
        return mixed(x, factors.reshape(len(x), factors.shape[1] // vectors, vectors), residual)

    def match_rms(self, x: FloatArray, like: FloatArray, floor: float) -> FloatArray:
        return matched_rms(x, like, floor)

    def norm(self, x: FloatArray, norm: Norm) -> FloatArray:
        if self.adapters.active:
            own = [normalize(row, self.adapters.norm(i, norm)) for i, row in enumerate(x.astype(np.float64))]
            return np.array(own, np.float32).reshape(x.shape)
        return by_row(lambda row: normalize(row, norm), x, x.shape[1])

    def _product(self, weight: Matrix, row: FloatArray, i: int, bias: FloatArray | None) -> Float64Array:
        """weight @ row + bias as the adapter of row `i` of the step changes it."""
        own = own_matrix(weight)
        change = self.adapters.product(i, weight) if self.adapters.active else None
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
        bias: FloatArray | None = None,
        activation: Activation | None = None,
        residual: FloatArray | None = None,
    ) -> FloatArray:
        return self._linear(x, weight, bias, activation, residual, range(len(x)))

    def _linear(
        self,
        x: FloatArray,
        weight: Matrix,
        bias: FloatArray | None,
        activation: Activation | None,
        residual: FloatArray | None,
        places: Sequence[int],
    ) -> FloatArray:
        """`linear`; row i of x belongs to row places[i] of the step."""
        out = np.empty((len(x), weight.shape[0]), np.float32)
        for i, row in enumerate(x):
            y = self._product(weight, row, places[i], bias)
            if activation is not None:
                y = activate(activation, y)
            out[i] = y if residual is None else y + residual[i]
        return out

    def gated_linear(
        self,
        x: FloatArray,
        weight: Matrix,
        activation: Activation,
        bias: FloatArray | None = None,
        limit: float = 0.0,
    ) -> FloatArray:
        return self._gated(x, weight, activation, bias, range(len(x)), limit)

    def _gated(
        self,
        x: FloatArray,
        weight: Matrix,
        activation: Activation,
        bias: FloatArray | None,
        places: Sequence[int],
        limit: float,
    ) -> FloatArray:
        half = weight.shape[0] // 2
        out = np.empty((len(x), half), np.float32)
        for i, row in enumerate(x):
            y = self._product(weight, row, places[i], bias)
            out[i] = gate(activation, y[:half], y[half:], limit)
        return out

    def rope_angles(self, rope: Rope) -> FloatArray:
        angles_TR = self.inputs.positions_T.astype(np.float32)[:, None] * rope.inv_freq
        return by_row(
            lambda row: rope.scale * np.concatenate([np.cos(row), np.sin(row)]),
            angles_TR,
            2 * len(rope.inv_freq),
        )

    def store_kv(
        self,
        qkv: FloatArray,
        layer: int,
        num_heads: int,
        angles: FloatArray | None,
        q_norm: Norm | None,
        k_norm: Norm | None,
        v_norm: Norm | None = None,
    ) -> FloatArray:
        kept = self.kv.spec.layer(layer)
        groups, head_dim = kept.num_kv_heads, kept.head_dim
        heads = qkv.reshape(len(qkv), num_heads + 2 * groups, head_dim).astype(np.float64)
        q_TNH = np.empty((len(qkv), num_heads, head_dim), np.float32)
        blocks_T, offsets_T = self._places()
        for t, heads_H in enumerate(heads):
            q, k, v = np.split(heads_H, [num_heads, num_heads + groups])
            row = None if angles is None else angles[t].astype(np.float64)
            q, k = prepare_heads(q, q_norm, row), prepare_heads(k, k_norm, row)
            v = prepare_heads(v, v_norm, None)
            q_TNH[t] = q
            self.kv.keys[layer][blocks_T[t], offsets_T[t]] = self.kv.rounded(k, self.kv.key_scales[layer])
            self.kv.values[layer][blocks_T[t], offsets_T[t]] = self.kv.rounded(v, self.kv.value_scales[layer])
        self._echo(layer)
        return q_TNH.reshape(len(qkv), num_heads * head_dim)

    def queries(
        self, q: FloatArray, num_heads: int, angles: FloatArray | None, norm: Norm | None
    ) -> FloatArray:
        out = np.empty(q.shape, np.float32)
        for t, row in enumerate(q.reshape(len(q), num_heads, -1).astype(np.float64)):
            turn = None if angles is None else angles[t].astype(np.float64)
            out[t] = prepare_heads(row, norm, turn).reshape(-1)
        return out

    def store_latent(
        self,
        kv: FloatArray,
        q_latent: FloatArray,
        q_rope: FloatArray,
        layer: int,
        angles: FloatArray,
        norm: Norm,
    ) -> FloatArray:
        latent, rotary = len(norm.weight), angles.shape[1]
        num_heads = q_latent.shape[1] // latent
        q_TNH = np.empty((len(kv), num_heads, latent + rotary), np.float32)
        blocks_T, offsets_T = self._places()
        for t, row in enumerate(kv.astype(np.float64)):
            turn = angles[t].astype(np.float64)
            key = np.concatenate([normalize(row[:latent], norm), rotate(row[None, latent:], turn)[0]])
            self.kv.keys[layer][blocks_T[t], offsets_T[t], 0] = self.kv.rounded(
                key[None], self.kv.key_scales[layer]
            )[0]
            q_TNH[t, :, :latent] = q_latent[t].reshape(num_heads, latent)
            q_TNH[t, :, latent:] = rotate(q_rope[t].reshape(num_heads, rotary).astype(np.float64), turn)
        self._echo(layer)
        return q_TNH.reshape(len(kv), -1)

    def head_linear(self, x: FloatArray, weights: Sequence[Matrix]) -> FloatArray:
        heads = np.split(x, len(weights), axis=1)
        return np.concatenate([self.linear(head, w) for head, w in zip(heads, weights, strict=True)], axis=1)

    def route(
        self,
        scores: FloatArray,
        routing: Routing,
        correction: FloatArray | None = None,
        weight_scales: FloatArray | None = None,
    ) -> FloatArray:
        chosen = routing.top_k + routing.shared
        return by_row(lambda row: route_row(row, routing, correction, weight_scales), scores, 2 * chosen)

    def experts(
        self,
        x: FloatArray,
        routes: FloatArray,
        experts: Sequence[Expert | None],
        activation: Activation,
        weigh_inputs: bool = False,
    ) -> FloatArray:
        out, chosen = np.zeros((len(x), experts_width(x.shape[1], experts)), np.float64), routes.shape[1] // 2
        for t in range(len(x)):
            for place in np.argsort(routes[t, :chosen]):
                expert, weight = experts[int(routes[t, place])], routes[t, chosen + place]
                row = x[t : t + 1] * weight if weigh_inputs else x[t : t + 1]
                weight = np.float32(1) if weigh_inputs else weight
                if expert is not None:
                    inner = self._gated(row, expert.up, activation, expert.up_bias, [t], expert.limit)
                    row = self._linear(inner, expert.down, expert.down_bias, None, None, [t])
                out[t] += weight * row[0]
        return out.astype(np.float32)

    def relative_scores(
        self,
        by_query: FloatArray | None,
        by_key: FloatArray | None,
        num_heads: int,
        places: IntArray,
        scale: float,
    ) -> FloatArray:
        count, positions = len(self.inputs.tokens_T), (len(places) + 1) // 2
        out = np.zeros((count, num_heads, padded_positions(places)), np.float32)
        heads = np.arange(num_heads)[:, None]
        for start, stop in pairwise(self.inputs.cu_q_B1.tolist()):
            keys = np.arange(stop - start)
            for i in keys:
                near, total = places[keys - i + positions - 1], np.zeros((num_heads, len(keys)))
                if by_query is not None:
                    total += by_query[start + i].reshape(num_heads, -1)[heads, near]
                if by_key is not None:
                    total += by_key[start:stop].reshape(len(keys), num_heads, -1)[keys, heads, near]
                out[start + i, :, : len(keys)] = scale * total
        return out.reshape(count, -1)

    def attention(
        self,
        q: FloatArray,
        layer: int,
        num_heads: int,
        attention: Attention,
        scores: FloatArray | None = None,
    ) -> FloatArray:
        """One softmax over the whole row, not tiled: the result that the online form must reach."""
        kept = self.kv.spec.layer(layer)
        groups, head_dim = kept.num_kv_heads, kept.head_dim
        out = np.empty((len(q), num_heads, self.kv.spec.value_dim or head_dim), np.float32)
        for b, kv_len in enumerate(self.inputs.kv_len_B):
            keys_GSH = self._gather(self.kv.keys[layer], b) * self.kv.key_scales[layer][:, None]
            values_GSH = self._gather(self.kv.values[layer], b) * self.kv.value_scales[layer][:, None]
            start, stop = self.inputs.cu_q_B1[b], self.inputs.cu_q_B1[b + 1]
            for t in range(start, stop):
                end = kv_len - (stop - 1 - t)
                begin, own = first_seen(int(end) - 1, attention), int(end) - 1
                end = min(int(end) + attention.ahead, int(kv_len))
                q_GRH = q[t].astype(np.float64).reshape(groups, num_heads // groups, head_dim)
                for g in range(groups):
                    heads = slice(g * (num_heads // groups), (g + 1) * (num_heads // groups))
                    products = q_GRH[g] @ keys_GSH[g, begin:end].T
                    added = None
                    if scores is not None:
                        added = scores[t].reshape(num_heads, -1)[heads, begin:end]
                    weights = attention_weights(products, attention, heads, own - begin, added)
                    out[t, heads] = weights @ values_GSH[g, begin:end]
        return out.reshape(len(q), -1)

    def all_reduce(self, x: FloatArray, peers: Peers | None) -> FloatArray:
        return all_reduced(x, peers)

    def all_gather(self, x: FloatArray, widths: Sequence[int], peers: Peers | None) -> FloatArray:
        return all_gathered(x, widths, peers)

    def select_rows(self, x: FloatArray) -> FloatArray:
        self.adapters.select_rows(self.inputs.logit_rows_L.tolist())
        return np.ascontiguousarray(x[self.inputs.logit_rows_L])

    def receive(self, width: int) -> FloatArray:
        return received(self.inputs, width)

    def tap(self, x: FloatArray) -> None:
        self.tapped.append(x)

    def _gather(self, cache: Array, b: int) -> Float64Array:
        """Sequence b's keys or values in order of position: [G, kv_len, H]."""
        kv_len = self.inputs.kv_len_B[b]
        blocks = self.inputs.block_table_SM[self.inputs.slots_B[b], : -(-kv_len // self.kv.block_size)]
        tokens = cache[blocks].reshape(-1, *cache.shape[2:])[:kv_len]
        return np.ascontiguousarray(tokens.astype(np.float64).transpose(1, 0, 2))

    def _echo(self, layer: int) -> None:
        """Store the keys and values of ModelInput.echoes_E2 in the other sequences' blocks."""
        inputs = self.inputs
        if inputs.echoes_E2 is None:
            return
        blocks_T, offsets_T = self._places()
        for t, b in inputs.echoes_E2:
            block = inputs.block_table_SM[inputs.slots_B[b], inputs.positions_T[t] // self.kv.block_size]
            for side in (self.kv.keys[layer], self.kv.values[layer]):
                side[block, offsets_T[t]] = side[blocks_T[t], offsets_T[t]]

    def _places(self) -> tuple[Array, Array]:
        """Block and offset in it of each token of the step."""
        slots_T = np.repeat(self.inputs.slots_B, np.diff(self.inputs.cu_q_B1))
        size = self.kv.block_size
        return self.inputs.block_table_SM[
            slots_T, self.inputs.positions_T // size
        ], self.inputs.positions_T % size
