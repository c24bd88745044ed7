"""/v1/embeddings: one vector per text, pooled from the final hidden states of any model."""

from __future__ import annotations

from typing import Literal

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from quire.serve.errors import invalid
from quire.serve.native.protocol import EMBEDDINGS
from quire.serve.openai.texts import ListAnswer, coded, vectors_for, vectors_of
from quire.serve.service import Service


class Embedding(msgspec.Struct):
    """The vector of a text."""

    index: int
    embedding: list[float | list[float]] | str
    object: Literal["embedding"] = "embedding"


class Embeddings(ListAnswer[Embedding]):
    """Answer of /v1/embeddings."""


async def embed(service: Service, http: HttpRequest) -> bytes | Response:
    """Read, check, queue and wait. Vectors come in the order of the input."""
    body = await service.read(http, EMBEDDINGS)
    model = service.check_model(body.model)
    if service.front.info.scores is not None:
        raise invalid(
            f"{model} is a classifier: use /classify, /score or /rerank", "model", "unsupported_parameter"
        )
    pooling = body.pooling or service.config.pooling
    found = await vectors_for(service, http, body, "embd-", pooling, "pooling")

    def answer() -> bytes | Response:
        kept = vectors_of(service, found.vectors, body.dimensions)
        if body.encoding_format.startswith("bytes"):
            return found.as_bytes(body, kept)
        return found.answer([Embedding(i, coded(vector, body)) for i, vector in enumerate(kept)])

    return await service.make(len(found.vectors), answer)
