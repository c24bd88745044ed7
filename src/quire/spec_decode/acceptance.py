"""Measures the chance that a draft's tokens are accepted, by position; older results fade."""

from __future__ import annotations

from dataclasses import dataclass, field

POSITIONS = 8
"""POSITIONS are counted apart; later ones share the last."""
FADE = 0.9
PRIOR_WEIGHT = 2.0
START = 0.5


@dataclass(slots=True)
class Tally:
    """Counts, by position, the tokens tried and accepted; a token is tried if all before it were accepted."""

    fade: float
    start: float = START  # assumed before anything is measured
    tried: list[float] = field(default_factory=lambda: [0.0] * POSITIONS)
    accepted: list[float] = field(default_factory=lambda: [0.0] * POSITIONS)

    def record(self, drafted: int, accepted: int) -> None:
        """Count a draft of `drafted` tokens, of which the first `accepted` were accepted."""
        seen = min(drafted, accepted + 1)
        for place in range(seen):
            at = min(place, POSITIONS - 1)
            self.tried[at] = self.tried[at] * self.fade + 1.0
            self.accepted[at] = self.accepted[at] * self.fade + (place < accepted)

    def share(self, place: int, prior: float) -> float:
        return (self.accepted[place] + PRIOR_WEIGHT * prior) / (self.tried[place] + PRIOR_WEIGHT)


class Odds:
    """The acceptance of one sequence; the acceptance of all sequences of its proposer is the prior."""

    __slots__ = ("_all", "_own")

    def __init__(self, all_sequences: Tally) -> None:
        self._all = all_sequences
        self._own = Tally(FADE)

    def record(self, drafted: int, accepted: int) -> None:
        self._own.record(drafted, accepted)
        self._all.record(drafted, accepted)

    def cumulative(self, count: int) -> list[float]:
        """Return the probability that the first 1, 2, ..., `count` tokens of a draft are all accepted."""
        found = []
        product, before = 1.0, self._all.start
        for place in range(count):
            if place < POSITIONS:
                before = self._own.share(place, self._all.share(place, before))
            product *= before
            found.append(product)
        return found
