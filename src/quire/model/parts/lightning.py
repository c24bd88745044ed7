"""Lightning attention: linear attention whose state decays at a fixed rate (Qin et al. 2024, arXiv:2405.17381)."""

from __future__ import annotations

import msgspec
import numpy as np

from quire.devices.ops import Multiply, Normalize, Value
from quire.devices.protocol import Activation, KVLayer
from quire.devices.recurrent_ops import StateSpace, state_space_state
from quire.errors import ModelError
from quire.model.parts.bounds import MAX_HEADS_DIM
from quire.model.parts.linear import Linear, Output
from quire.model.parts.norm import Norm, NormConfig
from quire.model.parts.part import Mixer
from quire.model.parts.source import Recording, WeightSource, matrix_of
from quire.model.shard import Shard


class LightningConfig(Mixer, msgspec.Struct, frozen=True, tag="lightning"):
    """Head h of H, from 1, decays by exp(-decay * 2^(-8 h / H)) a token.

    `activation` is that of queries, keys and values. The result is normed over all heads, multiplied by `scale`, and
    gated. All ranks have all of it.
    """

    hidden_size: int
    num_heads: int
    head_dim: int
    decay: float
    norm: NormConfig
    activation: Activation
    scale: float = 1.0

    def check(self, index: int, where: str) -> None:
        if self.num_heads * self.head_dim > MAX_HEADS_DIM:
            raise ModelError(f"{where}: num_heads x head_dim must be at most {MAX_HEADS_DIM}")

    def cache(self, shard: Shard) -> KVLayer:
        n, h = self.num_heads, self.head_dim
        return KVLayer(0, 1, states=(state_space_state(n, h, n, h, timed=False),))

    def make(self, source: WeightSource, path: str, index: int, shard: Shard) -> Lightning:
        return Lightning(self, source, f"{path}.lightning", index, shard)


class Lightning:
    """norm(scan(v, k, q)) * sigmoid(gate(x))."""

    divided = False

    def __init__(
        self, config: LightningConfig, source: WeightSource, path: str, index: int, shard: Shard
    ) -> None:
        self.config, self._index, d, n = config, index, config.hidden_size, config.num_heads
        inner = n * config.head_dim
        self._vkq = Linear(source, f"{path}.vkq", [matrix_of(f"{path}.{name}", inner, d) for name in "vkq"])
        self._gate = Linear.plain(source, f"{path}.gate", inner, d)
        self._norm = Norm(config.norm, source, f"{path}.norm", inner, config.scale).operand
        slopes = np.exp2(-8.0 * np.arange(1, n + 1) / n)
        self._rates = (config.decay * slopes).astype(np.float32)
        self.out = Output(source, f"{path}.out", (d, inner), range(inner), False, shard, False)

    def __call__(self, r: Recording, x: Value) -> Value:
        """What `out` projects: the gated results of all heads [T, N H]."""
        g, n, h = r.g, self.config.num_heads, self.config.head_dim
        vkq = self._vkq(g, x, self.config.activation)
        y = g(StateSpace(vkq, self._rates, n, h, n, h, self._index - r.first, 0))
        return g(Multiply(g(Normalize(y, self._norm)), self._gate(g, x, "sigmoid")))
