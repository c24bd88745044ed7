"""The one decoder, which records operations. Knows ArchSpec and packed weights; no family, file or sequence."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import msgspec
import numpy as np

from quire.devices.graph import Graph, Recorder, record
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
    Multiply,
    Normalize,
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
    Value,
)
from quire.devices.protocol import (
    Attention,
    Clamp,
    FloatArray,
    IntArray,
    Matrix,
    Norm,
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

Output = tuple[Matrix, FloatArray | None]
"""A projection that ends attention or MLP, and its bias."""


class LayerInputs(msgspec.Struct, frozen=True):
    """What the inputs of all layers are made of: the embedding [T, D] and rows of the table [T, layers P]."""

    embedding: Value
    table: Value


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
        g: Recorder,
        x: Value,
        angles: dict[RopeSpec, Value],
        index: int,
        cached: int,
        layer: LayerWeights,
        carried: list[Value] | None = None,
    ) -> Value:
        """Layer `index` of the model, which is layer `cached` of the KV cache.

        `carried` holds what joins after the next layer (MoESpec.shortcut).
        """
        normed = x if layer.attention_norm is None else g(Normalize(x, layer.attention_norm))
        attention, after, pending = layer.attention, x, self._sums_once(layer)
        if attention is not None:
            heads = self._attend(g, normed, angles, index, cached, attention)
            output = attention.out, attention.out_bias
            if pending:
                after = g(Linear(heads, *output, residual=x if self.shard.first else None))
            else:
                divided = self._divides_attention
                after = self._join(g, x, heads, output, layer.attention_post_norm, divided)
        if layer.laurel is not None:
            after = g(Scale(g(Add(after, self._laurel(g, normed, layer.laurel))), 2**-0.5))
        source = x if self.spec.parallel else after
        if layer.mlp_norm is not None:
            normed = g(Normalize(source, layer.mlp_norm))
        elif not self.spec.parallel:
            normed = source
        down: Output | None = None
        joins = carried.pop() if carried else None
        if layer.moe is not None and self.spec.moe is not None and self.spec.moe.shortcut:
            assert layer.mlp is not None
            assert carried is not None
            carried.append(self._route(g, normed, self.spec.moe, layer.moe))
            inner, down = self._mlp(g, normed, index, layer.mlp)
        elif layer.moe is not None and self.spec.moe is not None:
            beside = layer.moe.beside
            if beside is not None and layer.mlp is not None:
                dense = self._output(g, *self._mlp(g, normed, index, layer.mlp))
                inner = self._route(g, source, self.spec.moe, layer.moe)
                inner = g(Add(g(Normalize(dense, beside.mlp_norm)), inner))
            else:
                inner = self._route(g, normed, self.spec.moe, layer.moe)
        elif layer.mlp is not None:
            inner, down = self._mlp(g, normed, index, layer.mlp)
            if pending:
                return self._sum(g, g(Linear(inner, *down, residual=after)))
        else:
            return after
        joined = self._join(g, after, inner, down, layer.mlp_post_norm)
        return joined if joins is None else g(Add(joined, joins))

    def own_input(
        self, g: Recorder, x: Value, inputs: LayerInputs, index: int, own: PerLayerWeights
    ) -> Value:
        """The layer's own input [T, D], from its part of the table and the embedding, gated by x."""
        count = self.spec.num_layers
        projected = g(Scale(g(Linear(inputs.embedding, own.model)), self.spec.hidden_size**-0.5))
        looked_up = g(Combine(inputs.table, np.eye(1, count, index, dtype=np.float32)))
        given = g(Scale(g(Add(g(Normalize(projected, own.norm)), looked_up)), 2**-0.5))
        gated = g(Multiply(g(Linear(x, own.gate, activation=self.spec.activation)), given))
        return g(Normalize(g(Linear(gated, own.out)), own.post_norm))

    def _laurel(self, g: Recorder, x: Value, weights: LaurelWeights) -> Value:
        return g(Add(x, g(Normalize(g(Linear(g(Linear(x, weights.left)), weights.right)), weights.norm))))

    def _join(
        self,
        g: Recorder,
        x: Value,
        inner: Value,
        output: Output | None,
        norm: Norm | None,
        divided: bool = True,
    ) -> Value:
        """x + norm(output(inner)), or norm(x + output(inner)), with the spec's multiplier. Without output: inner."""
        multiplier, of_sum = self.spec.residual_multiplier, self.spec.placement == "sum"
        if output is not None and multiplier == 1.0 and (norm is None or of_sum):
            y = self._output(g, inner, output, x, divided)
        else:
            y = inner if output is None else self._output(g, inner, output, None, divided)
            if norm is not None and not of_sum:
                y = g(Normalize(y, norm))
            y = g(Add(x, y, multiplier))
        return g(Normalize(y, norm)) if norm is not None and of_sum else y

    def _sums_once(self, layer: LayerWeights) -> bool:
        """Whether attention and MLP read the same input, so that ranks may add both parts of both in one sum."""
        norms = layer.attention_post_norm, layer.mlp_post_norm
        plain = layer.attention is not None and layer.mlp is not None and layer.moe is None
        plain = plain and self.spec.residual_multiplier == 1.0 and norms == (None, None)
        return plain and self.spec.parallel and self._divides_attention and not self._gathers

    def _output(
        self,
        g: Recorder,
        inner: Value,
        output: Output,
        residual: Value | None = None,
        divided: bool = True,
    ) -> Value:
        """residual + output(inner), from what the ranks have of it; not `divided`: all of it."""
        if not divided or self.shard.whole:
            return g(Linear(inner, *output, residual=residual))
        if not self._gathers:
            return self._sum(g, g(Linear(inner, *output, residual=residual if self.shard.first else None)))
        y = self._gather(g, g(Linear(inner, *output)), self.shard.widths(self.spec.hidden_size))
        return y if residual is None else g(Add(residual, y))

    def _gather(self, g: Recorder, part: Value, widths: Sequence[int]) -> Value:
        """The columns of all ranks."""
        return part if self.shard.whole else g(AllGather(part, widths, self.shard.peers))

    def _sum(self, g: Recorder, part: Value) -> Value:
        """The sum of the parts that the ranks computed."""
        return part if self.shard.whole else g(AllReduce(part, self.shard.peers))

    def _attend(
        self,
        g: Recorder,
        x: Value,
        angles: dict[RopeSpec, Value],
        index: int,
        cached: int,
        weights: AttentionWeights,
    ) -> Value:
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
            y = self._attend_latent(g, x, angles[rope], cached, num_heads, attention, weights.latent)
            return self._all_heads(g, y, index, spec.latent.value_dim)
        assert weights.qkv is not None
        qkv = g(Linear(x, weights.qkv, weights.qkv_bias))
        if spec.clip_qkv is not None:
            qkv = g(Apply(qkv, Clamp(spec.clip_qkv)))
        turn = None if rope is None else angles[rope]
        if source == index:
            norms = weights.q_norm, weights.k_norm, weights.v_norm
            q = g(StoreKV(qkv, cached, num_heads, turn, *norms))
        else:
            q = g(PrepareQueries(qkv, num_heads, turn, weights.q_norm))
        temperature = None if spec.temperatures is None else spec.temperatures[index]
        if temperature is not None:
            q = g(Apply(q, temperature))
        scores = None if weights.relative is None else self._relative(g, q, qkv, num_heads, weights.relative)
        y = g(Attend(q, cached, num_heads, attention, scores))
        if spec.value_scale != 1.0:
            y = g(Scale(y, spec.value_scale))
        if weights.gate is not None:
            y = g(Multiply(y, g(Linear(x, weights.gate, activation=spec.gate_activation))))
        y = self._all_heads(g, y, index, spec.shape(index).head_dim)
        return y if weights.out_norm is None else g(Normalize(y, weights.out_norm))

    def _all_heads(self, g: Recorder, y: Value, index: int, width: int) -> Value:
        """The heads of all ranks, if they gather them."""
        if not (self._gathers and self._divides_attention):
            return y
        return self._gather(g, y, [heads * width for heads in self.shard.spread(self.spec, index)])

    def _relative(self, g: Recorder, q: Value, qkv: Value, num_heads: int, weights: RelativeWeights) -> Value:
        """What distances add to scores."""
        assert self._places is not None
        by_query = None if weights.keys is None else g(HeadLinear(q, weights.keys))
        by_key = None
        if weights.queries is not None:
            by_key = g(HeadLinear(g(Combine(qkv, np.eye(1, 3, 1, dtype=np.float32))), weights.queries))
        return g(RelativeScores(by_query, by_key, num_heads, self._places, self.spec.attention_scale))

    def _attend_latent(
        self,
        g: Recorder,
        x: Value,
        angles: Value,
        cached: int,
        num_heads: int,
        attention: Attention,
        weights: LatentWeights,
    ) -> Value:
        """Project queries into the latent space, so that scores and sums use the compressed cache."""
        q = x
        if weights.q_down is not None and weights.q_norm is not None:
            q = g(Normalize(g(Linear(x, weights.q_down, weights.q_down_bias)), weights.q_norm))
        latent = g(HeadLinear(g(Linear(q, weights.q_nope)), weights.keys))
        rotated = g(Linear(q, weights.q_rope))
        kv = g(Linear(x, weights.kv_down, weights.kv_down_bias))
        queries = g(StoreLatent(kv, latent, rotated, cached, angles, weights.kv_norm))
        heads = g(Attend(queries, cached, num_heads, attention))
        return g(HeadLinear(heads, weights.values))

    def _mlp(self, g: Recorder, x: Value, index: int, weights: MLPWeights) -> tuple[Value, Output]:
        """The inner activations, and the final projection of the MLP with its bias."""
        activation, cutoff = self.spec.activation, self.spec.gate_cutoff(index)
        if weights.gate is not None and cutoff is not None:
            widths = self.shard.widths(weights.down.shape[1])
            gate, up = (self._gather(g, g(Linear(x, w)), widths) for w in (weights.gate, weights.up))
            inner = g(Multiply(g(Apply(gate, SparseGELU(cutoff))), up))
        elif self.spec.gated:
            inner = g(GatedLinear(x, weights.up, activation, weights.up_bias, self.spec.gate_limit(index)))
        elif weights.xielu is not None:
            inner = g(Apply(g(Linear(x, weights.up, weights.up_bias)), weights.xielu))
        else:
            inner = g(Linear(x, weights.up, weights.up_bias, activation))
        if self._gathers and weights.gate is None:
            inner = self._gather(g, inner, self.shard.widths(weights.down.shape[1]))
        if weights.down_norm is not None:
            inner = g(Normalize(inner, weights.down_norm))
        return inner, (weights.down, weights.down_bias)

    def _route(self, g: Recorder, x: Value, moe: MoESpec, weights: MoEWeights) -> Value:
        beside = weights.beside
        seen = x if beside is None else g(Normalize(x, beside.router_norm))
        scores = g(Linear(seen, weights.router, weights.router_bias))
        if moe.score_cap is not None:
            scores = g(Scale(scores, 1.0, moe.score_cap))
        routes = g(
            Route(scores, moe.routing, weights.correction, None if beside is None else beside.expert_scales)
        )
        x = x if beside is None else g(Normalize(x, beside.norm))
        y = g(RunExperts(x, routes, weights.experts, self.spec.activation, moe.routing.weigh_inputs))
        kind = self.shard.mixture(self.spec)
        if kind == "rows":
            y = self._gather(g, y, self.shard.widths(self.spec.hidden_size))
        elif kind != "copy":
            y = self._sum(g, y)
        if moe.scale != 1.0:
            y = g(Scale(y, moe.scale))
        return y if weights.norm is None else g(Normalize(y, weights.norm))


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
            return record(hidden, None, spec.vocab_size, spec.stream_width, layers, own)
        if head is None:
            return record(hidden, self.head, spec.hidden_size, spec.hidden_size, layers, own)
        return record(hidden, self.head, spec.vocab_size, head.shape[1], layers, own)

    def _hidden(self, g: Recorder, layers: range, taps: tuple[int, ...], ends: bool) -> Value:
        """The step's tokens, or the previous stage's output -> final hidden states of the logit rows: [L, D].

        For a stage that does not end the model: the hidden states of all tokens [T, D].
        """
        weights = self.weights
        x = g(Receive(self.spec.stream_width)) if layers.start else self._embed(g)
        ropes = {self.spec.rope_of(i): None for i in layers}
        angles = {rope: g(RopeAngles(make_rope(rope))) for rope in ropes if rope is not None}
        inputs = self._layer_inputs(g, None if layers.start else x)
        carried: list[Value] = []
        altup = self._altup
        if altup is not None and weights.spread is not None and not layers.start:
            x = altup.spread(g, x, weights.spread)
        for index in layers:
            layer = weights.layers[index]
            own = None
            if layer.per_layer is not None and inputs is not None:
                own = partial(self.layers.own_input, g, inputs=inputs, index=index, own=layer.per_layer)
            if altup is not None and layer.altup is not None:
                x = altup.predict(g, x, layer.altup)
                y = altup.active(g, x)
                y = self.layers.layer(g, y, angles, index, index - layers.start, layer, carried)
                x = altup.correct(g, x, y, layer.altup, own)
            else:
                x = self.layers.layer(g, x, angles, index, index - layers.start, layer, carried)
                x = x if own is None else g(Add(x, own(x)))
            if layer.scale is not None:
                x = g(Scale(x, float(layer.scale[0])))
            if index in taps:
                g(Tap(x if altup is None else altup.active(g, x)))
        if not ends:
            return x
        x = g(SelectRows(x))
        if altup is not None and weights.merge is not None:
            x = altup.merge(g, x, weights.merge)
        if weights.norm is not None:
            x = g(Normalize(x, weights.norm))
        return x if weights.project_out is None else g(Linear(x, weights.project_out))

    def _layer_inputs(self, g: Recorder, embedding: Value | None) -> LayerInputs | None:
        """None in a model without them. A stage that does not begin the model embeds the tokens again."""
        table, own = self.weights.layer_inputs, self.spec.per_layer
        if table is None or own is None:
            return None
        embedding = self._embed(g) if embedding is None else embedding
        return LayerInputs(embedding, g(Embed(table, own.size**0.5)))

    def head(self, g: Recorder, hidden: Value) -> Value:
        """[L, D] -> logits [L, V]."""
        spec = self.spec
        if self.weights.head is None:
            return g(Scale(hidden, 1.0))
        logits = g(Linear(hidden, self.weights.head, self.weights.head_bias))
        if not self.shard.whole:
            logits = g(AllGather(logits, self.shard.widths(spec.vocab_size), self.shard.peers))
        if spec.logit_scale == 1.0 and spec.logit_cap is None:
            return logits
        return g(Scale(logits, spec.logit_scale, spec.logit_cap))

    def _embed(self, g: Recorder) -> Value:
        weights = self.weights
        x = g(Embed(weights.table, self.spec.embedding_scale))
        if weights.project_in is not None:
            x = g(Linear(x, weights.project_in))
        if weights.positions is not None:
            x = g(Add(x, g(EmbedPositions(weights.positions, self.spec.position_offset or 0))))
        return x if weights.embedding_norm is None else g(Normalize(x, weights.embedding_norm))
