"""Scores of content with distance, as DeBERTa has them."""

from __future__ import annotations

import msgspec
import numpy as np

from quire.devices import relative_ops
from quire.devices.graph import Recorder
from quire.devices.ops import HeadLinear, Value
from quire.devices.protocol import Matrix
from quire.devices.stream_ops import Combine
from quire.errors import ModelError
from quire.model.parts.part import DistanceScores
from quire.model.parts.scores import relative_places
from quire.model.parts.source import WeightSource, matrix_of


class RelativeConfig(DistanceScores, msgspec.Struct, frozen=True, tag="relative"):
    """Disentangled attention (DeBERTa, He et al. 2021, arXiv:2006.03654): scores of content with distance.

    `span` distances each way have embeddings (distances.relative_places); `normed`: they are normed. Queries meet a
    key made of the distance's embedding if `by_query`, keys a query made of it if `by_key`. `shared`: the layer's own
    projections make both.
    """

    span: int
    buckets: int
    reach: int
    by_query: bool
    by_key: bool
    shared: bool
    normed: bool

    def check(self, index: int, where: str) -> None:
        if self.span > self.reach:
            raise ModelError(f"{where}: scores of {self.span} distances reach only {self.reach}")

    def make(
        self, source: WeightSource, path: str, sizes: tuple[int, int], positions: int, scale: float
    ) -> RelativeScores:
        return RelativeScores(self, source, path, sizes, positions, scale)


class RelativeScores:
    """The scores that distances add in sequences of at most `positions` tokens: keys, queries [2 span, H] by head."""

    def __init__(
        self,
        config: RelativeConfig,
        source: WeightSource,
        path: str,
        sizes: tuple[int, int],
        positions: int,
        scale: float,
    ) -> None:
        self._num_heads, head_dim = sizes
        self._scale = scale
        self._places = relative_places(positions, config.span, config.buckets, config.reach)

        def heads(kind: str) -> tuple[Matrix, ...]:
            paths = [f"{path}.{kind}.{head}" for head in range(self._num_heads)]
            return tuple(source.matrix(p, [matrix_of(p, 2 * config.span, head_dim)]) for p in paths)

        self._keys = heads("keys") if config.by_query else None
        self._queries = heads("queries") if config.by_key else None

    def __call__(self, g: Recorder, q: Value, qkv: Value) -> Value:
        by_query = None if self._keys is None else g(HeadLinear(q, self._keys))
        by_key = None
        if self._queries is not None:
            keys = g(Combine(qkv, np.eye(1, 3, 1, dtype=np.float32)))
            by_key = g(HeadLinear(keys, self._queries))
        return g(relative_ops.RelativeScores(by_query, by_key, self._num_heads, self._places, self._scale))
