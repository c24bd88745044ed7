"""Results made of vectors: embeddings, classes, scores. Knows no model and no HTTP."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Generic, TypeVar

import msgspec
import numpy as np

from quire.errors import RequestError

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
