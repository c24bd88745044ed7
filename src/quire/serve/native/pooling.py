"""/pooling: the model's vector of each text, unprocessed: an embedding, or the outputs of a classifier."""

from __future__ import annotations

from typing import Literal

import msgspec
from starlette.requests import Request as HttpRequest

from quire.serve.openai.texts import PoolingRequest, TextUsage, coded, pooled_requests, run_vectors, usage_of
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


decoder = msgspec.json.Decoder(PoolingRequest)
_encode = msgspec.json.Encoder().encode


async def pool(service: Service, http: HttpRequest) -> bytes:
    body = await service.read(http, decoder)
    model, call_id = service.check_model(body.model), service.new_id("pool-", http)
    requests = await pooled_requests(service, body, body.pooling or service.config.pooling, call_id)
    vectors = await run_vectors(service, http, requests)
    data = [Pooled(i, coded(vector, body.encoding_format)) for i, vector in enumerate(vectors)]
    return _encode(PoolingAnswer(call_id, service.created, model, data, usage_of(requests)))
