"""/pooling: the model's vector of each text, unprocessed: an embedding, or the outputs of a classifier."""

from __future__ import annotations

from typing import Literal

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from quire.serve.fields.native import POOLING
from quire.serve.openai.texts import (
    TextUsage,
    as_bytes,
    coded,
    pooled_requests,
    run_vectors,
    usage_of,
    vectors_of,
)
from quire.serve.service import Service


class Pooled(msgspec.Struct):
    index: int
    data: list[float] | str
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


async def pool(service: Service, http: HttpRequest) -> bytes | Response:
    body = await service.read(http, POOLING)
    model, call_id = service.check_model(body.model), service.new_id("pool-", http, body.request_id)
    requests = await pooled_requests(service, http, body, body.pooling or service.config.pooling, call_id)
    vectors = vectors_of(await run_vectors(service, http, requests), body.dimensions)
    usage = usage_of(requests)
    if body.encoding_format.startswith("bytes"):
        return as_bytes(
            vectors, body, {"id": call_id, "created": service.created, "model": model, "usage": usage}
        )
    data = [Pooled(i, coded(vector, body)) for i, vector in enumerate(vectors)]
    return _encode(PoolingAnswer(call_id, service.created, model, data, usage))
