"""Several residual streams: how each block reads them, and how its result joins them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Protocol

import msgspec
import numpy as np

from quire.devices.graph import Recorder
from quire.devices.ops import Apply, Multiply, Normalize, Scale, Value
from quire.devices.stream_ops import Combine, Mix, StreamGates
from quire.errors import ModelError
from quire.model.parts.layer import Layer, LayerConfig
from quire.model.parts.linear import Linear
from quire.model.parts.norm import Norm, NormConfig, plain_norm
from quire.model.parts.part import ModelAdditions, Streams
from quire.model.parts.source import Recording, WeightSource, read_vector
from quire.model.shard import Shard

if TYPE_CHECKING:
    from quire.model.parts.decoder import DecoderConfig


class StreamMixing(Streams):
    """Attention and MLP, one after the other, each read all streams by weights of their own, and join them so."""

    __slots__ = ()

    @property
    def layer(self) -> type[Layer]:
        return StreamLayer

    def check_layer(self, layer: LayerConfig, where: str) -> None:
        plain = layer.second is None and not layer.carries and layer.multiplier == 1.0
        if not plain or layer.placement not in ("pre", "sandwich", "none"):
            raise ModelError(
                f"{where}: several streams need blocks one after the other, with norms before them"
            )

    def make(self, source: WeightSource, path: str, size: int) -> StreamMixingPart:
        """Read the part at `path`; a stream has `size` elements."""
        raise NotImplementedError


class StreamMixingPart(Protocol):
    def read(self, g: Recorder, x: Value) -> tuple[Value, Callable[[Value], Value]]:
        """What a block reads of all streams, and a function that gives the streams after the block's result."""


class StreamLayer(Layer):
    """x -> read -> norm -> attention -> join; x -> read -> norm -> mlp -> join."""

    def __init__(
        self, config: LayerConfig, source: WeightSource, path: str, place: tuple[int, int], shard: Shard
    ) -> None:
        super().__init__(config, source, path, place, shard)
        assert isinstance(config.streams, StreamMixing)
        self._streams: dict[str, StreamMixingPart] = {}
        for name, part in (("attention", config.mixer), ("mlp", config.mlp)):
            if part is not None:
                self._streams[name] = config.streams.make(
                    source, f"{path}.{name}_streams", config.hidden_size
                )

    def _compute(self, r: Recording, x: Value) -> Value:
        if self.mixer is not None:
            own, join = self._streams["attention"].read(r.g, x)
            heads = self.mixer(r, _normed(r.g, self.attention_norm, own))
            x = join(_normed(r.g, self._attention_post_norm, self.mixer.out(r.g, heads)))
        if self._mlp is not None:
            own, join = self._streams["mlp"].read(r.g, x)
            inner, out = self._mlp.compute(r, _normed(r.g, self._mlp_norm, own), own)
            x = join(_normed(r.g, self._mlp_post_norm, inner if out is None else out(r.g, inner)))
        return x


def _normed(g: Recorder, norm: Norm | None, x: Value) -> Value:
    return x if norm is None else norm(g, x)


class HyperConfig(StreamMixing, msgspec.Struct, frozen=True, tag="hyper"):
    """Hyper-connections (Zhu et al. 2024, arXiv:2409.19606) whose weights all streams give together.

    With `iterations` streams also mix with each other, by a matrix that these make doubly stochastic (mHC,
    arXiv:2512.24880); without them each stays itself. `eps`, `magnitude` and `floor` are those of StreamGates. At the
    end of a model nothing joins (`joins`).
    """

    streams: int
    norm: NormConfig
    eps: float
    iterations: int = 0
    magnitude: float = 2.0
    floor: float = 0.0
    joins: bool = True

    def make(self, source: WeightSource, path: str, size: int) -> Hyper:
        return Hyper(self, source, path, size)


class Hyper:
    """The weights of S streams, which are one tensor [rows, S D], by one product with all of them, normed together."""

    def __init__(self, config: HyperConfig, source: WeightSource, path: str, d: int) -> None:
        n = self._streams = config.streams
        kinds = [n, *([n] if config.joins else []), *([n * n] if config.iterations else [])]
        self._parts = sum(kinds) // n
        self._norm = plain_norm(config.norm, n * d)
        self._gates = Linear.plain(source, f"{path}.gates", sum(kinds), n * d, "exact")
        scales = np.repeat(read_vector(source, f"{path}.scales", len(kinds)), kinds)
        biases = read_vector(source, f"{path}.biases", sum(kinds))
        about = n, config.iterations, config.eps, config.magnitude, config.floor
        self._function = StreamGates(*about, tuple(scales.tolist()), tuple(biases.tolist()))

    def read(self, g: Recorder, x: Value) -> tuple[Value, Callable[[Value], Value]]:
        n = self._streams
        gates = g(Apply(self._gates(g, g(Normalize(x, self._norm))), self._function))
        return g(Mix(x, self._pick(g, gates, 1, 0), n)), partial(self._join, g, x, gates)

    def _join(self, g: Recorder, x: Value, gates: Value, y: Value) -> Value:
        n = self._streams
        kept = g(Mix(x, self._pick(g, gates, n, 2), n)) if self._parts > 2 else x
        return g(Mix(y, self._pick(g, gates, 1, 1), 1, kept))

    def _pick(self, g: Recorder, gates: Value, count: int, first: int) -> Value:
        """Take `count` parts of all gates."""
        return gates if self._parts == 1 else g(Combine(gates, np.eye(count, self._parts, first, np.float32)))


class GatedStreamsConfig(StreamMixing, msgspec.Struct, frozen=True, tag="gated_streams"):
    """Streams are normed one by one; a block reads their mean, each element times a gate of the low `rank`.

    The block's result joins each stream times a gate of its own, from 0 to 2 (Qwen4). At the end of a model nothing
    joins (`joins`).
    """

    streams: int
    norm: NormConfig
    rank: int
    joins: bool = True

    def make(self, source: WeightSource, path: str, size: int) -> GatedStreams:
        return GatedStreams(self, source, path, size)


class GatedStreams:
    """Gates of S streams, which are one tensor [rows, S D], by products with all of them, normed and divided by S."""

    def __init__(self, config: GatedStreamsConfig, source: WeightSource, path: str, d: int) -> None:
        n = self._streams = config.streams
        self._norm = Norm(config.norm, source, f"{path}.norm", n * d, 1 / n).operand
        self._down = Linear.plain(source, f"{path}.down", config.rank, n * d)
        self._up = Linear.plain(source, f"{path}.up", n * d, config.rank)
        self._join = Linear.plain(source, f"{path}.join", n, n * d, "exact") if config.joins else None

    def read(self, g: Recorder, x: Value) -> tuple[Value, Callable[[Value], Value]]:
        n = self._streams
        normed = g(Normalize(x, self._norm, groups=n))
        gates = self._up(g, self._down(g, normed, "silu"), "sigmoid")
        own = g(Combine(g(Multiply(normed, gates)), np.ones((1, n), np.float32)))

        def join(y: Value) -> Value:
            assert self._join is not None
            return g(Mix(y, g(Scale(self._join(g, normed, "sigmoid"), 2.0)), 1, x))

        return own, join


class StreamEndsConfig(ModelAdditions, msgspec.Struct, frozen=True, tag="stream_ends"):
    """Each of the `streams` begins as the embedding. `mixing` reads them at the end; None: their mean is the end."""

    streams: int
    mixing: StreamMixing | None = None

    def make(self, source: WeightSource, model: DecoderConfig, shard: Shard) -> StreamEnds:
        return StreamEnds(self, source, model, shard)


class StreamEnds:
    """The ends of the streams."""

    def __init__(
        self, config: StreamEndsConfig, source: WeightSource, model: DecoderConfig, shard: Shard
    ) -> None:
        self._count = config.streams
        self._mixing: StreamMixingPart | None = None
        if config.mixing is not None and shard.ends:
            self._mixing = config.mixing.make(source, "streams", model.hidden_size)

    def begin(self, r: Recording, x: Value, embed: Callable[[Recorder], Value]) -> Value:
        return x if r.first else r.g(Combine(x, np.ones((self._count, 1), np.float32)))

    def active(self, g: Recorder, x: Value) -> Value:
        return g(Combine(x, np.full((1, self._count), 1 / self._count, np.float32)))

    def end(self, g: Recorder, x: Value) -> Value:
        return self.active(g, x) if self._mixing is None else self._mixing.read(g, x)[0]
