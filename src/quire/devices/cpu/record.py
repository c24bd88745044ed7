"""Records the decoder's operations as a native plan (csrc/plan/plan.h)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from quire import _native
from quire.devices.cpu.pack import packed_of
from quire.devices.protocol import (
    Activation,
    Attention,
    Elementwise,
    Expert,
    FloatArray,
    Graph,
    IntArray,
    Matrix,
    Norm,
    Peers,
    Rope,
    Routing,
)
from quire.errors import EngineError

NONE = -1  # no tensor


def float_array(values: FloatArray | None) -> FloatArray | None:
    return None if values is None else np.ascontiguousarray(values, np.float32)


def norm_tuple(norm: Norm | None) -> tuple[bool, FloatArray, FloatArray | None, float, bool, bool] | None:
    if norm is None:
        return None
    weight, bias = float_array(norm.weight.reshape(-1)), norm.bias
    assert weight is not None
    bias = None if bias is None else float_array(bias.reshape(-1))
    return norm.kind == "rms", weight, bias, float(norm.eps), norm.weight.ndim == 2, norm.after_rope


class Recorder:
    """`Ops` whose tensors are numbers of buffers in a native plan: each call appends one op."""

    def __init__(self, plan: Any) -> None:
        self.plan = plan
        self.taps: list[int] = []
        # Where each matrix and norm acts, by identity: (buffer of the op, place of the weight in it).
        self.products: dict[int, list[tuple[int, int]]] = {}
        self.embeddings: dict[int, list[tuple[int, int]]] = {}
        self.norms: dict[int, list[tuple[int, int]]] = {}
        self.output: int | None = None  # the result of a graph without a head

    def record(self, graph: Graph) -> None:
        """Record the whole graph. EngineError if its head does not give `vocab_size` logits."""
        hidden = graph.hidden(self)
        if graph.head is None:
            self.plan.tap(hidden)
            self.output = hidden
            self.plan.finish(NONE)
            return
        logits = graph.head(self, self.plan.begin_head(hidden))
        if self.plan.width(logits) != graph.vocab_size:
            raise EngineError(
                f"the head gives {self.plan.width(logits)} logits, the graph says {graph.vocab_size}"
            )
        self.plan.finish(logits)

    def _place(
        self, places: dict[int, list[tuple[int, int]]], weight: object, out: int, index: int = 0
    ) -> int:
        places.setdefault(id(weight), []).append((out, index))
        return out

    def receive(self, width: int) -> int:
        return int(self.plan.receive(width))

    def tap(self, x: int) -> None:
        self.plan.tap(x)
        self.taps.append(x)

    def embed(self, table: Matrix, scale: float = 1.0) -> int:
        return self._place(self.embeddings, table, int(self.plan.embed(packed_of(table), scale)))

    def embed_positions(self, table: Matrix, offset: int) -> int:
        return int(self.plan.embed_positions(packed_of(table), offset))

    def add(self, x: int, other: int, scale: float = 1.0) -> int:
        return int(self.plan.add(x, other, scale))

    def scale(self, x: int, scale: float, cap: float | None = None) -> int:
        return int(self.plan.scale(x, scale, cap or 0.0))

    def multiply(self, x: int, factors: int) -> int:
        return int(self.plan.multiply(x, factors))

    def elementwise(self, x: int, op: Elementwise) -> int:
        params = [float(p) for field in msgspec.structs.astuple(op) for p in np.atleast_1d(field)]
        return int(self.plan.elementwise(type(op).__name__, x, params))

    def combine(self, x: int, factors: FloatArray, residual: int | None = None) -> int:
        constants = factors.reshape(-1).tolist()
        return int(self.plan.combine(x, constants, factors.shape[1], NONE if residual is None else residual))

    def mix(self, x: int, factors: int, vectors: int, residual: int | None = None) -> int:
        return int(self.plan.mix(x, factors, vectors, NONE if residual is None else residual))

    def match_rms(self, x: int, like: int, floor: float) -> int:
        return int(self.plan.match_rms(x, like, floor))

    def norm(self, x: int, norm: Norm) -> int:
        return self._place(self.norms, norm, int(self.plan.norm(x, norm_tuple(norm))))

    def linear(
        self,
        x: int,
        weight: Matrix,
        bias: FloatArray | None = None,
        activation: Activation | None = None,
        residual: int | None = None,
    ) -> int:
        packed = packed_of(weight)
        if packed.gated:
            raise EngineError("a gated weight is for gated_linear")
        added = NONE if residual is None else residual
        out = int(self.plan.linear(x, packed, float_array(bias), activation or "", added, 0.0))
        return self._place(self.products, weight, out)

    def gated_linear(
        self,
        x: int,
        weight: Matrix,
        activation: Activation,
        bias: FloatArray | None = None,
        limit: float = 0.0,
    ) -> int:
        packed = packed_of(weight)
        if not packed.gated:
            raise EngineError("gated_linear needs a weight made by gated_matrix")
        out = int(self.plan.linear(x, packed, float_array(bias), activation, NONE, limit))
        return self._place(self.products, weight, out)

    def rope_angles(self, rope: Rope) -> int:
        return int(self.plan.rope(np.ascontiguousarray(rope.inv_freq, np.float32), rope.scale))

    def store_kv(
        self,
        qkv: int,
        layer: int,
        num_heads: int,
        angles: int | None,
        q_norm: Norm | None,
        k_norm: Norm | None,
        v_norm: Norm | None = None,
    ) -> int:
        rotation = NONE if angles is None else angles
        norms = norm_tuple(q_norm), norm_tuple(k_norm), norm_tuple(v_norm)
        return int(self.plan.store_kv(qkv, layer, num_heads, rotation, *norms))

    def queries(self, q: int, num_heads: int, angles: int | None, norm: Norm | None) -> int:
        return int(self.plan.queries(q, num_heads, NONE if angles is None else angles, norm_tuple(norm)))

    def store_latent(self, kv: int, q_latent: int, q_rope: int, layer: int, angles: int, norm: Norm) -> int:
        return int(self.plan.store_latent(kv, q_latent, q_rope, layer, angles, norm_tuple(norm)))

    def head_linear(self, x: int, weights: Sequence[Matrix]) -> int:
        return int(self.plan.head_linear(x, [packed_of(weight) for weight in weights]))

    def route(
        self,
        scores: int,
        routing: Routing,
        correction: FloatArray | None = None,
        weight_scales: FloatArray | None = None,
    ) -> int:
        params = _native.Routing(
            routing.num_experts,
            routing.top_k,
            routing.scoring == "sigmoid",
            routing.softmax_after,
            routing.renormalize,
            routing.scale,
            routing.num_groups,
            routing.top_groups,
            routing.group_sum,
            float_array(correction),
            float_array(weight_scales),
            routing.shared,
            routing.shared_gate,
            routing.sparse_mixer,
            routing.correct_logits,
        )
        return int(self.plan.route(scores, params))

    def experts(
        self,
        x: int,
        routes: int,
        experts: Sequence[Expert | None],
        activation: Activation,
        weigh_inputs: bool = False,
    ) -> int:
        weights = [
            None
            if e is None
            else (
                packed_of(e.up),
                float_array(e.up_bias),
                packed_of(e.down),
                float_array(e.down_bias),
                e.limit,
            )
            for e in experts
        ]
        out = int(self.plan.experts(x, routes, weights, activation, weigh_inputs))
        for i, expert in enumerate(experts):
            if expert is not None:
                self._place(self.products, expert.up, out, 2 * i)
                self._place(self.products, expert.down, out, 2 * i + 1)
        return out

    def relative_scores(
        self, by_query: int | None, by_key: int | None, num_heads: int, places: IntArray, scale: float
    ) -> int:
        given = (NONE if x is None else x for x in (by_query, by_key))
        return int(
            self.plan.relative_scores(*given, num_heads, np.ascontiguousarray(places, np.int32), scale)
        )

    def attention(
        self, q: int, layer: int, num_heads: int, attention: Attention, scores: int | None = None
    ) -> int:
        return int(
            self.plan.attention(
                q,
                layer,
                num_heads,
                attention.scale,
                attention.window or 0,
                attention.chunk or 0,
                attention.ahead,
                attention.cap or 0.0,
                float_array(attention.slopes),
                float_array(attention.sinks),
                None if attention.bias is None else float_array(attention.bias.reshape(-1)),
                NONE if scores is None else scores,
            )
        )

    def all_reduce(self, x: int, peers: Peers | None) -> int:
        return int(self.plan.all_reduce(x, peers))

    def all_gather(self, x: int, widths: Sequence[int], peers: Peers | None) -> int:
        return int(self.plan.all_gather(x, list(widths), peers))

    def select_rows(self, x: int) -> int:
        return int(self.plan.select_rows(x))
