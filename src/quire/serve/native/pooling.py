"""/pooling: the model's vector of each text, or of each token: an embedding, or the outputs of a classifier."""

from __future__ import annotations

from typing import Literal

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from quire.serve.errors import invalid
from quire.serve.native.protocol import POOLING, PoolingRequest
from quire.serve.openai.texts import (
    TextUsage,
    as_bytes,
    coded,
    one_each,
    pooled_requests,
    run_vectors,
    usage_of,
    vectors_of,
)
from quire.serve.service import Service
from quire.types import Pooling, Request


class Pooled(msgspec.Struct):
    index: int
    data: list[float | list[float]] | str
    object: Literal["pooling"] = "pooling"


class PoolingAnswer(msgspec.Struct):
    """Answer of /pooling."""

    id: str
    created: int
    model: str
    data: list[Pooled]
    usage: TextUsage
    object: Literal["list"] = "list"


_encode = msgspec.json.Encoder().encode


def _pooling_of(service: Service, body: PoolingRequest) -> Pooling | None:
    """The pooling that the body asks for, by its task or by name. 400 if the model does not do the task."""
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
    body = await service.read(http, POOLING)
    model = service.check_model(body.model)
    call_id = service.new_id("pool-", http, body.request_id)
    requests = await pooled_requests(service, http, body, _pooling_of(service, body), call_id)
    vectors = await run_vectors(service, http, requests, model)
    count = sum(len(r.tokens) if r.pooling == "all" else 1 for r in requests)
    return await service.make(count, lambda: _answer(service, body, model, call_id, requests, vectors))


def _answer(
    service: Service,
    body: PoolingRequest,
    model: str,
    call_id: str,
    requests: list[Request],
    vectors: list[list[float]],
) -> bytes | Response:
    tokens = [len(request.tokens) if request.pooling == "all" else None for request in requests]
    if body.dimensions is not None:
        one_each(requests, "dimensions")
        vectors = vectors_of(vectors, body.dimensions)
    usage = usage_of(requests)
    if body.encoding_format.startswith("bytes"):
        return as_bytes(
            vectors, body, {"id": call_id, "created": service.created, "model": model, "usage": usage}, tokens
        )
    data = [
        Pooled(i, coded(vector, body, count))
        for i, (vector, count) in enumerate(zip(vectors, tokens, strict=True))
    ]
    return _encode(PoolingAnswer(call_id, service.created, model, data, usage))
