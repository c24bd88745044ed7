"""Indexers (DeepSeek-V3.2, arXiv:2512.02556): small queries and keys beside attention choose what it sees."""

from __future__ import annotations

import msgspec
import numpy as np

from quire.devices.ops import Apply, Normalize, PrepareQueries, Value
from quire.devices.protocol import KVLayer
from quire.devices.sparse_ops import Choose, PositionScale, StoreKeys
from quire.devices.stream_ops import Combine
from quire.errors import ModelError
from quire.model.parts.bounds import MAX_POSITION, MAX_REACH
from quire.model.parts.linear import Linear
from quire.model.parts.norm import HeadNormConfig, Norm, NormConfig, head_norm
from quire.model.parts.part import Index, Part
from quire.model.parts.rope import RopeSpec, make_rope
from quire.model.parts.source import Choice, Recording, WeightSource, matrix_of, read_vector


class KeysConfig(msgspec.Struct, frozen=True):
    """Keys of `head_dim` elements in a cache of their own: one for each token, or for each window of `size` tokens.

    The key of a window is the mean over its tokens or, if `gated`, a sum weighted by channel: the weights are the
    softmax of a second projection and a bias by place. With `overlap` tokens have a second half, which takes part in
    the next window's key (DeepSeek-V4). Then come the `norm`, and the rope at the window's first position. With
    `norm_first` the tokens' keys are normed in place of the windows'.
    """

    head_dim: int
    norm: NormConfig | None = None
    size: int = 1
    gated: bool = False
    overlap: bool = False
    norm_first: bool = False

    def cache(self) -> tuple[KVLayer, ...]:
        """The keys, and the rows of the windows that are still open."""
        keys = KVLayer(1, self.head_dim, value_dim=self.head_dim, every=self.size)
        if self.size == 1:
            return (keys,)
        halves = 1 + self.overlap
        width = self.head_dim * halves * (1 + self.gated)
        return keys, KVLayer(1, width, self.size * halves, value_dim=width)


class Keys:
    """Makes keys of x, and stores them in `layers` of the cache."""

    def __init__(self, config: KeysConfig, source: WeightSource, path: str, hidden: int) -> None:
        self.config, rows = config, config.head_dim * (1 + config.overlap)
        names = [f"{path}.k", f"{path}.gate"] if config.gated else [f"{path}.k"]
        pieces = [matrix_of(name, rows, hidden) for name in names]
        together = 1 if config.norm_first else len(pieces)
        self._project = Linear(source, f"{path}.k", pieces[:together], use="exact")
        self._gates = self._norm = self._bias = None
        if pieces[together:]:
            self._gates = Linear(source, f"{path}.gate", pieces[together:], use="exact")
        if config.norm is not None:
            self._norm = Norm(config.norm, source, f"{path}.k_norm", config.head_dim).operand
        if config.gated:
            self._bias = read_vector(source, f"{path}.places", config.size * rows).reshape(config.size, rows)

    def __call__(self, r: Recording, x: Value, layers: range, rope: RopeSpec | None) -> None:
        config, turn = self.config, None if rope is None else make_rope(rope)
        raw = layers[1] if config.size > 1 else None
        keys, norm = self._project(r.g, x), self._norm
        if config.norm_first and norm is not None:
            keys, norm = r.g(Normalize(keys, norm)), None
        gates = None if self._gates is None else self._gates(r.g, x)
        r.g(StoreKeys(keys, layers[0], norm, turn, config.size, raw, self._bias, config.overlap, gates))


class IndexerConfig(Part, msgspec.Struct, frozen=True, tag="indexer"):
    """Chooses `top_k` of the keys, or of the pools of `pool` keys, that a query may see.

    A key's score is the sum over `num_heads` queries of relu(q . k), each with a weight that x gives if `weighted`.
    Without `relu` the products count as they are. With `groups`, equal shares of the queries choose for themselves.
    Always chosen are the `local` last pools and, with `tail`, the one that is not whole yet. Queries have
    `width` inputs; with an `input_norm` they are made of the normed x. With a `position_scale` those
    of each head grow with the logarithm of their position.
    """

    hidden_size: int
    num_heads: int
    keys: KeysConfig
    top_k: int
    width: int
    weighted: bool = True
    relu: bool = True
    q_norm: NormConfig | None = None
    input_norm: NormConfig | None = None
    position_scale: bool = False
    pool: int = 1
    groups: int = 1
    local: int = 0
    tail: bool = False

    @property
    def index(self) -> Index:
        """What choosing costs."""
        most = (self.top_k + self.tail) * self.pool
        return Index(2 * self.num_heads * self.keys.head_dim, self.keys.size, most)

    def check(self, index: int, where: str) -> None:
        if self.num_heads % self.groups:
            raise ModelError(f"{where}: {self.num_heads} heads of an indexer for {self.groups} groups")
        fits = self.keys.size in (1, self.pool) and 1 <= self.pool <= MAX_REACH
        if not fits or not 0 <= self.local <= self.top_k <= MAX_POSITION:
            raise ModelError(
                f"{where}: an indexer chooses {self.top_k} pools of {self.pool}, {self.local} local"
            )

    def make(self, source: WeightSource, path: str, groups: range | None = None) -> Indexer:
        """Read the part; a rank has some of the `groups`, or all."""
        return Indexer(self, source, path, groups)


class Indexer:
    """Stores keys of x, and chooses among those that are there: the choice as Attend reads it."""

    def __init__(
        self, config: IndexerConfig, source: WeightSource, path: str, groups: range | None = None
    ) -> None:
        self.config, heads, dim = config, config.num_heads, config.keys.head_dim
        self._groups = groups if groups is not None and config.groups > 1 else range(config.groups)
        self._keys = Keys(config.keys, source, path, config.hidden_size)
        self._queries = Linear.plain(source, f"{path}.q", heads * dim, config.width, use="exact")
        self._weights = self._q_norm = self._input_norm = self._scale = None
        if config.weighted:
            self._weights = Linear.plain(source, f"{path}.weights", heads, config.hidden_size, use="exact")
        if config.q_norm is not None:
            norm = HeadNormConfig(config.q_norm)
            self._q_norm = head_norm(norm, source, f"{path}.q_norm", heads, range(heads), dim)
        if config.input_norm is not None:
            self._input_norm = Norm(config.input_norm, source, f"{path}.input_norm", config.hidden_size)

        if config.position_scale:
            self._scale = read_position_scale(source, path, heads, range(heads))

    def __call__(self, r: Recording, x: Value, q: Value, index: int, rope: RopeSpec | None) -> Choice:
        g, config, heads = r.g, self.config, self.config.num_heads
        layers = r.further[index][-len(config.keys.cache()) :]  # the last ones of the mixer
        self._keys(r, x, layers, rope)
        if self._input_norm is not None:
            q = self._input_norm(g, x)
        queries = self._queries(g, q)
        if self._scale is not None:
            queries = g(Apply(queries, self._scale))
        queries = g(PrepareQueries(queries, heads, r.angles(rope), self._q_norm))
        weights = None if self._weights is None else self._weights(g, x)
        about = config.pool, config.groups, config.local, config.tail, config.keys.head_dim**-0.5, config.relu
        chosen = g(Choose(queries, layers[0], heads, config.top_k, weights, *about))
        own = len(self._groups)
        if own != config.groups:
            chosen = g(Combine(chosen, np.eye(own, config.groups, self._groups.start, np.float32)))
        return chosen, config.pool, own


def read_position_scale(source: WeightSource, path: str, count: int, heads: range) -> PositionScale:
    """Read how the queries of the `heads` of a rank, of `count`, grow with their position."""
    vectors = [read_vector(source, f"{path}.{name}", count, heads) for name in ("growths", "bases")]
    growths, bases = (tuple(vector.tolist()) for vector in vectors)
    return PositionScale(len(heads), growths, bases)
