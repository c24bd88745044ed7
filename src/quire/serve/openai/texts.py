"""Turn texts into vectors, for all endpoints that do so: requests, results and answers."""

from __future__ import annotations

import base64
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

import ml_dtypes
import msgspec
import numpy as np
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from quire.client.chunks import joined, split_long
from quire.client.generation import Generation
from quire.client.vectors import by_token, check_dimensions, shortened
from quire.errors import EngineError
from quire.serve.errors import invalid
from quire.serve.native.protocol import TextsRequest, VectorsRequest
from quire.serve.openai.chat_protocol import ChatRequest
from quire.serve.openai.conversation import render
from quire.serve.service import Service
from quire.serve.stream import watched
from quire.serve.tools import Offer
from quire.types import FinishReason, Pooling, Request

MAX_PROMPTS = 4096


def split_prompts(prompt: Any) -> list[str | list[int]]:
    """The prompts of a field that holds a text, token ids, or a list of either."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise invalid("prompt is empty", "prompt", "invalid_value")
    kinds = {type(item) for item in prompt}
    if len(kinds) > 1:
        raise invalid(
            "prompt must be all texts, all token ids or all lists of token ids", "prompt", "invalid_type"
        )
    if kinds == {int}:
        return [prompt]
    if len(prompt) > MAX_PROMPTS:
        raise invalid(f"one call takes at most {MAX_PROMPTS} prompts", "prompt", "invalid_value")
    return list(prompt)


DTYPES: dict[str, Any] = {
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "fp8_e4m3": ml_dtypes.float8_e4m3fn,
    "fp8_e5m2": ml_dtypes.float8_e5m2,
}


Item = TypeVar("Item")
_encode = msgspec.json.Encoder().encode


class TextUsage(msgspec.Struct):
    """Token counts of all texts."""

    prompt_tokens: int
    total_tokens: int


class ListAnswer(msgspec.Struct, Generic[Item]):
    """Answer of an endpoint with an item for each text, or each pair of texts."""

    id: str
    created: int
    model: str
    data: list[Item]
    usage: TextUsage
    system_fingerprint: str | None = None
    object: Literal["list"] = "list"


@dataclass(frozen=True, slots=True)
class Vectors:
    """The vectors of the texts of one call, in order, with what its answer says of it."""

    id: str
    created: int
    model: str
    requests: list[Request]
    vectors: list[list[float]]
    fingerprint: str

    def answer(self, data: list[Item]) -> bytes:
        """Encode the answer with an item for each text."""
        usage = usage_of(self.requests)
        return _encode(ListAnswer(self.id, self.created, self.model, data, usage, self.fingerprint))

    def as_bytes(
        self, body: VectorsRequest, vectors: list[list[float]], tokens: Sequence[int | None] | None = None
    ) -> Response:
        """Answer with `vectors` as bytes; `tokens` counts the tokens of each text that has a vector of each."""
        usage = usage_of(self.requests)
        head = {"id": self.id, "created": self.created, "model": self.model, "usage": usage}
        return as_bytes(vectors, body, {**head, "system_fingerprint": self.fingerprint}, tokens)


async def vectors_for(
    service: Service, http: HttpRequest, body: TextsRequest, prefix: str, pooling: Pooling | None, one: str
) -> Vectors:
    """Make a vector of each text. 400 for vectors of tokens, naming the field `one`, unless that is empty."""
    model, call_id = service.check_model(body.model), service.new_id(prefix, http, body.request_id)
    requests = await pooled_requests(service, http, body, pooling, call_id)
    if one:
        one_each(requests, one)
    vectors = await run_vectors(service, http, requests, model)
    return Vectors(call_id, http.state.created, model, requests, vectors, service.fingerprint(model))


async def pooled_requests(
    service: Service, http: HttpRequest, body: TextsRequest, pooling: Pooling | None, call_id: str
) -> list[Request]:
    """Make one request for each text, or for the conversation."""
    if (body.input is None) == (body.messages is None):
        raise invalid("give either input or messages", "input", "missing_required_parameter")
    texts: list[str | list[int]] = [] if body.input is None else split_prompts(body.input)
    if body.input in ("", []) or "" in texts:
        raise invalid("input must not be an empty text", "input", "invalid_value")
    front, special = service.front, body.add_special_tokens

    def tokens_of(text: str | list[int]) -> list[int]:
        return front.encode(text, special is not False) if isinstance(text, str) else text

    def make() -> list[Request]:
        if body.messages is not None:
            rows = [front.encode(_rendered(service, body), bool(special))]
        else:
            rows = [tokens_of(text) for text in texts]
        return [
            front.pooled(
                service.next_request_id(call_id),
                front.truncated(tokens, body.truncate_prompt_tokens, body.truncation_side),
                pooling,
                body.priority,
                body.cache_salt or "",
                body.use_activation,
                splits=True,
            )
            for tokens in rows
        ]

    return await service.work(
        http, make, renders=body.messages is not None, slow=body.chat_template is not None
    )


def _rendered(service: Service, body: TextsRequest) -> str:
    conversation = ChatRequest(
        messages=body.messages or [],
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        chat_template=body.chat_template,
        chat_template_kwargs=body.chat_template_kwargs,
    )
    return render(service, conversation, Offer()).text


def usage_of(requests: Sequence[Request]) -> TextUsage:
    count = sum(len(request.tokens) for request in requests)
    return TextUsage(count, count)


async def run_vectors(
    service: Service, http: HttpRequest, requests: list[Request], model: str
) -> list[list[float]]:
    """Queue pooled requests of a model or adapter and wait for their vectors, in order.

    A client that disconnects aborts them.
    """
    service.check_draining()
    front = service.front
    own = [service.assigned(http, request, http.state.request_id, model) for request in requests]
    texts = split_long(own, front.longest_input)
    with service.engine.submit([part for parts in texts for part in parts]) as generation:
        async with watched(http.receive, generation):
            vectors = await _vectors(generation)
    is_embedding = front.info.scores is None
    return [joined(parts, [vectors[part.id] for part in parts], is_embedding) for parts in texts]


async def _vectors(generation: Generation) -> dict[str, list[float]]:
    vectors: dict[str, list[float]] = {}
    while deltas := await generation.take():
        for delta in deltas:
            if delta.finish_reason is FinishReason.ERROR:
                raise delta.failure or EngineError("the engine failed on this text")
            if delta.embedding is not None:
                vectors[delta.request_id] = delta.embedding
    if missing := {request.id for request in generation.requests} - set(vectors):
        raise EngineError(f"{len(missing)} texts ended without a vector")
    return vectors


def vectors_of(service: Service, vectors: list[list[float]], dimensions: int | None) -> list[list[float]]:
    """Cut the vectors to their first `dimensions`. RequestError if the model's may not be cut so."""
    check_dimensions(dimensions, len(vectors[0]), service.front.info.dimensions)
    return [shortened(vector, dimensions) for vector in vectors]


def one_each(requests: Sequence[Request], param: str) -> None:
    """Refuse vectors of tokens, with a 400."""
    if any(request.pooling == "all" for request in requests):
        raise invalid(
            "there is a vector of each token, not one of the text: use /pooling", param, "invalid_value"
        )


def coded(
    vector: list[float], body: VectorsRequest, tokens: int | None = None
) -> list[float | list[float]] | str:
    """Write the vector as JSON numbers, or as base64 of its bytes; `tokens` counts the vectors in it."""
    if body.encoding_format != "float":
        return base64.b64encode(packed(vector, body)).decode()
    return list(vector) if tokens is None else list(by_token(vector, tokens))


def packed(vector: list[float], body: VectorsRequest) -> bytes:
    """Write the numbers as bytes, in the type and byte order that the body asks for."""
    numbers = np.asarray(vector, np.float32).astype(DTYPES[body.embed_dtype])
    native_big = sys.byteorder == "big"
    big = native_big if body.endianness == "native" else body.endianness == "big"
    return numbers.tobytes() if big == native_big else numbers.byteswap().tobytes()


def as_bytes(
    vectors: list[list[float]],
    body: VectorsRequest,
    head: dict[str, Any],
    tokens: Sequence[int | None] | None = None,
) -> Response:
    """Answer with all vectors as bytes, one after another. The header `metadata` describes them, except for bytes_only.

    `tokens` counts the tokens of each text that has a vector of each.
    """
    parts = [packed(vector, body) for vector in vectors]
    headers = {}
    if body.encoding_format == "bytes":
        places, at = [], 0
        for i, (vector, part) in enumerate(zip(vectors, parts, strict=True)):
            end = at + len(part)
            kind = {"embed_dtype": body.embed_dtype, "endianness": body.endianness}
            rows = None if tokens is None else tokens[i]
            shape = [len(vector)] if rows is None else [rows, len(vector) // rows]
            places.append({"index": i, **kind, "start": at, "end": end, "shape": shape})
            at = end
        headers["metadata"] = msgspec.json.encode({**head, "data": places}).decode()
    return Response(b"".join(parts), media_type="application/octet-stream", headers=headers)
