"""Results made of vectors: embeddings, classes, scores. Knows no model and no HTTP."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import msgspec
import numpy as np

from quire.client.requests import Front
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


T = TypeVar("T")


class PoolingOutput(msgspec.Struct, frozen=True):
    """The unprocessed vector of the model, or one of each token."""

    data: list[float] | list[list[float]]


class EmbeddingOutput(msgspec.Struct, frozen=True):
    embedding: list[float]


class ClassificationOutput(msgspec.Struct, frozen=True):
    """A probability for each label, and the most likely one."""

    probs: list[float]
    label: str

    @property
    def num_classes(self) -> int:
        return len(self.probs)


class ScoringOutput(msgspec.Struct, frozen=True):
    score: float


class VectorRequestOutput(msgspec.Struct, Generic[T], frozen=True):
    """The result for one text, or pair of texts."""

    request_id: str
    outputs: T
    prompt_token_ids: list[int]
    num_cached_tokens: int = 0
    finished: bool = True
    error: str | None = None


def by_token(vectors: list[float], tokens: int) -> list[list[float]]:
    """Split a flat list into the vectors of a text's tokens."""
    width = len(vectors) // tokens
    return [vectors[start : start + width] for start in range(0, len(vectors), width)]


def late_interaction(query: Sequence[Sequence[float]], text: Sequence[Sequence[float]]) -> float:
    """Sum, over the query's tokens, the best product with a token of the text.

    ColBERT (Khattab and Zaharia 2020, arXiv:2004.12832).
    """
    return float((np.array(query) @ np.array(text).T).max(1).sum())


def check_dimensions(wanted: int | None, width: int, allowed: tuple[int, ...] | None) -> None:
    """Raise RequestError if vectors of this width may not be cut so. `allowed` as in ModelCard."""
    if wanted is None or wanted == width:
        return
    if not 1 <= wanted < width:
        raise RequestError(f"dimensions must be from 1 to {width}, the model's", "dimensions")
    if allowed is None:
        why = "the model was not trained for shorter vectors, unless is_matryoshka in config.json or --hf-overrides"
        raise RequestError(f"dimensions: {why} says so", "dimensions")
    if allowed and wanted not in allowed:
        sizes = ", ".join(map(str, allowed))
        raise RequestError(
            f"dimensions must be one of {sizes}, {width}, as the model was trained", "dimensions"
        )


def shortened(vector: list[float], dimensions: int | None) -> list[float]:
    """Cut to the first dimensions, normalized to length 1 (Matryoshka, Kusupati et al. 2022, arXiv:2205.13147)."""
    if dimensions is None or dimensions == len(vector):
        return vector
    kept = vector[:dimensions]
    length = math.sqrt(math.fsum(x * x for x in kept)) or 1.0
    return [x / length for x in kept]


def probabilities(outputs: Sequence[float], scores: str | None) -> list[float]:
    """Apply a classifier's softmax or sigmoid to its outputs."""
    if scores == "softmax":
        top = max(outputs)
        weights = [math.exp(x - top) for x in outputs]
        total = math.fsum(weights)
        return [w / total for w in weights]
    return [_sigmoid(x) for x in outputs] if scores == "sigmoid" else list(outputs)


def cosine(first: Sequence[float], second: Sequence[float]) -> float:
    """Compute the cosine similarity, from -1 to 1."""
    dot = math.fsum(a * b for a, b in zip(first, second, strict=True))
    return dot / (math.sqrt(_square(first) * _square(second)) or 1.0)


def _square(vector: Iterable[float]) -> float:
    return math.fsum(x * x for x in vector)


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))
