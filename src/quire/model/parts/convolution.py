"""Short convolutions by channel: alone between two gates (LFM2, arXiv:2511.23404), and before recurrences."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from quire.devices.graph import Recorder
from quire.devices.ops import Multiply, Value
from quire.devices.protocol import Activation, FloatArray, KVLayer
from quire.devices.recurrent_ops import Convolve, convolution_state
from quire.model.parts.linear import Linear, Output, output_messages
from quire.model.parts.part import Mixer
from quire.model.parts.source import Piece, Recording, WeightSource, matrix_of
from quire.model.shard import Shard


class ConvolutionConfig(Mixer, msgspec.Struct, frozen=True, tag="convolution"):
    """The result is c times the convolution of b times x over `taps` tokens; b, c and x are products of the input."""

    hidden_size: int
    taps: int
    bias: bool = False

    def columns(self) -> list[int]:
        return [self.hidden_size]

    def cache(self, shard: Shard) -> KVLayer:
        return KVLayer(0, 1, states=(convolution_state(len(shard.columns(self.hidden_size)), self.taps),))

    def messages(self, shard: Shard) -> list[int]:
        return output_messages(shard, self.hidden_size, [len(shard.columns(self.hidden_size))])

    def make(self, source: WeightSource, path: str, index: int, shard: Shard) -> GatedConvolution:
        return GatedConvolution(self, source, f"{path}.convolution", index, shard)


class GatedConvolution:
    """c(x) * convolution(b(x) * x(x)); ranks have channels of it."""

    def __init__(
        self, config: ConvolutionConfig, source: WeightSource, path: str, index: int, shard: Shard
    ) -> None:
        self._index, self._shard, self.divided, d = index, shard, not shard.whole, config.hidden_size
        self._widths = shard.widths(d)
        own = shard.columns(d)
        rows = None if shard.whole else own
        self._b, self._c, self._x = (
            Linear(source, f"{path}.{name}", [matrix_of(f"{path}.{name}", d, d, rows)], config.bias)
            for name in ("b", "c", "x")
        )
        self._convolution = Convolution(
            source, f"{path}.taps", {f"{path}.taps": (d, own)}, config.taps, config.bias
        )
        self.out = Output(source, f"{path}.out", (d, d), own, config.bias, shard)

    def __call__(self, r: Recording, x: Value) -> Value:
        """What `out` projects: [T, channels]."""
        g = r.g
        inner = g(Multiply(self._b(g, x), self._x(g, x)))
        y = g(Multiply(self._c(g, x), self._convolution(g, inner, self._index - r.first)))
        return self._shard.gather(g, y, self._widths) if self._shard.gathers else y


class Convolution:
    """A causal convolution by channel, made of `pieces` by path: their channels, and which of them a rank has."""

    def __init__(
        self,
        source: WeightSource,
        path: str,
        pieces: Mapping[str, tuple[int, range]],
        taps: int,
        bias: bool = False,
        activation: Activation | None = None,
        factors: FloatArray | None = None,
        dilation: int = 1,
    ) -> None:
        """`factors` multiply what each channel reads; taps are `dilation` tokens apart."""

        def read(kind: str, each: int) -> FloatArray:
            return source.vector(
                f"{path}.{kind}",
                [
                    Piece(f"{one}.{kind}", (size * each,), range(own.start * each, own.stop * each))
                    for one, (size, own) in pieces.items()
                ],
            )

        self._weight = read("weight", taps).reshape(-1, taps)
        self._weight = self._weight if factors is None else self._weight * factors[:, None]
        self._bias = read("bias", 1) if bias else None
        self._activation, self._dilation = activation, dilation

    def __call__(self, g: Recorder, x: Value, layer: int, state: int = 0) -> Value:
        return g(Convolve(x, self._weight, layer, state, self._bias, self._activation, self._dilation))
