"""How well texts suit each other: what to run for that, and the scores out of its vectors. Knows no HTTP.

A classifier of pairs with one output reads both texts together; any other model gives each its embedding, and the score
is their cosine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from quire.client.front import Front
from quire.client.vectors import cosine, probabilities
from quire.errors import RequestError
from quire.types import Request


@dataclass(frozen=True, slots=True)
class Scoring:
    """`requests` are to be run; pair i is made of the vectors of requests `pairs[i]`: one, or two to compare."""

    requests: list[Request]
    pairs: list[tuple[int, ...]]
    kind: str | None

    def scores(self, vectors: Sequence[list[float]]) -> list[float]:
        """The score of each pair, from the vectors of the requests."""
        if self.kind is not None:
            return [probabilities(vectors[pair[0]], self.kind)[0] for pair in self.pairs]
        return [cosine(vectors[first], vectors[second]) for first, second in self.pairs]

    def tokens(self, index: int) -> list[int]:
        """The tokens of pair `index`."""
        return [token for i in self.pairs[index] for token in self.requests[i].tokens]


def plan_scores(
    front: Front,
    new_id: Callable[[], str],
    firsts: Sequence[str],
    seconds: Sequence[str],
    limit: int | None = None,
    priority: int = 0,
) -> Scoring:
    """One first text goes with each of the second ones, or as many go pair by pair. RequestError.

    `limit` is the most tokens of a request, as in Front.truncated.
    """
    if not firsts or not seconds:
        raise RequestError("give at least one text on either side", "text_1" if not firsts else "text_2")
    if len(firsts) not in (1, len(seconds)):
        raise RequestError(f"{len(firsts)} texts cannot be paired with {len(seconds)}", "text_1")
    info = front.info

    def request(tokens: list[int]) -> Request:
        return front.pooled(new_id(), front.truncated(tokens, limit), None, priority)

    if info.scores is None:
        requests = [request(front.encode(text)) for text in [*firsts, *seconds]]
        offset, step = len(firsts), int(len(firsts) > 1)
        return Scoring(requests, [(i * step, offset + i) for i in range(len(seconds))], None)
    if len(info.labels) != 1:
        raise RequestError(f"{info.name} has {len(info.labels)} labels: a score needs one")
    both = zip(list(firsts) * (len(seconds) if len(firsts) == 1 else 1), seconds, strict=True)
    requests = [request(front.pair(first, second)) for first, second in both]
    return Scoring(requests, [(i,) for i in range(len(requests))], info.scores)
