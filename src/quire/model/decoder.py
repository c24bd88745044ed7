"""The one decoder, written over `Ops`. Knows ArchSpec and packed weights; no family, file or sequence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

from quire.model.rope import make_rope
from quire.model.spec import ArchSpec
from quire.ops.protocol import FloatArray, Graph, Matrix, Norm, Ops

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer. D hidden size, N and G query and key/value heads, H head_dim, I intermediate size.

    qkv [(N + 2 G) H, D] is q, k and v stacked; gate_up is a gated matrix [2 I, D]; q_norm and k_norm are [H].
    """

    attention_norm: Norm
    qkv: Matrix
    qkv_bias: FloatArray | None
    q_norm: Norm | None
    k_norm: Norm | None
    out: Matrix
    out_bias: FloatArray | None
    mlp_norm: Norm
    gate_up: Matrix
    gate_up_bias: FloatArray | None
    down: Matrix
    down_bias: FloatArray | None


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """`head` is `embedding` itself where the spec ties them: both [V, D]."""

    embedding: Matrix
    layers: tuple[LayerWeights, ...]
    norm: Norm
    head: Matrix

    @property
    def matrix_bytes(self) -> int:
        """Bytes of the packed matrices, a tied head counted once."""
        shared = {id(m): m.nbytes for m in (self.embedding, self.head)}
        layers = sum(w.qkv.nbytes + w.out.nbytes + w.gate_up.nbytes + w.down.nbytes for w in self.layers)
        return sum(shared.values()) + layers


class Decoder:
    """Embedding, `num_layers` of attention and gated MLP around a residual stream, final norm, head.

    x -> norm -> qkv -> rope, store -> paged attention -> out -> + x
    x -> norm -> gate, up -> activation(gate) * up -> down -> + x
    """

    def __init__(self, spec: ArchSpec, weights: DecoderWeights) -> None:
        self.spec = spec
        self.weights = weights
        self._rope = make_rope(spec.rope)

    def graph(self) -> Graph:
        return Graph(self.hidden, self.head, self.spec.vocab_size, self.spec.hidden_size)

    def hidden(self, ops: Ops[T]) -> T:
        """Tokens of the step -> final hidden states of the logit rows: [L, D]."""
        x = ops.embed(self.weights.embedding)
        angles = ops.rope_angles(self._rope)
        for index, layer in enumerate(self.weights.layers):
            x = self._attention(ops, x, angles, index, layer)
            x = self._mlp(ops, x, layer)
        return ops.norm(ops.select_rows(x), self.weights.norm)

    def head(self, ops: Ops[T], hidden: T) -> T:
        """[L, D] -> logits [L, V]."""
        return ops.linear(hidden, self.weights.head)

    def _attention(self, ops: Ops[T], x: T, angles: T, index: int, layer: LayerWeights) -> T:
        spec = self.spec
        qkv = ops.linear(ops.norm(x, layer.attention_norm), layer.qkv, layer.qkv_bias)
        q = ops.store_kv(qkv, index, spec.num_heads, angles, layer.q_norm, layer.k_norm)
        heads = ops.attention(q, index, spec.num_heads, spec.attention_scale, spec.windows[index])
        return ops.linear(heads, layer.out, layer.out_bias, residual=x)

    def _mlp(self, ops: Ops[T], x: T, layer: LayerWeights) -> T:
        normed = ops.norm(x, layer.mlp_norm)
        inner = ops.gated_linear(normed, layer.gate_up, self.spec.activation, layer.gate_up_bias)
        return ops.linear(inner, layer.down, layer.down_bias, residual=x)
