"""/v1/embeddings: one vector per text, pooled from the final hidden states of any model."""

from __future__ import annotations

from typing import Literal

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from quire.serve.errors import invalid
from quire.serve.native.protocol import EMBEDDINGS
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


class Embedding(msgspec.Struct):
    index: int
    embedding: list[float | list[float]] | str
    object: Literal["embedding"] = "embedding"


class Embeddings(msgspec.Struct):
    """Answer of /v1/embeddings."""

    id: str
    created: int
    model: str
    data: list[Embedding]
    usage: TextUsage
    object: Literal["list"] = "list"


_encode = msgspec.json.Encoder().encode


async def embed(service: Service, http: HttpRequest) -> bytes | Response:
    """Read, check, queue and wait. Vectors come in the order of the input."""
    body = await service.read(http, EMBEDDINGS)
    model = service.check_model(body.model)
    if service.front.info.scores is not None:
        raise invalid(
            f"{model} is a classifier: use /classify, /score or /rerank", "model", "unsupported_parameter"
        )
    call_id = service.new_id("embd-", http, body.request_id)
    requests = await pooled_requests(service, http, body, body.pooling or service.config.pooling, call_id)
    one_each(requests, "pooling")
    vectors = await run_vectors(service, http, requests, model)

    def answer() -> bytes | Response:
        kept, usage = vectors_of(vectors, body.dimensions), usage_of(requests)
        if body.encoding_format.startswith("bytes"):
            head = {"id": call_id, "created": service.created, "model": model, "usage": usage}
            return as_bytes(kept, body, head)
        data = [Embedding(i, coded(vector, body)) for i, vector in enumerate(kept)]
        return _encode(Embeddings(call_id, service.created, model, data, usage))

    return await service.make(len(vectors), answer)
