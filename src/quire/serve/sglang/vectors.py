"""/encode and /classify in SGLang's form: the vectors of texts."""

from __future__ import annotations

import time
from typing import Any

import msgspec
from starlette.requests import Request as HttpRequest

from quire.client.sglang import ids_of, prompts_of
from quire.serve.errors import invalid
from quire.serve.fields.sglang import CLASSIFY, ENCODE, EmbedFields
from quire.serve.native.protocol import TextsRequest
from quire.serve.openai.texts import one_each, pooled_requests, run_vectors
from quire.serve.service import Service

_encode = msgspec.json.Encoder().encode


async def encode(service: Service, http: HttpRequest) -> bytes:
    """The embeddings of texts. 400: the model is a classifier, or makes a vector of each token."""
    return await _vectors(service, http, ENCODE, True)


async def classify(service: Service, http: HttpRequest) -> bytes:
    """The outputs of a classifier or reward model, before softmax or sigmoid. 400: the model is none."""
    if service.front.info.scores is None:
        raise invalid(f"{service.name} is not a classifier: use /encode", None, "unsupported_parameter")
    return await _vectors(service, http, CLASSIFY, False)


async def _vectors(service: Service, http: HttpRequest, fields: EmbedFields, activate: bool) -> bytes:
    began = time.monotonic()
    body = await service.read(http, fields)
    prompts, single = prompts_of(body.text, body.input_ids)
    rids = [body.rid] if single else ids_of(body.rid, len(prompts))
    texts = TextsRequest(input=[*prompts], priority=body.priority, use_activation=activate)
    requests = await pooled_requests(service, http, texts, None, service.new_id("", http))
    one_each(requests, "model")
    vectors = await run_vectors(service, http, requests, service.name)

    def answer() -> bytes:
        seconds = time.monotonic() - began
        found: list[dict[str, Any]] = [
            {
                "embedding": vector,
                "meta_info": {
                    "id": rid or request.id,
                    "prompt_tokens": len(request.tokens),
                    "finish_reason": {"type": "length", "length": 0},
                    "e2e_latency": seconds,
                },
            }
            for rid, request, vector in zip(rids, requests, vectors, strict=True)
        ]
        return _encode(found[0] if single else found)

    return await service.make(len(vectors), answer)
