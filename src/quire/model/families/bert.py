"""BERT and its descendants: the spec that they share."""

from __future__ import annotations

from typing import Any

from quire.model.families.config import ConfigReader
from quire.model.families.family import read_decoder
from quire.model.families.gpt import PLAIN
from quire.model.spec import ArchSpec


def post_norm(config: ConfigReader, offset: int | None, rotated: int | None = 0, **own: Any) -> ArchSpec:
    """Norms after the sums, and the whole text in view. `own` are further fields of ArchSpec."""
    config.skip("tie_word_embeddings")
    return read_decoder(
        config,
        **PLAIN,
        rotated=rotated,
        position_offset=offset,
        placement="sum",
        tie_embeddings=False,
        embedding_norm=True,
        final_norm=False,
        bidirectional=True,
        has_head=False,
        **own,
    )
