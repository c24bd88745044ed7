"""Attention over a window and compressed entries (DeepSeek-V4): one key a token, which is its value too."""

from __future__ import annotations

import msgspec
from msgspec.structs import replace

from quire.devices.ops import Attend, HeadLinear, PrepareQueries, Value
from quire.devices.protocol import KVLayer, Matrix
from quire.devices.sparse_ops import StoreKeys
from quire.errors import ModelError
from quire.model.parts.bounds import MAX_HEADS_DIM
from quire.model.parts.indexer import IndexerConfig, Keys, KeysConfig
from quire.model.parts.linear import Linear, Output, output_messages
from quire.model.parts.norm import Norm, NormConfig, plain_norm
from quire.model.parts.part import Index, Mixer
from quire.model.parts.rope import RopeSpec, make_rope
from quire.model.parts.scores import ScoresConfig, make_scores
from quire.model.parts.source import Recording, WeightSource, matrix_of
from quire.model.shard import Shard


class CompressedConfig(Mixer, msgspec.Struct, frozen=True, tag="compressed"):
    """N query heads of `head_dim` elements, made of a latent of `q_rank`, and one key for all of them.

    Beside the window queries see the entries that `keys` make of older tokens, or those of them that the `indexer`
    chooses. What heads gather is turned back at the query's position. Each of `groups` of heads is projected to
    `out_rank` elements, which `out` reads. Latents, keys and queries are normed, these without weights.
    """

    hidden_size: int
    num_heads: int
    head_dim: int
    q_rank: int
    groups: int
    out_rank: int
    norm: NormConfig
    scores: ScoresConfig
    rope: RopeSpec
    keys: KeysConfig | None = None
    indexer: IndexerConfig | None = None

    @property
    def separable(self) -> bool:
        return True

    @property
    def index(self) -> Index | None:
        """All entries are seen, or those that the indexer chooses; the window is seen besides."""
        if self.indexer is not None:
            return replace(self.indexer.index, most=self.indexer.top_k, entries=0)
        return None if self.keys is None else Index(every=self.keys.size, entries=0)

    def check(self, index: int, where: str) -> None:
        if self.num_heads % self.groups or self.scores.num_heads != self.num_heads:
            raise ModelError(f"{where}: {self.num_heads} heads are not a multiple of {self.groups} groups")
        if self.num_heads * self.head_dim > MAX_HEADS_DIM:
            raise ModelError(f"{where}: num_heads x head_dim must be at most {MAX_HEADS_DIM}")
        self.rope.check(where)
        least = self.head_dim if self.indexer is None else min(self.head_dim, self.indexer.keys.head_dim)
        if least < self.rope.rotary_dim:
            raise ModelError(f"{where}: {self.rope.rotary_dim} elements turn of a key of {least}")
        entries = self.keys
        if entries is not None and (entries.size < 2 or entries.head_dim != self.head_dim):
            raise ModelError(
                f"{where}: entries of {entries.size} tokens and {entries.head_dim} elements do not fit the keys"
            )
        if self.indexer is not None:
            self.indexer.check(index, where)
            if entries is None or self.indexer.keys.size != entries.size:
                raise ModelError(f"{where}: the indexer chooses among other entries than there are")

    def heads(self, shard: Shard) -> tuple[range, range]:
        """The query heads of a rank, and the groups that they are of."""
        return shard.heads(self.num_heads, self.groups, True)

    def cache(self, shard: Shard) -> KVLayer:
        return KVLayer(1, self.head_dim, self.scores.reach, value_dim=self.head_dim)

    def further(self, shard: Shard) -> tuple[KVLayer, ...]:
        """The entries and their open rows, then the indexer's keys."""
        keys = self.keys, None if self.indexer is None else self.indexer.keys
        return tuple(layer for one in keys if one is not None for layer in one.cache())

    def operations(self, shard: Shard) -> int:
        return 4 * len(self.heads(shard)[0]) * self.head_dim

    def messages(self, shard: Shard) -> list[int]:
        return output_messages(shard, self.hidden_size, [len(self.heads(shard)[0]) * self.head_dim])

    def make(self, source: WeightSource, path: str, index: int, shard: Shard) -> Compressed:
        return Compressed(self, source, f"{path}.attention", index, shard)


class Compressed:
    """Ranks have query heads, and all keys; their products of groups are parts of sums where they share a group."""

    def __init__(
        self, config: CompressedConfig, source: WeightSource, path: str, index: int, shard: Shard
    ) -> None:
        self.config, self._index, self._shard, self.divided = config, index, shard, not shard.whole
        d, h, heads = config.hidden_size, config.head_dim, config.num_heads
        self._heads, groups = config.heads(shard)
        self._q_down = Linear.plain(source, f"{path}.q_down", config.q_rank, d)
        self._q_norm = Norm(config.norm, source, f"{path}.q_norm", config.q_rank)
        rows = range(self._heads.start * h, self._heads.stop * h)
        queries = matrix_of(f"{path}.q", heads * h, config.q_rank, rows)
        self._q = Linear(source, f"{path}.q", [queries])
        self._kv = Linear.plain(source, f"{path}.kv", h, d)
        self._kv_norm = Norm(config.norm, source, f"{path}.key_norm", h).operand
        self._keys = None if config.keys is None else Keys(config.keys, source, f"{path}.entries", d)
        self._indexer = None if config.indexer is None else config.indexer.make(source, f"{path}.indexer")
        self.scores = make_scores(config.scores, source, path, self._heads)
        each, own = heads // config.groups, range(config.groups) if shard.gathers else groups

        def low(group: int) -> Matrix:
            place, columns = f"{path}.low.{group}", None
            if not shard.gathers and len(self._heads) < each:
                first = group * each
                columns = range((self._heads.start - first) * h, (self._heads.stop - first) * h)
            return source.matrix(place, [matrix_of(place, config.out_rank, each * h, None, columns)])

        self._low = tuple(map(low, own))
        width, rank = config.groups * config.out_rank, config.out_rank
        columns = range(groups.start * rank, groups.stop * rank)
        self.out = Output(source, f"{path}.out", (d, width), columns, False, shard)

    def __call__(self, r: Recording, x: Value) -> Value:
        """What `out` projects: the low-rank products of groups of heads [T, G out_rank]."""
        g, config, cached, count = r.g, self.config, self._index - r.first, len(self._heads)
        latent, chosen, entries = self._q_norm(g, self._q_down(g, x)), None, None
        g(StoreKeys(self._kv(g, x), cached, self._kv_norm, make_rope(config.rope)))
        if self._keys is not None:
            layers = r.further[self._index]
            entries = layers[0]
            self._keys(r, x, layers, config.rope)
        if self._indexer is not None:
            chosen = self._indexer(r, x, latent, self._index, config.rope)[0]
        unit = plain_norm(config.norm, config.head_dim)
        q = g(PrepareQueries(self._q(g, latent), count, r.angles(config.rope), unit))
        y = g(Attend(q, cached, count, self.scores, chosen=chosen, entries=entries))
        y = g(PrepareQueries(y, count, r.angles(replace(config.rope, backwards=True))))
        y = self._shard.gather_heads(g, y, config.num_heads, config.groups, config.head_dim)
        return g(HeadLinear(y, self._low))
