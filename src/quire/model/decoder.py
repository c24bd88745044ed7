"""The one decoder, written over `Ops`. Knows ArchSpec and packed weights; no family, file or sequence."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Generic, TypeVar

import msgspec
import numpy as np

from quire.devices.protocol import (
    Attention,
    Clamp,
    FloatArray,
    Graph,
    IntArray,
    Matrix,
    Norm,
    Ops,
    SparseGELU,
)
from quire.errors import ModelError
from quire.model.altup import AltUp
from quire.model.rope import alibi_slopes, make_rope, relative_places
from quire.model.shard import WHOLE, Shard
from quire.model.spec import ArchSpec, MoESpec, RopeSpec
from quire.model.weights import (
    AttentionWeights,
    DecoderWeights,
    LatentWeights,
    LaurelWeights,
    LayerWeights,
    MLPWeights,
    MoEWeights,
    PerLayerWeights,
    RelativeWeights,
)

T = TypeVar("T")
Output = tuple[Matrix, FloatArray | None]
"""A projection that ends attention or MLP, and its bias."""


class LayerInputs(msgspec.Struct, Generic[T], frozen=True):
    """What the inputs of all layers are made of: the embedding [T, D] and rows of the table [T, layers P]."""

    embedding: T
    table: T


class Layers:
    """What a layer computes, or a rank's share of it. Knows the spec; the weights come with each call."""

    def __init__(self, spec: ArchSpec, shard: Shard = WHOLE) -> None:
        self.spec, self.shard = spec, shard
        self._gathers, self._divides_attention = shard.gathers(spec), shard.divides_attention(spec)
        self._slopes: FloatArray | None = None
        if spec.alibi is not None:
            scale = spec.attention_scale if spec.alibi == "scaled" else 1.0
            self._slopes = np.asarray(alibi_slopes(spec.num_heads) * scale, np.float32)
        self._places: IntArray | None = None
        if (near := spec.relative) is not None:
            self._places = relative_places(spec.max_position, near.span, near.buckets, near.reach)

    def layer(
        self,
        ops: Ops[T],
        x: T,
        angles: dict[RopeSpec, T],
        index: int,
        cached: int,
        layer: LayerWeights,
        carried: list[T] | None = None,
    ) -> T:
        """Layer `index` of the model, which is layer `cached` of the KV cache.

        `carried` holds what joins after the next layer (MoESpec.shortcut).
        """
        normed = x if layer.attention_norm is None else ops.norm(x, layer.attention_norm)
        attention, after, pending = layer.attention, x, self._sums_once(layer)
        if attention is not None:
            heads = self._attend(ops, normed, angles, index, cached, attention)
            output = attention.out, attention.out_bias
            if pending:
                after = ops.linear(heads, *output, residual=x if self.shard.first else None)
            else:
                divided = self._divides_attention
                after = self._join(ops, x, heads, output, layer.attention_post_norm, divided)
        if layer.laurel is not None:
            after = ops.scale(ops.add(after, self._laurel(ops, normed, layer.laurel)), 2**-0.5)
        source = x if self.spec.parallel else after
        if layer.mlp_norm is not None:
            normed = ops.norm(source, layer.mlp_norm)
        elif not self.spec.parallel:
            normed = source
        down: Output | None = None
        joins = carried.pop() if carried else None
        if layer.moe is not None and self.spec.moe is not None and self.spec.moe.shortcut:
            assert layer.mlp is not None
            assert carried is not None
            carried.append(self._route(ops, normed, self.spec.moe, layer.moe))
            inner, down = self._mlp(ops, normed, index, layer.mlp)
        elif layer.moe is not None and self.spec.moe is not None:
            beside = layer.moe.beside
            if beside is not None and layer.mlp is not None:
                dense = self._output(ops, *self._mlp(ops, normed, index, layer.mlp))
                inner = self._route(ops, source, self.spec.moe, layer.moe)
                inner = ops.add(ops.norm(dense, beside.mlp_norm), inner)
            else:
                inner = self._route(ops, normed, self.spec.moe, layer.moe)
        elif layer.mlp is not None:
            inner, down = self._mlp(ops, normed, index, layer.mlp)
            if pending:
                return self._sum(ops, ops.linear(inner, *down, residual=after))
        else:
            return after
        joined = self._join(ops, after, inner, down, layer.mlp_post_norm)
        return joined if joins is None else ops.add(joined, joins)

    def own_input(self, ops: Ops[T], x: T, inputs: LayerInputs[T], index: int, own: PerLayerWeights) -> T:
        """The layer's own input [T, D], from its part of the table and the embedding, gated by x."""
        count = self.spec.num_layers
        projected = ops.scale(ops.linear(inputs.embedding, own.model), self.spec.hidden_size**-0.5)
        looked_up = ops.combine(inputs.table, np.eye(1, count, index, dtype=np.float32))
        given = ops.scale(ops.add(ops.norm(projected, own.norm), looked_up), 2**-0.5)
        gated = ops.multiply(ops.linear(x, own.gate, activation=self.spec.activation), given)
        return ops.norm(ops.linear(gated, own.out), own.post_norm)

    def _laurel(self, ops: Ops[T], x: T, weights: LaurelWeights) -> T:
        return ops.add(x, ops.norm(ops.linear(ops.linear(x, weights.left), weights.right), weights.norm))

    def _join(
        self,
        ops: Ops[T],
        x: T,
        inner: T,
        output: Output | None,
        norm: Norm | None,
        divided: bool = True,
    ) -> T:
        """x + norm(output(inner)), or norm(x + output(inner)), with the spec's multiplier. Without output: inner."""
        multiplier, of_sum = self.spec.residual_multiplier, self.spec.placement == "sum"
        if output is not None and multiplier == 1.0 and (norm is None or of_sum):
            y = self._output(ops, inner, output, x, divided)
        else:
            y = inner if output is None else self._output(ops, inner, output, None, divided)
            if norm is not None and not of_sum:
                y = ops.norm(y, norm)
            y = ops.add(x, y, multiplier)
        return ops.norm(y, norm) if norm is not None and of_sum else y

    def _sums_once(self, layer: LayerWeights) -> bool:
        """Whether attention and MLP read the same input, so that ranks may add both parts of both in one sum."""
        norms = layer.attention_post_norm, layer.mlp_post_norm
        plain = layer.attention is not None and layer.mlp is not None and layer.moe is None
        plain = plain and self.spec.residual_multiplier == 1.0 and norms == (None, None)
        return plain and self.spec.parallel and self._divides_attention and not self._gathers

    def _output(
        self,
        ops: Ops[T],
        inner: T,
        output: Output,
        residual: T | None = None,
        divided: bool = True,
    ) -> T:
        """residual + output(inner), from what the ranks have of it; not `divided`: all of it."""
        if not divided or self.shard.whole:
            return ops.linear(inner, *output, residual=residual)
        if not self._gathers:
            return self._sum(ops, ops.linear(inner, *output, residual=residual if self.shard.first else None))
        y = self._gather(ops, ops.linear(inner, *output), self.shard.widths(self.spec.hidden_size))
        return y if residual is None else ops.add(residual, y)

    def _gather(self, ops: Ops[T], part: T, widths: Sequence[int]) -> T:
        """The columns of all ranks."""
        return part if self.shard.whole else ops.all_gather(part, widths, self.shard.peers)

    def _sum(self, ops: Ops[T], part: T) -> T:
        """The sum of the parts that the ranks computed."""
        return part if self.shard.whole else ops.all_reduce(part, self.shard.peers)

    def _attend(
        self,
        ops: Ops[T],
        x: T,
        angles: dict[RopeSpec, T],
        index: int,
        cached: int,
        weights: AttentionWeights,
    ) -> T:
        """Store keys and values of x in the cache; return each head's weighted values: [T, N H]."""
        spec, rope, (heads, _) = self.spec, self.spec.rope_of(index), self.shard.heads(self.spec, index)
        num_heads = len(heads)
        source = spec.kv_source(index)
        cached -= index - source
        attention = Attention(
            scale=spec.attention_scale,
            window=spec.windows[index],
            chunk=None if spec.chunks is None else spec.chunks[index],
            ahead=(spec.windows[index] or spec.max_position) - 1 if spec.bidirectional else 0,
            cap=spec.attention_cap,
            slopes=None if self._slopes is None else self._slopes[heads.start : heads.stop],
            sinks=weights.sinks,
            bias=weights.position_bias,
        )
        if weights.latent is not None and spec.latent is not None and rope is not None:
            y = self._attend_latent(ops, x, angles[rope], cached, num_heads, attention, weights.latent)
            return self._all_heads(ops, y, index, spec.latent.value_dim)
        assert weights.qkv is not None
        qkv = ops.linear(x, weights.qkv, weights.qkv_bias)
        if spec.clip_qkv is not None:
            qkv = ops.elementwise(qkv, Clamp(spec.clip_qkv))
        turn = None if rope is None else angles[rope]
        if source == index:
            norms = weights.q_norm, weights.k_norm, weights.v_norm
            q = ops.store_kv(qkv, cached, num_heads, turn, *norms)
        else:
            q = ops.queries(qkv, num_heads, turn, weights.q_norm)
        temperature = None if spec.temperatures is None else spec.temperatures[index]
        if temperature is not None:
            q = ops.elementwise(q, temperature)
        scores = (
            None if weights.relative is None else self._relative(ops, q, qkv, num_heads, weights.relative)
        )
        y = ops.attention(q, cached, num_heads, attention, scores)
        if spec.value_scale != 1.0:
            y = ops.scale(y, spec.value_scale)
        if weights.gate is not None:
            y = ops.multiply(y, ops.linear(x, weights.gate, activation=spec.gate_activation))
        y = self._all_heads(ops, y, index, spec.shape(index).head_dim)
        return y if weights.out_norm is None else ops.norm(y, weights.out_norm)

    def _all_heads(self, ops: Ops[T], y: T, index: int, width: int) -> T:
        """The heads of all ranks, if they gather them."""
        if not (self._gathers and self._divides_attention):
            return y
        return self._gather(ops, y, [heads * width for heads in self.shard.spread(self.spec, index)])

    def _relative(self, ops: Ops[T], q: T, qkv: T, num_heads: int, weights: RelativeWeights) -> T:
        """What distances add to scores."""
        assert self._places is not None
        by_query = None if weights.keys is None else ops.head_linear(q, weights.keys)
        by_key = None
        if weights.queries is not None:
            by_key = ops.head_linear(ops.combine(qkv, np.eye(1, 3, 1, dtype=np.float32)), weights.queries)
        return ops.relative_scores(by_query, by_key, num_heads, self._places, self.spec.attention_scale)

    def _attend_latent(
        self,
        ops: Ops[T],
        x: T,
        angles: T,
        cached: int,
        num_heads: int,
        attention: Attention,
        weights: LatentWeights,
    ) -> T:
        """Project queries into the latent space, so that scores and sums use the compressed cache."""
        q = x
        if weights.q_down is not None and weights.q_norm is not None:
            q = ops.norm(ops.linear(x, weights.q_down, weights.q_down_bias), weights.q_norm)
        latent = ops.head_linear(ops.linear(q, weights.q_nope), weights.keys)
        rotated = ops.linear(q, weights.q_rope)
        kv = ops.linear(x, weights.kv_down, weights.kv_down_bias)
        queries = ops.store_latent(kv, latent, rotated, cached, angles, weights.kv_norm)
        heads = ops.attention(queries, cached, num_heads, attention)
        return ops.head_linear(heads, weights.values)

    def _mlp(self, ops: Ops[T], x: T, index: int, weights: MLPWeights) -> tuple[T, Output]:
        """The inner activations, and the final projection of the MLP with its bias."""
        activation, cutoff = self.spec.activation, self.spec.gate_cutoff(index)
        if weights.gate is not None and cutoff is not None:
            widths = self.shard.widths(weights.down.shape[1])
            gate, up = (self._gather(ops, ops.linear(x, w), widths) for w in (weights.gate, weights.up))
            inner = ops.multiply(ops.elementwise(gate, SparseGELU(cutoff)), up)
        elif self.spec.gated:
            inner = ops.gated_linear(x, weights.up, activation, weights.up_bias, self.spec.gate_limit(index))
        elif weights.xielu is not None:
            inner = ops.elementwise(ops.linear(x, weights.up, weights.up_bias), weights.xielu)
        else:
            inner = ops.linear(x, weights.up, weights.up_bias, activation)
        if self._gathers and weights.gate is None:
            inner = self._gather(ops, inner, self.shard.widths(weights.down.shape[1]))
        if weights.down_norm is not None:
            inner = ops.norm(inner, weights.down_norm)
        return inner, (weights.down, weights.down_bias)

    def _route(self, ops: Ops[T], x: T, moe: MoESpec, weights: MoEWeights) -> T:
        beside = weights.beside
        seen = x if beside is None else ops.norm(x, beside.router_norm)
        scores = ops.linear(seen, weights.router, weights.router_bias)
        if moe.score_cap is not None:
            scores = ops.scale(scores, 1.0, moe.score_cap)
        routes = ops.route(
            scores, moe.routing, weights.correction, None if beside is None else beside.expert_scales
        )
        x = x if beside is None else ops.norm(x, beside.norm)
        y = ops.experts(x, routes, weights.experts, self.spec.activation, moe.routing.weigh_inputs)
        kind = self.shard.mixture(self.spec)
        if kind == "rows":
            y = self._gather(ops, y, self.shard.widths(self.spec.hidden_size))
        elif kind != "copy":
            y = self._sum(ops, y)
        if moe.scale != 1.0:
            y = ops.scale(y, moe.scale)
        return y if weights.norm is None else ops.norm(y, weights.norm)


class Decoder:
    """Embedding, layers of attention and MLP around a residual stream, final norm, head. The plain case of a layer:

    x -> norm -> qkv -> rope, store -> paged attention -> out -> + x
    x -> norm -> gate, up -> activation(gate) * up -> down -> + x
    """

    def __init__(self, spec: ArchSpec, weights: DecoderWeights, shard: Shard = WHOLE) -> None:
        self.spec, self.weights, self.shard = spec, weights, shard
        self.layers = Layers(spec, shard)
        self._altup = None if spec.altup is None else AltUp(spec.altup, spec.hidden_size)

    def graph(self, layers: range | None = None, taps: Sequence[int] = (), headless: bool = False) -> Graph:
        """The model, or the stage of it that computes `layers` and keeps the output of the layers `taps`.

        Only layers of the stage are tapped. With `headless` the last stage, too, gives the output of its last layer
        for all tokens. ModelError if `layers` or `taps` are not layers of the model.
        """
        count, spec, head = self.spec.num_layers, self.spec, self.weights.head
        layers = self.shard.layers(spec) if layers is None else layers
        if not layers or layers.step != 1 or layers.start < 0 or layers.stop > count:
            raise ModelError(f"a stage must be a run of the model's {count} layers, got {layers}")
        if not all(0 <= tap < count for tap in taps):
            raise ModelError(f"only layers 0 to {count - 1} can be tapped, got {list(taps)}")
        own = tuple(sorted({tap for tap in taps if tap in layers}))
        for place in (layers.start, layers.stop):
            if 0 < place < count and not spec.parts_before(place):
                raise ModelError(
                    f"the model cannot be parted before layer {place}: later layers read earlier ones"
                )
        ends = layers.stop == count and not headless
        hidden = partial(self._hidden, layers=layers, taps=own, ends=ends)
        if not ends:
            return Graph(hidden, None, spec.vocab_size, spec.stream_width, layers, own)
        if head is None:
            return Graph(hidden, self.head, spec.hidden_size, spec.hidden_size, layers, own)
        return Graph(hidden, self.head, spec.vocab_size, head.shape[1], layers, own)

    def _hidden(self, ops: Ops[T], layers: range, taps: tuple[int, ...], ends: bool) -> T:
        """The step's tokens, or the previous stage's output -> final hidden states of the logit rows: [L, D].

        For a stage that does not end the model: the hidden states of all tokens [T, D].
        """
        weights = self.weights
        x = ops.receive(self.spec.stream_width) if layers.start else self._embed(ops)
        ropes = {self.spec.rope_of(i): None for i in layers}
        angles = {rope: ops.rope_angles(make_rope(rope)) for rope in ropes if rope is not None}
        inputs = self._layer_inputs(ops, None if layers.start else x)
        carried: list[T] = []
        altup = self._altup
        if altup is not None and weights.spread is not None and not layers.start:
            x = altup.spread(ops, x, weights.spread)
        for index in layers:
            layer = weights.layers[index]
            own = None
            if layer.per_layer is not None and inputs is not None:
                own = partial(self.layers.own_input, ops, inputs=inputs, index=index, own=layer.per_layer)
            if altup is not None and layer.altup is not None:
                x = altup.predict(ops, x, layer.altup)
                y = altup.active(ops, x)
                y = self.layers.layer(ops, y, angles, index, index - layers.start, layer, carried)
                x = altup.correct(ops, x, y, layer.altup, own)
            else:
                x = self.layers.layer(ops, x, angles, index, index - layers.start, layer, carried)
                x = x if own is None else ops.add(x, own(x))
            if layer.scale is not None:
                x = ops.scale(x, float(layer.scale[0]))
            if index in taps:
                ops.tap(x if altup is None else altup.active(ops, x))
        if not ends:
            return x
        x = ops.select_rows(x)
        if altup is not None and weights.merge is not None:
            x = altup.merge(ops, x, weights.merge)
        if weights.norm is not None:
            x = ops.norm(x, weights.norm)
        return x if weights.project_out is None else ops.linear(x, weights.project_out)

    def _layer_inputs(self, ops: Ops[T], embedding: T | None) -> LayerInputs[T] | None:
        """None in a model without them. A stage that does not begin the model embeds the tokens again."""
        table, own = self.weights.layer_inputs, self.spec.per_layer
        if table is None or own is None:
            return None
        embedding = self._embed(ops) if embedding is None else embedding
        return LayerInputs(embedding, ops.embed(table, own.size**0.5))

    def head(self, ops: Ops[T], hidden: T) -> T:
        """[L, D] -> logits [L, V]."""
        spec = self.spec
        if self.weights.head is None:
            return ops.scale(hidden, 1.0)
        logits = ops.linear(hidden, self.weights.head, self.weights.head_bias)
        if not self.shard.whole:
            logits = ops.all_gather(logits, self.shard.widths(spec.vocab_size), self.shard.peers)
        if spec.logit_scale == 1.0 and spec.logit_cap is None:
            return logits
        return ops.scale(logits, spec.logit_scale, spec.logit_cap)

    def _embed(self, ops: Ops[T]) -> T:
        weights = self.weights
        x = ops.embed(weights.table, self.spec.embedding_scale)
        if weights.project_in is not None:
            x = ops.linear(x, weights.project_in)
        if weights.positions is not None:
            x = ops.add(x, ops.embed_positions(weights.positions, self.spec.position_offset or 0))
        return x if weights.embedding_norm is None else ops.norm(x, weights.embedding_norm)
