"""Scores of attention by distance; only encoders whose queries see whole sequences import this."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from quire.devices.kv import KVSpec
from quire.devices.ops import Op, T

SCORE_TILE = 64  # positions


class RelativeScores(Op[T], frozen=True, eq=False):
    """What distances add to the scores of whole sequences (DeBERTa, arXiv:2006.03654): [T, N S], for Attend.

    by_query and by_key are [T, N B], or None for zeros. The score of the query at i with the key at j gets scale *
    (by_query[i, n, place] + by_key[j, n, place]) with place = places[j - i + P - 1], one of B. `places` is
    [2 P - 1]: sequences have at most P tokens, all in the step. S is P rounded up to a multiple of 64.
    """

    by_query: T | None
    by_key: T | None
    num_heads: int
    places: NDArray[np.int32]
    scale: float

    def width(self: RelativeScores[int], kv: KVSpec) -> int:
        return self.num_heads * padded_positions(self.places)


def padded_positions(places: NDArray[np.int32]) -> int:
    """Return the row length of RelativeScores: the positions of [2 P - 1] places, in whole tiles."""
    positions = (len(places) + 1) // 2
    return -(-positions // SCORE_TILE) * SCORE_TILE
