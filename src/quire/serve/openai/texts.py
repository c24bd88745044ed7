"""What the endpoints share that turn texts into vectors: bodies, requests, and their results."""

from __future__ import annotations

import base64
import struct
from collections.abc import Sequence
from typing import Literal

import msgspec
from starlette.requests import Request as HttpRequest

from quire.client.generation import Generation
from quire.errors import EngineError
from quire.serve.openai.prompts import split_prompts
from quire.serve.openai.protocol import CountOrAll, Int32, Name, Prompt
from quire.serve.service import Service
from quire.serve.stream import watched
from quire.types import FinishReason, Pooling, Request


class TextsRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The fields of every body whose texts become vectors."""

    input: Prompt
    model: Name | None = None
    user: str | None = None
    add_special_tokens: bool = True
    truncate_prompt_tokens: CountOrAll | None = None
    priority: Int32 = 0


class PoolingRequest(TextsRequest, kw_only=True, forbid_unknown_fields=True):
    """POST /pooling."""

    encoding_format: Literal["float", "base64"] = "float"
    pooling: Pooling | None = None


class TextUsage(msgspec.Struct):
    """Token counts of all texts."""

    prompt_tokens: int
    total_tokens: int


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


def usage_of(requests: Sequence[Request]) -> TextUsage:
    count = sum(len(request.tokens) for request in requests)
    return TextUsage(count, count)


async def run_vectors(service: Service, http: HttpRequest, requests: list[Request]) -> list[list[float]]:
    """Queue pooled requests and wait for their vectors, in order. A client that disconnects aborts them."""
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
    """The vector as JSON numbers, or as base64 of little-endian float32."""
    if encoding == "float":
        return vector
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
