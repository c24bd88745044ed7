"""Mamba-1: a scan with a decay for each channel and row of the state (Gu and Dao 2023, arXiv:2312.00752)."""

from __future__ import annotations

import msgspec

from quire.devices.ops import Multiply, Normalize, Value
from quire.devices.protocol import KVLayer
from quire.devices.recurrent_ops import SelectiveScan, convolution_state, selective_state
from quire.errors import ModelError
from quire.model.parts.bounds import MAX_HEADS_DIM
from quire.model.parts.convolution import Convolution
from quire.model.parts.linear import Linear, Output
from quire.model.parts.norm import Norm, NormConfig
from quire.model.parts.part import Mixer
from quire.model.parts.source import Recording, WeightSource, read_vector
from quire.model.shard import Shard


class SelectiveConfig(Mixer, msgspec.Struct, frozen=True, tag="selective"):
    """`inner` channels with a state of N = `state_dim` elements each.

    Steps, B and C are products of what a convolution over `taps` tokens gives; the steps pass through `rank` elements.
    With `norm` all three are normed. The result is multiplied by silu of a gate. All ranks have all of it.
    """

    hidden_size: int
    inner: int
    state_dim: int
    rank: int
    taps: int
    norm: NormConfig | None = None
    conv_bias: bool = True
    bias: bool = False

    def check(self, index: int, where: str) -> None:
        if self.inner * self.state_dim > MAX_HEADS_DIM:
            raise ModelError(f"{where}: channels x state_dim must be at most {MAX_HEADS_DIM}")

    def cache(self, shard: Shard) -> KVLayer:
        states = convolution_state(self.inner, self.taps), selective_state(self.inner, self.state_dim)
        return KVLayer(0, 1, states=states)

    def make(self, source: WeightSource, path: str, index: int, shard: Shard) -> Selective:
        return Selective(self, source, f"{path}.selective", index, shard)


class Selective:
    """scan(convolution(x), steps, B, C) * silu(gate(x))."""

    divided = False

    def __init__(
        self, config: SelectiveConfig, source: WeightSource, path: str, index: int, shard: Shard
    ) -> None:
        self._index, d, inner, n = index, config.hidden_size, config.inner, config.state_dim

        def linear(name: str, out: int, width: int, bias: bool = False) -> Linear:
            return Linear.plain(source, f"{path}.{name}", out, width, bias=bias)

        self._x, self._gate = (linear(name, inner, d, config.bias) for name in ("x", "gate"))
        channels = {f"{path}.taps": (inner, range(inner))}
        self._convolution = Convolution(
            source, f"{path}.taps", channels, config.taps, config.conv_bias, "silu"
        )
        self._down, self._bc = linear("down", config.rank, inner), linear("bc", 2 * n, inner)
        self._steps = linear("steps", inner, config.rank, True)
        self._rates = read_vector(source, f"{path}.rates", inner * n).reshape(inner, n)
        self._skip = read_vector(source, f"{path}.skip", inner)
        self._norms = None
        if (norm := config.norm) is not None:
            sizes = {"steps_norm": config.rank, "bc_norm": 2 * n}
            self._norms = [Norm(norm, source, f"{path}.{name}", sizes[name]).operand for name in sizes]
        self.out = Output(source, f"{path}.out", (d, inner), range(inner), config.bias, shard, False)

    def __call__(self, r: Recording, x: Value) -> Value:
        """What `out` projects: [T, channels]."""
        g, layer = r.g, self._index - r.first
        gate, inner = self._gate(g, x, "silu"), self._convolution(g, self._x(g, x), layer)
        low, bc = self._down(g, inner), self._bc(g, inner)
        if self._norms is not None:
            steps_norm, bc_norm = self._norms
            low, bc = g(Normalize(low, steps_norm)), g(Normalize(bc, bc_norm, groups=2))
        steps = self._steps(g, low, "softplus")
        y = g(SelectiveScan(inner, steps, bc, self._rates, self._skip, layer, 1))
        return g(Multiply(y, gate))
