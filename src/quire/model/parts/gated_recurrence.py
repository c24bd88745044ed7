"""The RG-LRU of Griffin (De et al. 2024, arXiv:2402.19427): a recurrence of each channel, with gates by block."""

from __future__ import annotations

import msgspec

from quire.devices.ops import HeadLinear, Multiply, Value
from quire.devices.protocol import Activation, FloatArray, KVLayer, Matrix
from quire.devices.recurrent_ops import GatedRecurrence, convolution_state, gated_state
from quire.model.parts.convolution import Convolution
from quire.model.parts.linear import Linear, Output, output_messages
from quire.model.parts.part import Mixer
from quire.model.parts.source import Recording, WeightSource, matrix_of, read_vector
from quire.model.shard import Shard


class GatedRecurrenceConfig(Mixer, msgspec.Struct, frozen=True, tag="gated_recurrence"):
    """`num_heads` blocks of `size` channels, after a convolution over `taps` tokens.

    The gates of a block read that block alone. The result is multiplied by a branch of its own with `activation`.
    """

    hidden_size: int
    num_heads: int
    size: int
    taps: int
    activation: Activation

    @property
    def separable(self) -> bool:
        return True

    def heads(self, shard: Shard) -> tuple[range, range]:
        return shard.heads(self.num_heads, self.num_heads, True)

    def cache(self, shard: Shard) -> KVLayer:
        own = len(self.heads(shard)[0]) * self.size
        return KVLayer(0, 1, states=(convolution_state(own, self.taps), gated_state(own)))

    def messages(self, shard: Shard) -> list[int]:
        return output_messages(shard, self.hidden_size, [len(self.heads(shard)[0]) * self.size])

    def make(self, source: WeightSource, path: str, index: int, shard: Shard) -> BlockRecurrence:
        return BlockRecurrence(self, source, f"{path}.gated_recurrence", index, shard)


class BlockRecurrence:
    """recurrence(convolution(x)) * activation(gate(x)); ranks have blocks of it."""

    def __init__(
        self, config: GatedRecurrenceConfig, source: WeightSource, path: str, index: int, shard: Shard
    ) -> None:
        self.config, self._index, self._shard, self.divided = config, index, shard, not shard.whole
        d, b, blocks = config.hidden_size, config.size, config.heads(shard)[0]
        width, own = config.num_heads * b, range(blocks.start * b, blocks.stop * b)
        self._x, self._gate = (
            Linear(source, f"{path}.{name}", [matrix_of(f"{path}.{name}", width, d, own)], True)
            for name in ("x", "gate")
        )
        taps = {f"{path}.taps": (width, own)}
        self._convolution = Convolution(source, f"{path}.taps", taps, config.taps, True)

        def gate(name: str) -> tuple[list[Matrix], FloatArray]:
            paths = [f"{path}.{name}.{block}" for block in blocks]
            weights = [source.matrix(one, [matrix_of(one, b, b)]) for one in paths]
            return weights, read_vector(source, f"{path}.{name}.bias", width, own)

        self._gates = [gate(name) for name in ("input_gate", "recurrent_gate")]
        self._rates = read_vector(source, f"{path}.rates", width, own)
        self.out = Output(source, f"{path}.out", (d, width), own, True, shard)

    def __call__(self, r: Recording, x: Value) -> Value:
        """What `out` projects: [T, channels]."""
        g, config, layer = r.g, self.config, self._index - r.first
        inner = self._convolution(g, self._x(g, x), layer)
        allow, decay = (g(HeadLinear(inner, *gate, "sigmoid")) for gate in self._gates)
        y = g(GatedRecurrence(inner, allow, decay, self._rates, layer, 1))
        y = g(Multiply(y, self._gate(g, x, config.activation)))
        return self._shard.gather_heads(g, y, config.num_heads, config.num_heads, config.size)
