"""The ends of a decoder: tokens to hidden states, and hidden states to logits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec
import numpy as np

from quire.devices import ops
from quire.devices.graph import Recorder
from quire.devices.ops import Add, Embed, EmbedPositions, Value
from quire.devices.protocol import FloatArray, Matrix
from quire.model.parts.linear import Linear
from quire.model.parts.norm import Norm, NormConfig
from quire.model.parts.source import Piece, WeightSource, matrix_of
from quire.model.shard import Shard


class PositionsConfig(msgspec.Struct, frozen=True):
    """A table of `rows` positions, of which the first `offset` are not used.

    `sinusoid`: the table is computed, its frequencies spaced over that many steps (half the hidden size).
    """

    rows: int
    offset: int
    sinusoid: Literal["half", "half_less_one"] | None = None


class EmbeddingConfig(msgspec.Struct, frozen=True):
    """A table of `vocab_size` rows of `width` elements, which may be `projected` to the hidden size.

    With `segments` the vocabulary has each token once per segment; its row is the sum of the token's and the segment's
    embedding, of which the checkpoint has `segment_rows`. The checkpoint has no rows of the last `spare_tokens`: they
    are those that adapters add.
    """

    vocab_size: int
    hidden_size: int
    width: int
    projected: bool = False
    scale: float = 1.0
    norm: NormConfig | None = None
    positions: PositionsConfig | None = None
    segments: int = 0
    segment_rows: int = 0
    spare_tokens: int = 0

    @property
    def stored_tokens(self) -> int:
        """Rows of the checkpoint's tables."""
        return self.vocab_size - self.spare_tokens

    def rows(self, path: str) -> list[Piece]:
        """A table of the vocabulary: the stored rows, and zeros for spare tokens."""
        return [matrix_of(path, self.stored_tokens, self.width), *self.spare((self.spare_tokens, self.width))]

    def spare(self, shape: tuple[int, ...], fill: float = 0.0) -> list[Piece]:
        return [Piece("", shape, fill=fill)] if self.spare_tokens else []


class HeadConfig(msgspec.Struct, frozen=True):
    """Logits are multiplied by `scale`, then capped. A `tied` head is the embedding."""

    tied: bool = False
    bias: bool = False
    scale: float = 1.0
    cap: float | None = None


class Embedding:
    """Rows of the table for tokens, and of the table of positions. `tied`: the table also makes logits."""

    def __init__(self, config: EmbeddingConfig, source: WeightSource, tied: bool) -> None:
        self._config, d = config, config.hidden_size
        self.table: Matrix = source.matrix("embedding", config.rows("embedding"), "head" if tied else "table")
        self._positions: Matrix | None = None
        if config.positions is not None:
            piece = matrix_of("positions", config.positions.rows, d)
            self._positions = source.matrix("positions", [piece], "positions")
        self._project = None
        if config.projected:
            self._project = Linear.plain(source, "project_in", d, config.width)
        self._norm = None if config.norm is None else Norm(config.norm, source, "embedding_norm", d)

    def __call__(self, g: Recorder) -> Value:
        x = g(Embed(self.table, self._config.scale, "embedding"))
        if self._project is not None:
            x = self._project(g, x)
        if self._positions is not None and self._config.positions is not None:
            x = g(Add(x, g(EmbedPositions(self._positions, self._config.positions.offset))))
        return x if self._norm is None else self._norm(g, x)


class Head:
    """[L, D] -> logits [L, V]. A rank has rows of it, unless it is the `table` of the embedding."""

    def __init__(
        self,
        config: HeadConfig,
        embedding: EmbeddingConfig,
        source: WeightSource,
        shard: Shard,
        table: Matrix | None = None,
    ) -> None:
        self._config, self._shard, self._size = config, shard, embedding.vocab_size
        if table is None:
            rows = self._own(embedding.rows("head"))
            table = source.matrix("head", rows, "head" if shard.whole else "table")
        self.weight: Matrix = table
        self.bias: FloatArray | None = None
        if config.bias or embedding.spare_tokens:  # the bias keeps spare tokens from being chosen
            stored = embedding.stored_tokens
            bias = Piece("head.bias", (stored,), fill=None if config.bias else 0.0)
            own = self._own([bias, *embedding.spare((embedding.spare_tokens,), -np.inf)])
            self.bias = source.vector("head.bias", own)

    def __call__(self, g: Recorder, hidden: Value) -> Value:
        config = self._config
        logits = g(ops.Linear(hidden, self.weight, self.bias, path="head"))
        logits = self._shard.gather(g, logits, self._shard.widths(self._size))
        if config.scale == 1.0 and config.cap is None:
            return logits
        return g(ops.Scale(logits, config.scale, config.cap))

    def _own(self, pieces: Sequence[Piece]) -> list[Piece]:
        """The rows of a rank, of pieces that are the rows of the vocabulary."""
        if self._shard.whole:
            return list(pieces)
        found, first, own = [], 0, self._shard.columns(self._size)
        for piece in pieces:
            rows = piece.shape[0]
            if mine := range(max(own.start - first, 0), min(own.stop - first, rows)):
                found.append(msgspec.structs.replace(piece, rows=mine))
            first += rows
        return found
