"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434): one compressed key per token, shared by all heads."""

from __future__ import annotations

import msgspec

from quire.devices.ops import Attend, HeadLinear, Multiply, StoreLatent, Value
from quire.devices.protocol import KVLayer, Matrix
from quire.errors import ModelError
from quire.model.parts.linear import Linear, Output, output_messages
from quire.model.parts.norm import Norm, NormConfig
from quire.model.parts.part import Mixer
from quire.model.parts.recording import Recording
from quire.model.parts.rope import RopeSpec
from quire.model.parts.scores import ScoresConfig, make_scores
from quire.model.parts.source import WeightSource, matrix_of
from quire.model.shard import Shard


class LatentConfig(Mixer, msgspec.Struct, frozen=True, tag="latent"):
    """C = `kv_rank` and R = `rope_dim` cached elements per token.

    `q_rank` is None if queries come from the hidden state directly. `norm` norms the latents; queries and latents are
    then multiplied by `q_scale` and `kv_scale`. `bias`: both down projections have one. With a `head_gate` what
    each head gathers is multiplied by the sigmoid of a product with the layer's input.
    """

    hidden_size: int
    num_heads: int
    q_rank: int | None
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    norm: NormConfig
    scores: ScoresConfig
    rope: RopeSpec
    q_scale: float = 1.0
    kv_scale: float = 1.0
    bias: bool = False
    out_bias: bool = False
    head_gate: bool = False

    @property
    def separable(self) -> bool:
        return True

    def check(self, index: int, where: str) -> None:
        if self.rope_dim % 2:
            raise ModelError(f"{where}: rope_dim must be even, got {self.rope_dim}")
        self.rope.check(where)

    def heads(self, shard: Shard) -> tuple[range, range]:
        """The query heads of a rank, and the key that all ranks hold."""
        return shard.heads(self.num_heads, 1, True)

    def cache(self, shard: Shard) -> KVLayer:
        """The compressed key, whose first elements are the value."""
        return KVLayer(1, self.kv_rank + self.rope_dim, value_dim=self.kv_rank)

    def operations(self, shard: Shard) -> int:
        return 2 * len(self.heads(shard)[0]) * (2 * self.kv_rank + self.rope_dim)

    def messages(self, shard: Shard) -> list[int]:
        return output_messages(shard, self.hidden_size, [len(self.heads(shard)[0]) * self.value_dim])

    def make(self, source: WeightSource, path: str, index: int, shard: Shard) -> LatentAttention:
        return LatentAttention(self, source, f"{path}.attention", index, shard)


class LatentAttention:
    """Scores and sums use the compressed cache: `keys` [C, nope_dim] take a query to the latent, `values` [value_dim,
    C] take the latent to a value, by head.
    """

    def __init__(
        self, config: LatentConfig, source: WeightSource, path: str, index: int, shard: Shard
    ) -> None:
        self.config, self.index, self._shard, self.divided = config, index, shard, not shard.whole
        d, n, c, r = config.hidden_size, config.num_heads, config.kv_rank, config.rope_dim
        heads = self._heads = config.heads(shard)[0]
        self.q_down = self.q_norm = None
        if config.q_rank:
            down = matrix_of(f"{path}.q_down", config.q_rank, d)
            self.q_down = Linear(source, f"{path}.q_down", [down], config.bias)
            self.q_norm = Norm(config.norm, source, f"{path}.q_norm", config.q_rank, config.q_scale)

        def queries(name: str, size: int) -> Linear:
            rows = range(heads.start * size, heads.stop * size)
            piece = matrix_of(f"{path}.{name}", n * size, config.q_rank or d, rows)
            return Linear(source, f"{path}.{name}", [piece])

        def by_head(name: str, out: int, width: int) -> tuple[Matrix, ...]:
            paths = [f"{path}.{name}.{head}" for head in heads]
            return tuple(source.matrix(p, [matrix_of(p, out, width)]) for p in paths)

        self.q_nope, self.q_rope = queries("q_nope", config.nope_dim), queries("q_rope", r)
        latent = matrix_of(f"{path}.kv_down.latent", c, d), matrix_of(f"{path}.kv_down.rope", r, d)
        self.kv_down = Linear(source, f"{path}.kv_down", latent, config.bias)
        self.kv_norm = Norm(config.norm, source, f"{path}.kv_norm", c, config.kv_scale)
        self.keys = by_head("keys", c, config.nope_dim)
        self.values = by_head("values", config.value_dim, c)
        self._head_gate = None
        if config.head_gate:
            piece = matrix_of(f"{path}.head_gate", n, d, heads)
            self._head_gate = Linear(source, f"{path}.head_gate", [piece])
        self.scores = make_scores(config.scores, source, path, heads)
        v = config.value_dim
        columns = range(heads.start * v, heads.stop * v)
        self.out = Output(source, f"{path}.out", (d, n * v), columns, config.out_bias, shard)

    def __call__(self, r: Recording, x: Value) -> Value:
        """What `out` projects: each head's weighted values [T, N value_dim]."""
        g, cached, count = r.g, self.index - r.first, len(self._heads)
        q = x
        if self.q_down is not None and self.q_norm is not None:
            q = self.q_norm(g, self.q_down(g, x))
        latent = g(HeadLinear(self.q_nope(g, q), self.keys))
        rotated, kv = self.q_rope(g, q), self.kv_down(g, x)
        turn = r.angles(self.config.rope)
        assert turn is not None
        queries = g(StoreLatent(kv, latent, rotated, cached, turn, self.kv_norm.operand))
        y = g(HeadLinear(g(Attend(queries, cached, count, self.scores)), self.values))
        if self._head_gate is not None:
            y = g(Multiply(y, self._head_gate(g, x, "sigmoid")))
        if not self._shard.gathers:
            return y
        spread = self._shard.spread(self.config.num_heads, 1)
        return self._shard.gather(g, y, [heads * self.config.value_dim for heads in spread])
