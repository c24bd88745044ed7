"""Mamba-2: a scan over states with a scalar decay for each head (Dao and Gu 2024, arXiv:2405.21060)."""

from __future__ import annotations

import msgspec
import numpy as np

from quire.devices.ops import Multiply, Normalize, Scale, Value
from quire.devices.protocol import FloatArray, KVLayer
from quire.devices.recurrent_ops import StateSpace, convolution_state, state_space_state
from quire.errors import ModelError
from quire.model.parts.bounds import MAX_HEADS_DIM, MAX_NUMBER
from quire.model.parts.convolution import Convolution
from quire.model.parts.linear import Linear, Output
from quire.model.parts.norm import Norm, NormConfig
from quire.model.parts.part import Mixer
from quire.model.parts.source import Recording, WeightSource, read_vector
from quire.model.shard import Shard


class StateSpaceConfig(Mixer, msgspec.Struct, frozen=True, tag="state_space"):
    """H heads of `head_dim` channels with a state of N = `state_dim` rows; `groups` of heads share B and C.

    A convolution over `taps` tokens comes before the scan. Its result is multiplied by silu of a gate z, then normed
    by group. Steps dt are bounded by `steps`. z, x, B, C and dt are multiplied by `factors`, and the
    result by `scale`. All ranks have all of it.
    """

    hidden_size: int
    num_heads: int
    head_dim: int
    groups: int
    state_dim: int
    taps: int
    norm: NormConfig | None
    conv_bias: bool = True
    bias: bool = False
    out_bias: bool | None = None
    scale: float = 1.0
    steps: tuple[float, float] = (0.0, MAX_NUMBER)
    factors: tuple[float, float, float, float, float] = (1.0, 1.0, 1.0, 1.0, 1.0)

    @property
    def inner(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def channels(self) -> int:
        """What the convolution reads: x, B and C."""
        return self.inner + 2 * self.groups * self.state_dim

    def check(self, index: int, where: str) -> None:
        if self.num_heads % self.groups:
            raise ModelError(
                f"{where}: {self.num_heads} heads of {self.head_dim} channels do not divide into {self.groups} groups"
            )
        if self.channels > MAX_HEADS_DIM:
            raise ModelError(
                f"{where}: num_heads x head_dim and the groups' states must be at most {MAX_HEADS_DIM}"
            )
        if self.projects_bias and self.scale != 1.0:
            raise ModelError(f"{where}: the last projection has both a bias and a multiplier")

    @property
    def projects_bias(self) -> bool:
        return self.bias if self.out_bias is None else self.out_bias

    def cache(self, shard: Shard) -> KVLayer:
        scan = state_space_state(self.num_heads, self.head_dim, self.groups, self.state_dim)
        return KVLayer(0, 1, states=(convolution_state(self.channels, self.taps), scan))

    def make(self, source: WeightSource, path: str, index: int, shard: Shard) -> StateSpacePart:
        return StateSpacePart(self, source, f"{path}.state_space", index, shard)


class StateSpacePart:
    """norm(scan(convolution(x, B, C), dt) * silu(z))."""

    divided = False

    def __init__(
        self, config: StateSpaceConfig, source: WeightSource, path: str, index: int, shard: Shard
    ) -> None:
        self.config, self._index, d, inner = config, index, config.hidden_size, config.inner

        def linear(name: str, out: int) -> Linear:
            return Linear.plain(source, f"{path}.{name}", out, d, bias=config.bias)

        def vector(name: str) -> FloatArray:
            return read_vector(source, f"{path}.{name}", config.num_heads)

        self._z, self._xbc = linear("z", inner), linear("xbc", config.channels)
        self._dt = linear("dt", config.num_heads)
        steps = vector("steps")
        self._dt.bias = steps if self._dt.bias is None else self._dt.bias + steps
        shared = config.groups * config.state_dim
        factors = np.repeat(np.array(config.factors[1:4], np.float32), (inner, shared, shared))
        self._convolution = Convolution(
            source,
            f"{path}.taps",
            {f"{path}.taps": (config.channels, range(config.channels))},
            config.taps,
            config.conv_bias,
            "silu",
            factors,
        )
        self._rates = vector("rates")
        self._skip = vector("skip")
        self._norm = None
        if config.norm is not None:
            self._norm = Norm(config.norm, source, f"{path}.norm", inner).operand
        columns = range(inner)
        self.out = Output(source, f"{path}.out", (d, inner), columns, config.projects_bias, shard, False)

    def __call__(self, r: Recording, x: Value) -> Value:
        """What `out` projects: [T, H P]."""
        g, config, layer = r.g, self.config, self._index - r.first

        def scaled(factor: float) -> Value:
            return x if factor == 1.0 else g(Scale(x, factor))

        gate = self._z(g, scaled(config.factors[0]), "silu")
        dt = self._dt(g, scaled(config.factors[4]), "softplus")
        xbc = self._convolution(g, self._xbc(g, x), layer)
        sizes = config.num_heads, config.head_dim, config.groups, config.state_dim
        y = g(StateSpace(xbc, self._rates, *sizes, layer, 1, dt, self._skip, *config.steps))
        y = g(Multiply(y, gate))
        y = y if self._norm is None else g(Normalize(y, self._norm, groups=config.groups))
        return y if config.scale == 1.0 else g(Scale(y, config.scale))
