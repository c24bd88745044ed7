"""Gemma 3n's additions to a layer: inputs by layer, a low-rank residual, and several residual streams."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from quire.devices.graph import Recorder
from quire.devices.ops import Add, Apply, Embed, Multiply, Scale, Value
from quire.devices.ops import Linear as Product
from quire.devices.protocol import Activation, ColumnScale, FloatArray, Matrix
from quire.devices.stream_ops import Combine, MatchRMS, Mix
from quire.errors import ModelError
from quire.model.parts.linear import Linear
from quire.model.parts.norm import Norm, NormConfig
from quire.model.parts.part import LayerAdditions, ModelAdditions
from quire.model.parts.source import Piece, Recording, WeightSource, matrix_of, read_vector
from quire.model.shard import Shard

if TYPE_CHECKING:
    from quire.model.parts.decoder import DecoderConfig

FLOOR = 1e-5  # the least mean square that a stream is divided by


class LayerInputsConfig(msgspec.Struct, frozen=True):
    """Inputs by layer (Gemma 3n, arXiv:2507.06261): each layer adds what `size` elements of its own table gate."""

    size: int
    vocab_size: int


class LayerInput:
    """The input of layer `index` of `count`: P elements of the table and of a projection of the embedding."""

    def __init__(
        self,
        config: LayerInputsConfig,
        norm: NormConfig,
        activation: Activation,
        source: WeightSource,
        path: str,
        place: tuple[int, int],
        d: int,
    ) -> None:
        self._activation, self._d, (self._index, self._count) = activation, d, place
        self._model = Linear.plain(source, f"{path}.model", config.size, d)
        self._norm = Norm(norm, source, f"{path}.norm", config.size)
        self._gate = Linear.plain(source, f"{path}.gate", config.size, d)
        self._out = Linear.plain(source, f"{path}.out", d, config.size)
        self._post_norm = Norm(norm, source, f"{path}.post_norm", d)

    def __call__(self, r: Recording, x: Value) -> Value:
        """The layer's own input [T, D], from its part of the table and the embedding, gated by x."""
        g = r.g
        assert r.embedding is not None
        assert r.table is not None
        projected = g(Scale(self._model(g, r.embedding), self._d**-0.5))
        own = np.eye(1, self._count, self._index, dtype=np.float32)
        looked_up = g(Combine(r.table, own))
        given = g(Scale(g(Add(self._norm(g, projected), looked_up)), 2**-0.5))
        gated = g(Multiply(self._gate(g, x, self._activation), given))
        return self._post_norm(g, self._out(g, gated))


class LAuReL:
    """A residual of a low rank R (Menghani et al. 2024, arXiv:2411.07501): x + norm(right(left(x)))."""

    def __init__(self, rank: int, norm: NormConfig, source: WeightSource, path: str, d: int) -> None:
        self._left = Linear.plain(source, f"{path}.left", rank, d)
        self._right = Linear.plain(source, f"{path}.right", d, rank)
        self._norm = Norm(norm, source, f"{path}.norm", d)

    def __call__(self, g: Recorder, x: Value) -> Value:
        return g(Add(x, self._norm(g, self._right(g, self._left(g, x)))))


class AltUpConfig(msgspec.Struct, frozen=True):
    """Alternating updates (Baykal et al. 2023, arXiv:2301.13310) of several residual streams.

    A layer predicts all `streams`, computes the `active` one, and corrects all by the result. `scaled`: the active
    stream gates inputs by layer times a learned vector.
    """

    streams: int
    active: int
    scaled: bool


class AltUp:
    """The prediction and the correction of a layer; S streams are one tensor [rows, S D]."""

    def __init__(
        self, config: AltUpConfig, norm: NormConfig, source: WeightSource, path: str, d: int
    ) -> None:
        self._config, self._d, s = config, d, config.streams
        self._norm = Norm(norm, source, f"{path}.router_norm", d)
        self._router = Linear.plain(source, f"{path}.router", s, d, "exact")
        self._predict = Linear.plain(source, f"{path}.predict", s * s, s, "exact")
        self._correct = Linear.plain(source, f"{path}.correct", s, s, "exact")
        self._scale = read_vector(source, f"{path}.scale", d)

    def predict(self, g: Recorder, streams: Value) -> Value:
        """Each stream plus a mixture of all, by factors that the active one gives."""
        own = np.eye(self._config.streams, dtype=np.float32).reshape(-1)
        routed = self._route(g, self.active(g, streams))
        return g(
            Mix(
                streams,
                g(Product(routed, self._predict.weight, own, path=self._predict.path)),
                self._config.streams,
            )
        )

    def correct(
        self, g: Recorder, predicted: Value, computed: Value, own: Callable[[Value], Value] | None
    ) -> Value:
        """All streams, moved by what the layer's result `computed` [T, D] differs from its prediction.

        `own` gives the layer's own input for what gates it; it is added to all streams but the first.
        """
        config = self._config
        news = g(Add(computed, active_stream(config, g, predicted), -1.0))
        ones = np.ones(config.streams, np.float32)
        factors = g(Product(self._route(g, computed), self._correct.weight, ones, path=self._correct.path))
        streams = g(Mix(news, factors, 1, predicted))
        if own is None:
            return streams
        seen = active_stream(config, g, streams)
        if config.scaled:
            seen = g(Apply(seen, ColumnScale(tuple(self._scale.tolist()))))
        return g(Combine(own(seen), 1 - _pick(config.streams, 0).T, streams))

    def active(self, g: Recorder, streams: Value) -> Value:
        """The stream that the layer computes: [rows, D]."""
        return active_stream(self._config, g, streams)

    def _route(self, g: Recorder, x: Value) -> Value:
        """tanh of the router's scores: [rows, S]."""
        return g(Scale(self._router(g, self._norm(g, x)), 1 / self._d, 1.0))


class Streams:
    """How the embedding becomes several streams, and how these become the last hidden state.

    Of S streams, a projection [(S - 1) D, D] makes all but the first, at the beginning; S - 1 projections [D, D] end
    them. A pipeline stage has what it needs of both.
    """

    def __init__(self, config: AltUpConfig, source: WeightSource, d: int, begins: bool, ends: bool) -> None:
        self._config, others = config, range(config.streams - 1)
        self._spread = self._merge = None
        if begins:
            pieces = [matrix_of(f"spread.{s}", d, d) for s in others]
            self._spread = Linear(source, "spread", pieces)
        if ends:
            self._merge = [Linear.plain(source, f"merge.{s}", d, d) for s in others]

    def spread(self, g: Recorder, x: Value) -> Value:
        """The embedding [T, D] as the first stream; projections of it, of the same magnitude, as the others."""
        assert self._spread is not None
        count = self._config.streams
        others = g(MatchRMS(self._spread(g, x), x, FLOOR))
        first = g(Combine(x, _pick(count, 0).T))
        return g(Combine(others, np.eye(count, count - 1, -1, dtype=np.float32), first))

    def merge(self, g: Recorder, streams: Value) -> Value:
        """The mean of the first stream and of projections of the others, of its magnitude: [rows, D]."""
        assert self._merge is not None
        count = self._config.streams
        first, share = g(Combine(streams, _pick(count, 0))), 1 / count
        mean = g(Scale(first, share))
        for s, projection in enumerate(self._merge, 1):
            other = projection(g, g(Combine(streams, _pick(count, s))))
            mean = g(Add(mean, g(MatchRMS(other, first, FLOOR)), share))
        return mean


class LayerExtrasConfig(LayerAdditions, msgspec.Struct, frozen=True, tag="gemma3n"):
    """`laurel`: the rank of a residual beside attention. `activation` is that of the gate of the layer's input."""

    norm: NormConfig
    activation: Activation
    laurel: int | None = None
    inputs: LayerInputsConfig | None = None
    altup: AltUpConfig | None = None

    def check(self, index: int, where: str) -> None:
        if self.altup is not None and self.altup.active >= self.altup.streams:
            raise ModelError(f"{where}: stream {self.altup.active} of {self.altup.streams} cannot be active")

    def make(
        self, source: WeightSource, path: str, place: tuple[int, int], size: int, states: int
    ) -> LayerExtras:
        return LayerExtras(self, source, path, place, size)


class LayerExtras:
    """The additions of a layer: its input, LAuReL and AltUp, as far as it has them."""

    def __init__(
        self, config: LayerExtrasConfig, source: WeightSource, path: str, place: tuple[int, int], d: int
    ) -> None:
        self._input = self._laurel = self._altup = None
        if config.inputs is not None:
            about = config.inputs, config.norm, config.activation
            self._input = LayerInput(*about, source, f"{path}.input", place, d)
        if config.laurel is not None:
            self._laurel = LAuReL(config.laurel, config.norm, source, f"{path}.laurel", d)
        if config.altup is not None:
            self._altup = AltUp(config.altup, config.norm, source, f"{path}.altup", d)

    def around(self, r: Recording, x: Value, compute: Callable[[Recording, Value], Value]) -> Value:
        g, own = r.g, None if self._input is None else partial(self._input, r)
        if self._altup is not None:
            x = self._altup.predict(g, x)
            return self._altup.correct(g, x, compute(r, self._altup.active(g, x)), own)
        x = compute(r, x)
        return x if own is None else g(Add(x, own(x)))

    def beside(self, g: Recorder, after: Value, normed: Value) -> Value:
        return after if self._laurel is None else g(Scale(g(Add(after, self._laurel(g, normed))), 2**-0.5))


class ModelExtrasConfig(ModelAdditions, msgspec.Struct, frozen=True, tag="streams"):
    """`inputs` and `altup` repeat what the layers have."""

    inputs: LayerInputsConfig | None = None
    altup: AltUpConfig | None = None

    @property
    def streams(self) -> int:
        return 1 if self.altup is None else self.altup.streams

    @property
    def reads_tokens(self) -> bool:
        return self.inputs is not None

    def make(self, source: WeightSource, model: DecoderConfig, shard: Shard) -> ModelExtras:
        return ModelExtras(self, source, model, shard)


class ModelExtras:
    """The ends of the streams, and the table of all layers' inputs."""

    def __init__(
        self, config: ModelExtrasConfig, source: WeightSource, model: DecoderConfig, shard: Shard
    ) -> None:
        self._config, self._streams = config, None
        if config.altup is not None:
            self._streams = Streams(config.altup, source, model.hidden_size, shard.begins, shard.ends)
        if config.inputs is not None:
            pieces = self._pieces(config.inputs, model.vocab_size, model.num_layers * config.inputs.size)
            self._table: Matrix = source.matrix("layer_inputs", pieces, "table")

    def begin(self, r: Recording, x: Value, embed: Callable[[Recorder], Value]) -> Value:
        if self._config.inputs is not None:
            r.embedding = embed(r.g) if r.first else x  # a later stage embeds the tokens again
            r.table = r.g(Embed(self._table, self._config.inputs.size**0.5))
        return x if self._streams is None or r.first else self._streams.spread(r.g, x)

    def active(self, g: Recorder, x: Value) -> Value:
        return x if self._config.altup is None else active_stream(self._config.altup, g, x)

    def end(self, g: Recorder, x: Value) -> Value:
        return x if self._streams is None else self._streams.merge(g, x)

    def _pieces(self, inputs: LayerInputsConfig, count: int, width: int) -> list[Piece]:
        """The table for a vocabulary of `count` tokens. Tokens beyond the stored ones have the first row."""
        rows = range(count) if inputs.vocab_size > count else None
        pieces = [matrix_of("layer_inputs", inputs.vocab_size, width, rows)]
        if inputs.vocab_size < count:
            pieces.append(matrix_of("layer_inputs.others", count - inputs.vocab_size, width))
        return pieces


def active_stream(config: AltUpConfig, g: Recorder, streams: Value) -> Value:
    """The stream that layers compute: [rows, D]."""
    return g(Combine(streams, _pick(config.streams, config.active)))


def _pick(streams: int, index: int) -> FloatArray:
    """Factors [1, S] that pick one stream."""
    return np.eye(1, streams, index, dtype=np.float32)
