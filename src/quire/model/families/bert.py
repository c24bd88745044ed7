"""BERT and its descendants: the spec that they share."""

from __future__ import annotations

from typing import Any

from quire.model.families.classifiers import CLASSIFIERS
from quire.model.families.config import ConfigReader
from quire.model.families.family import architecture_of, read_decoder
from quire.model.families.gpt import PLAIN
from quire.model.parts.decoder import DecoderConfig


def post_norm(config: ConfigReader, offset: int | None, rotated: int | None = 0, **own: Any) -> DecoderConfig:
    """Norms after the sums, and the whole text in view. `own` are further fields of parts."""
    config.skip("tie_word_embeddings")
    return read_decoder(
        config,
        **PLAIN,
        rotated=rotated,
        **({} if offset is None else {"positions_offset": offset}),
        placement="sum",
        head_tied=False,
        embedding_norm=True,
        final_norm=False,
        bidirectional=True,
        headless=True,
        **own,
    )


def segments(config: ConfigReader, rows: int) -> dict[str, int]:
    """Give the fields of a vocabulary that each segment repeats; only classifiers read pairs of texts."""
    pairs = min(rows, 2 if architecture_of(config) in CLASSIFIERS else 1)
    size = config.integer("vocab_size") * max(pairs, 1)
    return {"vocab_size": size, "embedding_segments": pairs, "embedding_segment_rows": rows}
