"""Measures a graph without running it, for backends that plan their workspace by its widest activation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from quire.devices.operands import padded_positions
from quire.devices.protocol import (
    Activation,
    Attention,
    Elementwise,
    Expert,
    FloatArray,
    Graph,
    IntArray,
    KVSpec,
    Matrix,
    Norm,
    Peers,
    Rope,
    Routing,
    experts_width,
)


@dataclass(slots=True)
class Widths:
    """`Ops` with tensors that are just their widths. `widest` is the largest seen."""

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

    def multiply(self, x: int, factors: int) -> int:
        return self._see(x)

    def elementwise(self, x: int, op: Elementwise) -> int:
        return self._see(x)

    def combine(self, x: int, factors: FloatArray, residual: int | None = None) -> int:
        return self._see(x // factors.shape[1] * len(factors))

    def mix(self, x: int, factors: int, vectors: int, residual: int | None = None) -> int:
        return self._see(x // vectors * (factors // vectors))

    def match_rms(self, x: int, like: int, floor: float) -> int:
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
        self,
        x: int,
        weight: Matrix,
        activation: Activation,
        bias: FloatArray | None = None,
        limit: float = 0.0,
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
        v_norm: Norm | None = None,
    ) -> int:
        return self._see(num_heads * self.kv_spec.layer(layer).head_dim)

    def queries(self, q: int, num_heads: int, angles: int | None, norm: Norm | None) -> int:
        return self._see(q)

    def store_latent(self, kv: int, q_latent: int, q_rope: int, layer: int, angles: int, norm: Norm) -> int:
        return self._see(q_latent + q_rope)

    def head_linear(self, x: int, weights: Sequence[Matrix]) -> int:
        return self._see(len(weights) * weights[0].shape[0])

    def route(
        self,
        scores: int,
        routing: Routing,
        correction: FloatArray | None = None,
        weight_scales: FloatArray | None = None,
    ) -> int:
        return self._see(2 * (routing.top_k + routing.shared))

    def experts(
        self,
        x: int,
        routes: int,
        experts: Sequence[Expert | None],
        activation: Activation,
        weigh_inputs: bool = False,
    ) -> int:
        self._see(max(expert.up.shape[0] for expert in experts if expert is not None))
        return self._see(experts_width(x, experts))

    def relative_scores(
        self, by_query: int | None, by_key: int | None, num_heads: int, places: IntArray, scale: float
    ) -> int:
        return self._see(num_heads * padded_positions(places))

    def attention(
        self, q: int, layer: int, num_heads: int, attention: Attention, scores: int | None = None
    ) -> int:
        return self._see(num_heads * (self.kv_spec.value_dim or self.kv_spec.layer(layer).head_dim))

    def all_reduce(self, x: int, peers: Peers | None) -> int:
        return self._see(x)

    def all_gather(self, x: int, widths: Sequence[int], peers: Peers | None) -> int:
        return self._see(sum(widths))

    def select_rows(self, x: int) -> int:
        return self._see(x)

    def receive(self, width: int) -> int:
        return self._see(width)

    def tap(self, x: int) -> None:
        """Takes no memory beyond the activation itself."""


def widest_activation(graph: Graph, kv_spec: KVSpec) -> int:
    """The largest number of elements per token that an operation before the head produces."""
    widths = Widths(kv_spec)
    graph.hidden(widths)
    return widths.widest
