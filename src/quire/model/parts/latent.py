"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434): one compressed key per token, shared by all heads."""

from __future__ import annotations

from typing import Literal

import msgspec
import numpy as np
from msgspec.structs import replace

from quire.devices.ops import Apply, Attend, HeadLinear, Multiply, StoreLatent, Value
from quire.devices.protocol import KVLayer, Matrix
from quire.errors import ModelError
from quire.model.parts.indexer import IndexerConfig, read_position_scale
from quire.model.parts.linear import Linear, Output, output_messages
from quire.model.parts.norm import Norm, NormConfig
from quire.model.parts.part import Index, Mixer
from quire.model.parts.rope import RopeSpec
from quire.model.parts.scores import ScoresConfig, make_scores
from quire.model.parts.source import Piece, Recording, WeightSource, matrix_of
from quire.model.shard import Shard


class LatentConfig(Mixer, msgspec.Struct, frozen=True, tag="latent"):
    """C = `kv_rank` and R = `rope_dim` cached elements per token; if R is 0, zeros take the place of what turns.

    `q_rank` is None if queries come from the hidden state directly. `norm` norms the latents; queries and latents are
    then multiplied by `q_scale` and `kv_scale`. `bias`: both down projections have one.

    What heads gather is multiplied, by element or by head, by the sigmoid of a product with the layer's input if there
    is a `gate`. With a `position_scale` the queries of each head grow with the logarithm of their position. With a
    `learned_rope` the exponentials of a vector of the model multiply the rope's frequencies. `back`: the layer reads
    the latents of the layer that many before it, and keeps none. Queries see the keys that the `indexer` chooses, or
    with `shares` those that the last one before it chose.
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
    gate: Literal["elements", "heads"] | None = None
    position_scale: bool = False
    learned_rope: bool = False
    back: int = 0
    indexer: IndexerConfig | None = None
    shares: bool = False

    @property
    def separable(self) -> bool:
        return True

    @property
    def index(self) -> Index | None:
        return None if self.indexer is None else self.indexer.index

    def check(self, index: int, where: str) -> None:
        if self.rope_dim % 2 or self.rope.rotary_dim != self.turned:
            raise ModelError(f"{where}: rope_dim must be even, and as wide as the rope, got {self.rope_dim}")
        if self.back > index:
            raise ModelError(f"{where} cannot read the keys of a layer {self.back} before it")
        self.rope.check(where)
        if self.indexer is not None:
            self.indexer.check(index, where)
            if self.shares or self.indexer.keys.head_dim < self.rope.rotary_dim:
                raise ModelError(
                    f"{where}: an indexer of its own has keys of at least {self.rope.rotary_dim} elements"
                )
            if self.indexer.groups > 1:
                raise ModelError(f"{where}: an indexer chooses for {self.indexer.groups} groups of one key")

    @property
    def turned(self) -> int:
        """The elements of a key that turn, or the zeros in their place."""
        return self.rope_dim or 2

    def heads(self, shard: Shard) -> tuple[range, range]:
        """The query heads of a rank, and the key that all ranks hold."""
        return shard.heads(self.num_heads, 1, True)

    def cache(self, shard: Shard) -> KVLayer:
        """The compressed key, whose first elements are the value."""
        return KVLayer(int(not self.back), self.kv_rank + self.turned, value_dim=self.kv_rank)

    def further(self, shard: Shard) -> tuple[KVLayer, ...]:
        return () if self.indexer is None else self.indexer.keys.cache()

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
        d, n, c, r = config.hidden_size, config.num_heads, config.kv_rank, config.turned
        heads = self._heads = config.heads(shard)[0]
        self.q_down = self.q_norm = None
        if config.q_rank:
            down = matrix_of(f"{path}.q_down", config.q_rank, d)
            self.q_down = Linear(source, f"{path}.q_down", [down], config.bias)
            self.q_norm = Norm(config.norm, source, f"{path}.q_norm", config.q_rank, config.q_scale)

        fill = None if config.rope_dim else 0.0

        def of_heads(name: str, size: int, width: int, fill: float | None = None) -> Linear:
            rows = range(heads.start * size, heads.stop * size)
            piece = Piece(f"{path}.{name}.weight", (n * size, width), rows, fill=fill)
            return Linear(source, f"{path}.{name}", [piece])

        def by_head(name: str, out: int, width: int) -> tuple[Matrix, ...]:
            paths = [f"{path}.{name}.{head}" for head in heads]
            return tuple(source.matrix(p, [matrix_of(p, out, width)]) for p in paths)

        width = config.q_rank or d
        self.q_nope = of_heads("q_nope", config.nope_dim, width)
        self.q_rope = of_heads("q_rope", r, width, fill)
        self.kv_down = self.kv_norm = None
        if not config.back:
            latent = [
                matrix_of(f"{path}.kv_down.latent", c, d),
                Piece(f"{path}.kv_down.rope.weight", (r, d), fill=fill),
            ]
            self.kv_down = Linear(source, f"{path}.kv_down", latent, config.bias)
            self.kv_norm = Norm(config.norm, source, f"{path}.kv_norm", c, config.kv_scale).operand
        self.keys = by_head("keys", c, config.nope_dim)
        self.values = by_head("values", config.value_dim, c)
        self._gate = None
        if config.gate is not None:
            self._gate = of_heads("gate", config.value_dim if config.gate == "elements" else 1, d)
        self._rope = config.rope
        if config.learned_rope:
            alpha = source.vector("rope.alpha", [Piece("rope.alpha", (r // 2,))])
            self._rope = replace(config.rope, factors=tuple(np.exp(-alpha.astype(np.float64)).tolist()))
        self._scale = read_position_scale(source, path, n, heads) if config.position_scale else None
        self._indexer = None if config.indexer is None else config.indexer.make(source, f"{path}.indexer")
        self.scores = make_scores(config.scores, source, path, heads)
        v = config.value_dim
        columns = range(heads.start * v, heads.stop * v)
        self.out = Output(source, f"{path}.out", (d, n * v), columns, config.out_bias, shard)

    def __call__(self, r: Recording, x: Value) -> Value:
        """What `out` projects: each head's weighted values [T, N value_dim]."""
        config = self.config
        g, cached, count = r.g, self.index - config.back - r.first, len(self._heads)
        q = x
        if self.q_down is not None and self.q_norm is not None:
            q = self.q_norm(g, self.q_down(g, x))
        chosen = r.chosen if config.shares else None
        if self._indexer is not None:
            r.chosen = chosen = self._indexer(r, x, q, self.index, self._rope)
        if config.shares and chosen is None:
            raise ModelError(
                f"layer {self.index} takes the choice of keys of an earlier one, and there is none"
            )
        latent = g(HeadLinear(self.q_nope(g, q), self.keys))
        rotated, kv = self.q_rope(g, q), None if self.kv_down is None else self.kv_down(g, x)
        turn = r.angles(self._rope)
        assert turn is not None
        queries = g(StoreLatent(kv, latent, rotated, cached, turn, self.kv_norm))
        if self._scale is not None:
            queries = g(Apply(queries, self._scale))
        y = g(HeadLinear(g(Attend(queries, cached, count, self.scores, None, *(chosen or ()))), self.values))
        if self._gate is not None:
            y = g(Multiply(y, self._gate(g, x, "sigmoid")))
        return self._shard.gather_heads(g, y, config.num_heads, 1, config.value_dim)
