"""/pooling and /classify: the vectors of texts or of their tokens, and the probabilities of labels."""

from __future__ import annotations

from typing import Literal

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from quire.client.vectors import probabilities
from quire.serve.errors import invalid
from quire.serve.native.protocol import CLASSIFY, POOLING, PoolingRequest
from quire.serve.openai.texts import ListAnswer, Vectors, coded, one_each, vectors_for, vectors_of
from quire.serve.service import Service
from quire.types import Pooling


class Pooled(msgspec.Struct):
    """The vector of a text, or the vectors of its tokens."""

    index: int
    data: list[float | list[float]] | str
    object: Literal["pooling"] = "pooling"


class PoolingAnswer(ListAnswer[Pooled]):
    """Answer of /pooling."""


def _pooling_of(service: Service, body: PoolingRequest) -> Pooling | None:
    """Choose the pooling by the body's task, or by name. 400 if the model does not do the task."""
    task, is_classifier = body.task, service.front.info.scores is not None
    if task is None or task == "encode":
        return body.pooling or service.config.pooling
    if task.endswith("classify") != is_classifier:
        kind = "a classifier" if is_classifier else "not a classifier"
        raise invalid(f"task {task}: {service.name} is {kind}", "task", "unsupported_parameter")
    if not task.startswith("token_"):
        return body.pooling or service.config.pooling
    if body.pooling not in (None, "all"):
        raise invalid(f"task {task} contradicts pooling {body.pooling}", "task", "invalid_value")
    return "all"


async def pool(service: Service, http: HttpRequest) -> bytes | Response:
    """Read, check, queue and wait."""
    body = await service.read(http, POOLING)
    service.check_model(body.model)
    found = await vectors_for(service, http, body, "pool-", _pooling_of(service, body), "")
    count = sum(len(r.tokens) if r.pooling == "all" else 1 for r in found.requests)
    return await service.make(count, lambda: _answer(service, body, found))


def _answer(service: Service, body: PoolingRequest, found: Vectors) -> bytes | Response:
    tokens = [len(request.tokens) if request.pooling == "all" else None for request in found.requests]
    vectors = found.vectors
    if body.dimensions is not None:
        one_each(found.requests, "dimensions")
        vectors = vectors_of(service, vectors, body.dimensions)
    if body.encoding_format.startswith("bytes"):
        return found.as_bytes(body, vectors, tokens)
    pairs = enumerate(zip(vectors, tokens, strict=True))
    return found.answer([Pooled(i, coded(vector, body, count)) for i, (vector, count) in pairs])


class Classified(msgspec.Struct):
    """The likeliest label of a text, and the probabilities of all."""

    index: int
    label: str
    probs: list[float]
    num_classes: int


class ClassifyAnswer(ListAnswer[Classified]):
    """Answer of /classify."""


async def classify(service: Service, http: HttpRequest) -> bytes:
    """Read, check, queue and wait."""
    body = await service.read(http, CLASSIFY)
    model, info = service.check_model(body.model), service.front.info
    if info.scores is None:
        raise invalid(f"{model} is not a classifier: it has no labels", "model", "unsupported_parameter")
    found = await vectors_for(service, http, body, "classify-", None, "model")

    def answer() -> bytes:
        data = []
        for i, vector in enumerate(found.vectors):
            probs = probabilities(vector, info.scores) if found.requests[i].activate else vector
            data.append(Classified(i, info.labels[probs.index(max(probs))], probs, len(probs)))
        return found.answer(data)

    return await service.make(len(found.vectors), answer)
