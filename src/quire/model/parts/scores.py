"""What attention adds to its scores: biases of distances, sinks, and DeBERTa's meetings of content and distance."""

from __future__ import annotations

import msgspec
import numpy as np

from quire.devices import ops
from quire.devices.graph import Recorder
from quire.devices.ops import Combine, HeadLinear, Value
from quire.devices.protocol import Attention, Matrix
from quire.model.parts.distances import alibi_slopes, position_buckets, relative_places
from quire.model.parts.source import Piece, WeightSource, matrix_of


class ScoresConfig(msgspec.Struct, frozen=True):
    """The positions that a query sees, and the changes to its scores before the softmax (see devices' Attention).

    `alibi` multiplies the slopes of `num_heads` heads. `position_buckets`: heads add a value of their own by the bucket
    of the distance (distances.position_buckets).
    """

    num_heads: int
    scale: float
    window: int | None = None
    chunk: int | None = None
    ahead: int = 0
    cap: float | None = None
    alibi: float | None = None
    sinks: bool = False
    position_buckets: int | None = None

    @property
    def reach(self) -> int:
        """The last positions that a query sees, its own included; 0: all of them."""
        spans = [span for span in (self.window, self.chunk) if span is not None]
        return 0 if self.ahead else min(spans, default=0)


def make_scores(config: ScoresConfig, source: WeightSource, path: str, heads: range) -> Attention:
    """The operand of the `heads` of a rank. Its sinks and its bias are vectors below the path of the attention."""
    slopes = sinks = bias = None
    count = config.num_heads
    if config.alibi is not None:
        slopes = np.asarray(alibi_slopes(count) * config.alibi, np.float32)[heads.start : heads.stop]
    if config.sinks:
        sinks = source.vector(f"{path}.sinks", [Piece(f"{path}.sinks", (count,), heads)])
    if config.position_buckets is not None:
        width = len(position_buckets(config.position_buckets))
        piece = Piece(f"{path}.position_bias", (count * width,))
        bias = source.vector(f"{path}.position_bias", [piece]).reshape(count, width)
    return Attention(config.scale, config.window, config.chunk, config.ahead, config.cap, slopes, sinks, bias)


class RelativeConfig(msgspec.Struct, frozen=True):
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
        return g(ops.RelativeScores(by_query, by_key, self._num_heads, self._places, self._scale))
