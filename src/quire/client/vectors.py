"""Vectors that requests end with, as results: embeddings, classes, scores. Knows no model and no HTTP."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Generic, TypeVar

import msgspec

from quire.engine.core import EngineCore
from quire.errors import QuireError
from quire.types import FinishReason, Request

T = TypeVar("T")


class PoolingOutput(msgspec.Struct, frozen=True):
    """The model's vector as it is."""

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
    """What one text (or pair of texts) ended with."""

    request_id: str
    outputs: T
    prompt_token_ids: list[int]
    finished: bool = True


def compute(core: EngineCore, requests: Sequence[Request]) -> list[list[float]]:
    """Run pooled requests to their end; their vectors in order. QuireError where one fails."""
    vectors: dict[str, list[float]] = {}
    try:
        for request in requests:
            core.add(request)
        while core.has_work:
            for delta in core.step():
                if delta.finish_reason is FinishReason.ERROR:
                    raise QuireError(f"request {delta.request_id} failed: {delta.error}")
                if delta.embedding is not None:
                    vectors[delta.request_id] = delta.embedding
    finally:
        for request in requests:
            if request.id not in vectors:
                core.abort(request.id)
        while core.has_work:
            core.step()
    return [vectors[request.id] for request in requests]


def shortened(vector: list[float], dimensions: int | None) -> list[float]:
    """The first dimensions, scaled to length 1 again (Matryoshka, Kusupati et al. 2022, arXiv:2205.13147)."""
    if dimensions is None or dimensions == len(vector):
        return vector
    kept = vector[:dimensions]
    length = math.sqrt(math.fsum(x * x for x in kept)) or 1.0
    return [x / length for x in kept]


def probabilities(outputs: Sequence[float], scores: str | None) -> list[float]:
    """A classifier's outputs through its softmax or sigmoid."""
    if scores == "softmax":
        top = max(outputs)
        weights = [math.exp(x - top) for x in outputs]
        total = math.fsum(weights)
        return [w / total for w in weights]
    return [_sigmoid(x) for x in outputs] if scores == "sigmoid" else list(outputs)


def cosine(first: Sequence[float], second: Sequence[float]) -> float:
    """How alike two vectors are, from -1 to 1."""
    dot = math.fsum(a * b for a, b in zip(first, second, strict=True))
    return dot / (math.sqrt(_square(first) * _square(second)) or 1.0)


def _square(vector: Iterable[float]) -> float:
    return math.fsum(x * x for x in vector)


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))
