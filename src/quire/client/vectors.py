"""Results made of vectors: embeddings, classes, scores. Knows no model and no HTTP."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Generic, TypeVar

import msgspec

T = TypeVar("T")


class PoolingOutput(msgspec.Struct, frozen=True):
    """The unprocessed vector of the model."""

    data: list[float]


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


def shortened(vector: list[float], dimensions: int | None) -> list[float]:
    """The first dimensions, normalized to length 1 (Matryoshka, Kusupati et al. 2022, arXiv:2205.13147)."""
    if dimensions is None or dimensions == len(vector):
        return vector
    kept = vector[:dimensions]
    length = math.sqrt(math.fsum(x * x for x in kept)) or 1.0
    return [x / length for x in kept]


def probabilities(outputs: Sequence[float], scores: str | None) -> list[float]:
    """The outputs of a classifier after its softmax or sigmoid."""
    if scores == "softmax":
        top = max(outputs)
        weights = [math.exp(x - top) for x in outputs]
        total = math.fsum(weights)
        return [w / total for w in weights]
    return [_sigmoid(x) for x in outputs] if scores == "sigmoid" else list(outputs)


def cosine(first: Sequence[float], second: Sequence[float]) -> float:
    """Cosine similarity, from -1 to 1."""
    dot = math.fsum(a * b for a, b in zip(first, second, strict=True))
    return dot / (math.sqrt(_square(first) * _square(second)) or 1.0)


def _square(vector: Iterable[float]) -> float:
    return math.fsum(x * x for x in vector)


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))
