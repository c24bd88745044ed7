"""/v1/embeddings: a vector for each text, pooled from the final hidden states of any model."""

from __future__ import annotations

import base64
import struct
from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec
from msgspec import Meta
from starlette.requests import Request as HttpRequest

from quire.client.generation import Generation
from quire.client.vectors import shortened
from quire.errors import EngineError
from quire.serve.completions import split_prompts
from quire.serve.errors import invalid
from quire.serve.protocol import LogprobCount, Name, Priority, Prompt
from quire.serve.service import Service
from quire.serve.sse import watched
from quire.types import FinishReason, Pooling, Request


class TextsRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What every request says that has a vector made of each of its texts."""

    input: Prompt
    model: Name | None = None
    user: str | None = None
    add_special_tokens: bool = True
    truncate_prompt_tokens: LogprobCount | None = None
    priority: Priority = 0


class PoolingRequest(TextsRequest, kw_only=True, forbid_unknown_fields=True):
    """POST /pooling."""

    encoding_format: Literal["float", "base64"] = "float"
    pooling: Pooling | None = None


class EmbeddingRequest(PoolingRequest, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/embeddings."""

    dimensions: Annotated[int, Meta(ge=1, le=1 << 20)] | None = None


class Embedding(msgspec.Struct):
    index: int
    embedding: list[float] | str
    object: Literal["embedding"] = "embedding"


class EmbeddingUsage(msgspec.Struct):
    prompt_tokens: int
    total_tokens: int


class Embeddings(msgspec.Struct):
    """Answer of /v1/embeddings."""

    id: str
    created: int
    model: str
    data: list[Embedding]
    usage: EmbeddingUsage
    object: Literal["list"] = "list"


decoder = msgspec.json.Decoder(EmbeddingRequest)
_encode = msgspec.json.Encoder().encode


async def embed(service: Service, http: HttpRequest) -> bytes:
    """Read, check, queue and wait. Vectors are made in the model's own way, in the order of the input."""
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


async def pooled_requests(
    service: Service, body: TextsRequest, pooling: Pooling | None, call_id: str
) -> list[Request]:
    """One request for each text."""
    texts = split_prompts(body.input)
    front = service.front

    def make(text: str | list[int]) -> Request:
        tokens = front.encode(text, body.add_special_tokens) if isinstance(text, str) else text
        tokens = front.truncated(tokens, body.truncate_prompt_tokens)
        return front.pooled(service.next_request_id(call_id), tokens, pooling, body.priority)

    size = sum(len(text) for text in texts if isinstance(text, str))
    return await service.work(size, lambda: [make(text) for text in texts])


def usage_of(requests: Sequence[Request]) -> EmbeddingUsage:
    count = sum(len(request.tokens) for request in requests)
    return EmbeddingUsage(count, count)


async def run_vectors(service: Service, http: HttpRequest, requests: list[Request]) -> list[list[float]]:
    """Queue pooled requests and wait; their vectors in order. A client that leaves aborts them."""
    service.check_draining()
    with service.engine.submit(requests) as generation:
        async with watched(http.receive, generation):
            vectors = await _vectors(generation)
    return [vectors[request.id] for request in requests]


async def _vectors(generation: Generation) -> dict[str, list[float]]:
    vectors: dict[str, list[float]] = {}
    while deltas := await generation.take():
        for delta in deltas:
            if delta.finish_reason is FinishReason.ERROR:
                raise EngineError(delta.error or "the engine failed on this text")
            if delta.embedding is not None:
                vectors[delta.request_id] = delta.embedding
    if missing := {request.id for request in generation.requests} - set(vectors):
        raise EngineError(f"{len(missing)} texts ended without a vector")
    return vectors


def coded(vector: list[float], encoding: str) -> list[float] | str:
    """base64 holds little-endian float32, as OpenAI's client reads it."""
    if encoding == "float":
        return vector
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
