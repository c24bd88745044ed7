"""Plans the requests that score pairs of texts, and computes scores from their vectors. Knows no HTTP.

A classifier with one output reads both texts together. For a model that makes a vector of each token, the score is
their late interaction; for any other, the cosine similarity of the embeddings of the two texts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from quire.client.requests import Front
from quire.client.vectors import by_token, cosine, late_interaction, probabilities
from quire.errors import RequestError
from quire.types import Request


@dataclass(frozen=True, slots=True)
class ScoringRules:
    """Rules of inputs: `limit` and `side` as in Front.truncated; `first` and `second` bound the texts of a pair.

    Without `activate`, scores of classifiers are their outputs as they are.
    """

    limit: int | None = None
    side: str | None = None
    first: int | None = None
    second: int | None = None
    activate: bool = True
    priority: int = 0


@dataclass(frozen=True, slots=True)
class Scoring:
    """Run `requests`; the score of pair i comes from the vectors of requests `pairs[i]`: one, or two to compare.

    `kind` is a classifier's function of its outputs; None for embeddings.
    """

    requests: list[Request]
    pairs: list[tuple[int, ...]]
    kind: str | None
    activate: bool = True

    def scores(self, vectors: Sequence[list[float]]) -> list[float]:
        """Compute the score of each pair from the vectors of the requests, in order."""
        if self.kind is not None and not self.activate:
            return [vectors[pair[0]][0] for pair in self.pairs]
        if self.kind is not None:
            return [probabilities(vectors[pair[0]], self.kind)[0] for pair in self.pairs]
        if self.requests[0].pooling == "all":
            found = [by_token(v, len(r.tokens)) for v, r in zip(vectors, self.requests, strict=True)]
            return [late_interaction(found[first], found[second]) for first, second in self.pairs]
        return [cosine(vectors[first], vectors[second]) for first, second in self.pairs]

    def tokens(self, index: int) -> list[int]:
        """Return the tokens of pair `index`."""
        return [token for i in self.pairs[index] for token in self.requests[i].tokens]


NO_RULES = ScoringRules()


def plan_scores(
    front: Front,
    new_id: Callable[[], str],
    firsts: Sequence[str],
    seconds: Sequence[str],
    rules: ScoringRules = NO_RULES,
) -> Scoring:
    """Pair one first text with each second text, or equally many one by one. Raises RequestError."""
    if not firsts or not seconds:
        raise RequestError("give at least one text on each side", "text_1" if not firsts else "text_2")
    if len(firsts) not in (1, len(seconds)):
        raise RequestError(f"{len(firsts)} texts cannot be paired with {len(seconds)}", "text_1")
    info = front.info

    firsts = [front.shortened(text, rules.first) for text in firsts]
    seconds = [front.shortened(text, rules.second) for text in seconds]

    def request(tokens: list[int]) -> Request:
        return front.pooled(new_id(), front.truncated(tokens, rules.limit, rules.side), None, rules.priority)

    if info.scores is None:
        requests = [request(front.encode(text)) for text in [*firsts, *seconds]]
        offset, step = len(firsts), int(len(firsts) > 1)
        return Scoring(requests, [(i * step, offset + i) for i in range(len(seconds))], None)
    if len(info.labels) != 1:
        raise RequestError(f"{info.name} has {len(info.labels)} labels: a score needs one")
    both = zip(list(firsts) * (len(seconds) if len(firsts) == 1 else 1), seconds, strict=True)
    requests = [request(front.pair(first, second)) for first, second in both]
    return Scoring(requests, [(i,) for i in range(len(requests))], info.scores, rules.activate)
