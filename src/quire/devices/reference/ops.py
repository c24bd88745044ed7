"""The oracle: every operation in plain numpy, executed at once. Knows no model family and no scheduler.

Weights and activations are float32 values (weights rounded to bfloat16 where asked); sums run in float64 and
each result is rounded once to float32. Weights are held as float64, 8 bytes a parameter: made for tests and
small models, not for speed.

Exactness: whatever reduces or calls a transcendental function does so on one row (or one query) at a time,
with shapes that depend on that row alone. One call over all rows would let BLAS and numpy choose an order
of summation by the number of rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from msgspec.structs import astuple

from quire.devices.host import Float64Array, HostLogits, activate, normalize
from quire.devices.protocol import (
    Activation,
    Array,
    Attention,
    Expert,
    FloatArray,
    Graph,
    KVCache,
    KVSpec,
    Limits,
    Matrix,
    ModelInput,
    Norm,
    Rope,
    Routing,
    WeightType,
)
from quire.devices.reference.rows import (
    attention_weights,
    by_row,
    first_seen,
    gate,
    norm_heads,
    rotate,
    route_row,
)
from quire.devices.reference.weights import DTYPES, ReferenceMatrix, round_int8
from quire.errors import EngineError


class ReferenceKVCache:
    """Keys and values [layers, num_blocks, block_size, G, H], NaN until written: a stray read shows."""

    def __init__(self, spec: KVSpec, num_blocks: int, block_size: int) -> None:
        shape = (spec.num_layers, num_blocks, block_size, spec.num_kv_heads, spec.head_dim)
        kept = np.float32 if spec.dtype == "int8" else DTYPES[spec.dtype]
        self.keys = np.full(shape, np.nan, kept)
        if spec.value_dim is None:
            self.values = np.full(shape, np.nan, kept)
        else:
            self.values = self.keys[..., : spec.value_dim]
        self._spec = spec

    @property
    def spec(self) -> KVSpec:
        return self._spec

    @property
    def num_blocks(self) -> int:
        return int(self.keys.shape[1])

    @property
    def block_size(self) -> int:
        return int(self.keys.shape[2])

    def rounded(self, heads: Array) -> FloatArray:
        """Keys or values [heads, H] as the cache keeps them, before its own type's rounding."""
        values: FloatArray = heads.astype(np.float32)
        return round_int8(values) if self._spec.dtype == "int8" else values

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        for source, destination in copies:
            self.keys[:, destination] = self.keys[:, source]
            if self._spec.value_dim is None:
                self.values[:, destination] = self.values[:, source]


def _own(weight: Matrix) -> ReferenceMatrix:
    if not isinstance(weight, ReferenceMatrix):
        raise EngineError(
            f"the reference backend got a weight of {type(weight).__name__}; load the model with it"
        )
    return weight


def _values(weight: Matrix) -> Float64Array:
    return _own(weight).values


@dataclass(frozen=True, slots=True)
class ReferenceOps:
    """`Ops` over one step."""

    inputs: ModelInput
    kv: ReferenceKVCache

    def embed(self, table: Matrix, scale: float = 1.0) -> FloatArray:
        rows = _values(table)[self.inputs.tokens_T]
        return (rows * scale).astype(np.float32)

    def embed_positions(self, table: Matrix, offset: int) -> FloatArray:
        return _values(table)[self.inputs.positions_T + offset].astype(np.float32)

    def add(self, x: FloatArray, other: FloatArray, scale: float = 1.0) -> FloatArray:
        return (x.astype(np.float64) + scale * other.astype(np.float64)).astype(np.float32)

    def scale(self, x: FloatArray, scale: float, cap: float | None = None) -> FloatArray:
        y = x.astype(np.float64) * scale
        return (y if cap is None else cap * np.tanh(y / cap)).astype(np.float32)

    def norm(self, x: FloatArray, norm: Norm) -> FloatArray:
        return by_row(lambda row: normalize(row, norm), x, x.shape[1])

    def linear(
        self,
        x: FloatArray,
        weight: Matrix,
        bias: FloatArray | None = None,
        activation: Activation | None = None,
        residual: FloatArray | None = None,
    ) -> FloatArray:
        own = _own(weight)
        out = np.empty((len(x), len(own.values)), np.float32)
        for i, row in enumerate(x):
            y = own.values @ own.seen(row)
            if bias is not None:
                y = y + bias
            if activation is not None:
                y = activate(activation, y)
            out[i] = y if residual is None else y + residual[i]
        return out

    def gated_linear(
        self, x: FloatArray, weight: Matrix, activation: Activation, bias: FloatArray | None = None
    ) -> FloatArray:
        own = _own(weight)
        half = len(own.values) // 2
        out = np.empty((len(x), half), np.float32)
        for i, row in enumerate(x):
            y = own.values @ own.seen(row)
            y = y if bias is None else y + bias
            out[i] = gate(activation, y[:half], y[half:])
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
    ) -> FloatArray:
        groups, head_dim = self.kv.spec.num_kv_heads, self.kv.spec.head_dim
        heads = qkv.reshape(len(qkv), num_heads + 2 * groups, head_dim).astype(np.float64)
        q_TNH = np.empty((len(qkv), num_heads, head_dim), np.float32)
        blocks_T, offsets_T = self._places()
        for t, heads_H in enumerate(heads):
            q, k, v = np.split(heads_H, [num_heads, num_heads + groups])
            if q_norm is not None:
                q = norm_heads(q, q_norm)
            if k_norm is not None:
                k = norm_heads(k, k_norm)
            if angles is not None:
                row = angles[t].astype(np.float64)
                q, k = rotate(q, row), rotate(k, row)
            q_TNH[t] = q
            self.kv.keys[layer, blocks_T[t], offsets_T[t]] = self.kv.rounded(k)
            self.kv.values[layer, blocks_T[t], offsets_T[t]] = self.kv.rounded(v)
        return q_TNH.reshape(len(qkv), num_heads * head_dim)

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
            self.kv.keys[layer, blocks_T[t], offsets_T[t], 0] = self.kv.rounded(key[None])[0]
            q_TNH[t, :, :latent] = q_latent[t].reshape(num_heads, latent)
            q_TNH[t, :, latent:] = rotate(q_rope[t].reshape(num_heads, rotary).astype(np.float64), turn)
        return q_TNH.reshape(len(kv), -1)

    def head_linear(self, x: FloatArray, weights: Sequence[Matrix]) -> FloatArray:
        heads = np.split(x, len(weights), axis=1)
        return np.concatenate([self.linear(head, w) for head, w in zip(heads, weights, strict=True)], axis=1)

    def route(self, scores: FloatArray, routing: Routing, correction: FloatArray | None = None) -> FloatArray:
        chosen = routing.top_k + routing.shared
        return by_row(lambda row: route_row(row, routing, correction), scores, 2 * chosen)

    def experts(
        self, x: FloatArray, routes: FloatArray, experts: Sequence[Expert], activation: Activation
    ) -> FloatArray:
        out, chosen = np.zeros(x.shape, np.float64), routes.shape[1] // 2
        for t in range(len(x)):
            for place in np.argsort(routes[t, :chosen]):
                expert = experts[int(routes[t, place])]
                inner = self.gated_linear(x[t : t + 1], expert.up, activation, expert.up_bias)
                out[t] += routes[t, chosen + place] * self.linear(inner, expert.down, expert.down_bias)[0]
        return out.astype(np.float32)

    def attention(self, q: FloatArray, layer: int, num_heads: int, attention: Attention) -> FloatArray:
        """Here the softmax is whole, not tiled: the result that the online form must reach."""
        groups, head_dim = self.kv.spec.num_kv_heads, self.kv.spec.head_dim
        out = np.empty((len(q), num_heads, self.kv.spec.value_dim or head_dim), np.float32)
        for b, kv_len in enumerate(self.inputs.kv_len_B):
            keys_GSH = self._gather(self.kv.keys[layer], b)
            values_GSH = self._gather(self.kv.values[layer], b)
            start, stop = self.inputs.cu_q_B1[b], self.inputs.cu_q_B1[b + 1]
            for t in range(start, stop):
                end = kv_len - (stop - 1 - t)
                begin, own = first_seen(int(end) - 1, attention), int(end) - 1
                end = min(int(end) + attention.ahead, int(kv_len))
                q_GRH = q[t].astype(np.float64).reshape(groups, num_heads // groups, head_dim)
                for g in range(groups):
                    heads = slice(g * (num_heads // groups), (g + 1) * (num_heads // groups))
                    products = q_GRH[g] @ keys_GSH[g, begin:end].T
                    weights = attention_weights(products, attention, heads, own - begin)
                    out[t, heads] = weights @ values_GSH[g, begin:end]
        return out.reshape(len(q), -1)

    def select_rows(self, x: FloatArray) -> FloatArray:
        return np.ascontiguousarray(x[self.inputs.logit_rows_L])

    def _gather(self, cache: Array, b: int) -> Float64Array:
        """Sequence b's keys or values in order of position: [G, kv_len, H]."""
        kv_len = self.inputs.kv_len_B[b]
        blocks = self.inputs.block_table_SM[self.inputs.slots_B[b], : -(-kv_len // self.kv.block_size)]
        tokens = cache[blocks].reshape(-1, *cache.shape[2:])[:kv_len]
        return np.ascontiguousarray(tokens.astype(np.float64).transpose(1, 0, 2))

    def _places(self) -> tuple[Array, Array]:
        """Block and offset in it of each token of the step."""
        slots_T = np.repeat(self.inputs.slots_B, np.diff(self.inputs.cu_q_B1))
        size = self.kv.block_size
        return self.inputs.block_table_SM[
            slots_T, self.inputs.positions_T // size
        ], self.inputs.positions_T % size


def check_input(inputs: ModelInput, kv: KVCache, limits: Limits, vocab_size: int) -> None:
    """Raise EngineError where a step breaks a promise of ModelInput or exceeds the limits."""
    total, batch = len(inputs.tokens_T), len(inputs.kv_len_B)
    *arrays, _ = astuple(inputs)
    if any(a.dtype != np.int32 or not a.flags.c_contiguous for a in arrays):
        raise EngineError("every array of a step must be C-contiguous int32")
    if total > limits.max_tokens or batch > limits.max_seqs:
        raise EngineError(f"step of {total} tokens and {batch} sequences is over its limits {limits}")
    if len(inputs.cu_q_B1) != batch + 1 or len(inputs.slots_B) != batch or len(inputs.positions_T) != total:
        raise EngineError("the arrays of a step disagree on the number of tokens or sequences")
    if inputs.cu_q_B1[0] != 0 or inputs.cu_q_B1[-1] != total or np.any(np.diff(inputs.cu_q_B1) < 1):
        raise EngineError("cu_q must rise from 0 to the number of tokens, by at least one token a sequence")
    for b in range(batch):
        start, stop, length = inputs.cu_q_B1[b], inputs.cu_q_B1[b + 1], inputs.kv_len_B[b]
        if not np.array_equal(inputs.positions_T[start:stop], np.arange(length - (stop - start), length)):
            raise EngineError(f"positions of sequence {b} must be consecutive and end at kv_len - 1")
        used = inputs.block_table_SM[inputs.slots_B[b], : -(-length // kv.block_size)]
        if length > inputs.block_table_SM.shape[1] * kv.block_size or np.any(
            (used < 0) | (used >= kv.num_blocks)
        ):
            raise EngineError(f"the block table of sequence {b} does not cover its {length} tokens")
    for name, values, bound in (
        ("token id", inputs.tokens_T, vocab_size),
        ("logit row", inputs.logit_rows_L, total),
    ):
        if np.any((values < 0) | (values >= bound)):
            raise EngineError(f"a {name} is outside 0..{bound - 1}")


class ReferenceExecutable:
    """Runs the graph's functions anew each step. Logits live in one buffer, overwritten as promised."""

    def __init__(self, graph: Graph, kv: ReferenceKVCache, limits: Limits) -> None:
        self._graph, self._kv, self._limits = graph, kv, limits
        self._logits = np.full((limits.max_logit_rows, graph.vocab_size), np.nan, np.float32)
        self._hidden = np.empty((0, graph.hidden_size), np.float32)
        self._ops: ReferenceOps | None = None

    def run(self, inputs: ModelInput) -> HostLogits:
        check_input(inputs, self._kv, self._limits, self._graph.vocab_size)
        self._ops = ReferenceOps(inputs, self._kv)
        self._hidden = self._graph.hidden(self._ops)
        return self.logits(0, min(len(self._hidden), self._limits.max_logit_rows))

    def logits(self, start: int, stop: int) -> HostLogits:
        if self._ops is None or not 0 <= start <= stop <= len(self._hidden):
            raise EngineError(
                f"logit rows {start}..{stop} are not of the last run ({len(self._hidden)} rows)"
            )
        if stop - start > self._limits.max_logit_rows:
            raise EngineError(
                f"{stop - start} logit rows at once; the limit is {self._limits.max_logit_rows}"
            )
        self._logits.fill(np.nan)
        view = self._logits[: stop - start]
        if stop > start:
            view[:] = self._graph.head(self._ops, self._hidden[start:stop])
        return HostLogits(view)

    def hidden(self) -> FloatArray:
        return self._hidden


@dataclass(slots=True)
class _Widths:
    """`Ops` whose tensors are only their widths: finds the widest activation of a graph."""

    kv_spec: KVSpec
    widest: int = 0

    def _see(self, width: int) -> int:
        self.widest = max(self.widest, width)
        return width

    def embed(self, table: Matrix, scale: float = 1.0) -> int:
        return self._see(table.shape[1])

    def embed_positions(self, table: Matrix, offset: int) -> int:
        return self._see(table.shape[1])

    def add(self, x: int, other: int, scale: float = 1.0) -> int:
        return self._see(x)

    def scale(self, x: int, scale: float, cap: float | None = None) -> int:
        return self._see(x)

    def norm(self, x: int, norm: Norm) -> int:
        return self._see(x)

    def linear(
        self,
        x: int,
        weight: Matrix,
        bias: FloatArray | None = None,
        activation: Activation | None = None,
        residual: int | None = None,
    ) -> int:
        return self._see(weight.shape[0])

    def gated_linear(
        self, x: int, weight: Matrix, activation: Activation, bias: FloatArray | None = None
    ) -> int:
        return self._see(weight.shape[0] // 2)

    def rope_angles(self, rope: Rope) -> int:
        return self._see(2 * len(rope.inv_freq))

    def store_kv(
        self,
        qkv: int,
        layer: int,
        num_heads: int,
        angles: int | None,
        q_norm: Norm | None,
        k_norm: Norm | None,
    ) -> int:
        return self._see(num_heads * self.kv_spec.head_dim)

    def store_latent(self, kv: int, q_latent: int, q_rope: int, layer: int, angles: int, norm: Norm) -> int:
        return self._see(q_latent + q_rope)

    def head_linear(self, x: int, weights: Sequence[Matrix]) -> int:
        return self._see(len(weights) * weights[0].shape[0])

    def route(self, scores: int, routing: Routing, correction: FloatArray | None = None) -> int:
        return self._see(2 * (routing.top_k + routing.shared))

    def experts(self, x: int, routes: int, experts: Sequence[Expert], activation: Activation) -> int:
        self._see(max(expert.up.shape[0] for expert in experts))
        return self._see(x)

    def attention(self, q: int, layer: int, num_heads: int, attention: Attention) -> int:
        return self._see(num_heads * (self.kv_spec.value_dim or self.kv_spec.head_dim))

    def select_rows(self, x: int) -> int:
        return self._see(x)


class ReferenceBackend:
    """numpy on any machine."""

    @property
    def name(self) -> str:
        return "reference (numpy, float64 sums)"

    @property
    def threads(self) -> int:
        return 1

    def matrix(self, parts: Sequence[Array], dtype: WeightType) -> ReferenceMatrix:
        return ReferenceMatrix(parts, dtype)

    head = matrix

    def gated_matrix(self, gate: Array, up: Array, dtype: WeightType) -> ReferenceMatrix:
        return ReferenceMatrix([gate, up], dtype)

    @property
    def fingerprint(self) -> str:
        return "reference"

    def export(self, matrix: Matrix) -> tuple[dict[str, Any], Array]:
        values = matrix.dequantize()
        about = {"rows": len(values), "layout": "float32", "int8_rows": _own(matrix).int8_rows}
        return about, values.reshape(-1).view(np.uint8)

    def restore(self, about: dict[str, Any], data: Array) -> ReferenceMatrix:
        matrix = ReferenceMatrix([data.view(np.float32).reshape(about["rows"], -1)], "float32")
        matrix.int8_rows = bool(about["int8_rows"])
        return matrix

    def kv_cache(self, spec: KVSpec, num_blocks: int, block_size: int) -> ReferenceKVCache:
        return ReferenceKVCache(spec, num_blocks, block_size)

    def compile(self, graph: Graph, kv: KVCache, limits: Limits) -> ReferenceExecutable:
        if not isinstance(kv, ReferenceKVCache):
            raise EngineError(f"the reference backend got a KV cache of {type(kv).__name__}")
        return ReferenceExecutable(graph, kv, limits)

    def workspace_bytes(self, graph: Graph, kv_spec: KVSpec, limits: Limits) -> int:
        """Logits and four of the widest activation, which is about what numpy holds at once."""
        widths = _Widths(kv_spec)
        graph.hidden(widths)
        logits = 4 * limits.max_logit_rows * graph.vocab_size
        return logits + 4 * 4 * limits.max_tokens * widths.widest
