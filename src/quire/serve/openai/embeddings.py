"""/v1/embeddings: one vector per text, pooled from the final hidden states of any model."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta
from starlette.requests import Request as HttpRequest

from quire.client.vectors import shortened
from quire.serve.errors import invalid
from quire.serve.openai.texts import PoolingRequest, TextUsage, coded, pooled_requests, run_vectors, usage_of
from quire.serve.service import Service


class EmbeddingRequest(PoolingRequest, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/embeddings."""

    dimensions: Annotated[int, Meta(ge=1, le=1 << 20)] | None = None


class Embedding(msgspec.Struct):
    index: int
    embedding: list[float] | str
    object: Literal["embedding"] = "embedding"


class Embeddings(msgspec.Struct):
    """Answer of /v1/embeddings."""

    id: str
    created: int
    model: str
    data: list[Embedding]
    usage: TextUsage
    object: Literal["list"] = "list"


decoder = msgspec.json.Decoder(EmbeddingRequest)
_encode = msgspec.json.Encoder().encode


async def embed(service: Service, http: HttpRequest) -> bytes:
    """Read, check, queue and wait. Vectors come in the order of the input."""
    body = await service.read(http, decoder)
    model = service.check_model(body.model)
    if service.front.info.scores is not None:
        raise invalid(
            f"{model} is a classifier: use /classify, /score or /rerank", "model", "unsupported_parameter"
        )
    call_id = service.new_id("embd-", http)
    requests = await pooled_requests(service, body, body.pooling or service.config.pooling, call_id)
    vectors = await run_vectors(service, http, requests)
    width = len(vectors[0])
    if body.dimensions is not None and body.dimensions > width:
        raise invalid(f"dimensions can be at most the model's {width}", "dimensions", "invalid_value")
    data = [
        Embedding(i, coded(shortened(vector, body.dimensions), body.encoding_format))
        for i, vector in enumerate(vectors)
    ]
    return _encode(Embeddings(call_id, service.created, model, data, usage_of(requests)))
