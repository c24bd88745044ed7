"""The gated delta rule (Yang et al. 2024, arXiv:2412.06464) and Kimi Delta Attention (arXiv:2510.26692)."""

from __future__ import annotations

import msgspec
import numpy as np
from msgspec.structs import replace

from quire.devices.ops import Multiply, Normalize, Scale, Value
from quire.devices.protocol import Activation, KVLayer
from quire.devices.recurrent_ops import DeltaRule, convolution_state, delta_state
from quire.errors import ModelError
from quire.model.parts.bounds import MAX_HEADS_DIM
from quire.model.parts.convolution import Convolution
from quire.model.parts.linear import Linear, Output, output_messages
from quire.model.parts.norm import Norm, NormConfig
from quire.model.parts.part import Mixer
from quire.model.parts.source import Recording, Use, WeightSource, matrix_of, read_vector
from quire.model.shard import Shard


class DeltaConfig(Mixer, msgspec.Struct, frozen=True, tag="delta"):
    """Hv value heads read Hk key heads, in equal groups, after a convolution over `taps` tokens.

    The state of a value head decays by one number a token, or `by_channel` by one for each element of a key; a `bound`
    below 0 is the greatest decay. `norm` norms the result of each head, which is then gated. With a `rank` the decays
    and the gate are products of two matrices. `beta_scale` multiplies beta.
    """

    hidden_size: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int
    norm: NormConfig
    gate_activation: Activation = "silu"
    by_channel: bool = False
    rank: int = 0
    beta_scale: float = 1.0
    bound: float = 0.0

    @property
    def separable(self) -> bool:
        return True

    def check(self, index: int, where: str) -> None:
        if self.value_heads % self.key_heads:
            raise ModelError(
                f"{where}: {self.value_heads} value heads are not a multiple of {self.key_heads} key heads"
            )
        if self.value_heads * max(self.key_dim, self.value_dim) > MAX_HEADS_DIM:
            raise ModelError(f"{where}: value heads x their size must be at most {MAX_HEADS_DIM}")

    def heads(self, shard: Shard) -> tuple[range, range]:
        """The value and key heads of a rank."""
        return shard.heads(self.value_heads, self.key_heads, True)

    def cache(self, shard: Shard) -> KVLayer:
        values, keys = map(len, self.heads(shard))
        channels = 2 * keys * self.key_dim + values * self.value_dim
        tail = convolution_state(channels, self.taps)
        return KVLayer(
            0, 1, states=(tail, delta_state(keys, values, self.key_dim, self.value_dim, self.by_channel))
        )

    def messages(self, shard: Shard) -> list[int]:
        return output_messages(shard, self.hidden_size, [len(self.heads(shard)[0]) * self.value_dim])

    def make(self, source: WeightSource, path: str, index: int, shard: Shard) -> Delta:
        return Delta(self, source, f"{path}.delta", index, shard)


class Delta:
    """norm(rule(convolution(q, k, v))) * gate(x); ranks have value heads with their key heads."""

    def __init__(
        self, config: DeltaConfig, source: WeightSource, path: str, index: int, shard: Shard
    ) -> None:
        self.config, self._index, self._shard, self.divided = config, index, shard, not shard.whole
        d, rank = config.hidden_size, config.rank
        self._values, self._keys = config.heads(shard)

        def own(heads: range, size: int) -> range:
            return range(heads.start * size, heads.stop * size)

        def product(name: str, heads: int, size: int, width: int, bias: bool = False) -> Linear:
            use: Use = "exact" if size == 1 else "linear"
            piece = matrix_of(f"{path}.{name}", heads * size, width, own(self._values, size))
            return Linear(source, f"{path}.{name}", [piece], bias, use)

        keys = config.key_heads * config.key_dim, own(self._keys, config.key_dim)
        values = config.value_heads * config.value_dim, own(self._values, config.value_dim)
        parts = {"q": keys, "k": keys, "v": values}
        pieces = [matrix_of(f"{path}.{name}", size, d, rows) for name, (size, rows) in parts.items()]
        self._qkv = Linear(source, f"{path}.qkv", pieces)
        taps = {f"{path}.{name}_taps": part for name, part in parts.items()}
        self._convolution = Convolution(source, f"{path}.taps", taps, config.taps, activation="silu")
        self._down: dict[str, Linear] = {}
        if rank:
            names = "steps_down", "gate_down"
            self._down = {name: Linear.plain(source, f"{path}.{name}", rank, d) for name in names}
        n, each = config.value_heads, config.key_dim if config.by_channel else 1
        self._steps = product("steps", n, each, rank or d, bias=True)
        self._beta = product("beta", n, 1, d)
        self._gate = product("gate", n, config.value_dim, rank or d)
        self._rates = read_vector(source, f"{path}.rates", n, self._values)
        norm = Norm(config.norm, source, f"{path}.norm", config.value_dim).operand
        self._norm = replace(norm, weight=np.tile(norm.weight, len(self._values)))
        self.out = Output(source, f"{path}.out", (d, values[0]), values[1], False, shard)

    def __call__(self, r: Recording, x: Value) -> Value:
        """What `out` projects: the gated results of all value heads [T, Hv dv]."""
        g, config, layer = r.g, self.config, self._index - r.first
        qkv = self._convolution(g, self._qkv(g, x), layer)
        low = {name: linear(g, x) for name, linear in self._down.items()}
        steps = self._steps(g, low.get("steps_down", x), None if config.bound else "softplus")
        beta = self._beta(g, x, "sigmoid")
        if config.beta_scale != 1.0:
            beta = g(Scale(beta, config.beta_scale))
        values, sizes = len(self._values), (config.key_dim, config.value_dim)
        heads = len(self._keys), values
        y = g(DeltaRule(qkv, steps, beta, self._rates, *heads, *sizes, layer, 1, config.bound))
        y = g(Normalize(y, self._norm, groups=values))
        y = g(Multiply(y, self._gate(g, low.get("gate_down", x), config.gate_activation)))
        return self._shard.gather_heads(g, y, config.value_heads, config.key_heads, config.value_dim)
