"""/classify: the probabilities of a classifier's labels, for each text."""

from __future__ import annotations

from typing import Literal

import msgspec
from starlette.requests import Request as HttpRequest

from quire.client.vectors import probabilities
from quire.serve.errors import invalid
from quire.serve.native.protocol import CLASSIFY
from quire.serve.openai.texts import TextUsage, one_each, pooled_requests, run_vectors, usage_of
from quire.serve.service import Service


class Classified(msgspec.Struct):
    index: int
    label: str
    probs: list[float]
    num_classes: int


class ClassifyAnswer(msgspec.Struct):
    """Answer of /classify."""

    id: str
    created: int
    model: str
    data: list[Classified]
    usage: TextUsage
    object: Literal["list"] = "list"


_encode = msgspec.json.Encoder().encode


async def classify(service: Service, http: HttpRequest) -> bytes:
    body = await service.read(http, CLASSIFY)
    model = service.check_model(body.model)
    call_id = service.new_id("classify-", http, body.request_id)
    info = service.front.info
    if info.scores is None:
        raise invalid(f"{model} is not a classifier: it has no labels", "model", "unsupported_parameter")
    requests = await pooled_requests(service, http, body, None, call_id)
    one_each(requests, "model")
    vectors = await run_vectors(service, http, requests, model)

    def answer() -> bytes:
        data = []
        for i, vector in enumerate(vectors):
            probs = vector if body.use_activation is False else probabilities(vector, info.scores)
            data.append(Classified(i, info.labels[probs.index(max(probs))], probs, len(probs)))
        return _encode(ClassifyAnswer(call_id, service.created, model, data, usage_of(requests)))

    return await service.make(len(vectors), answer)
