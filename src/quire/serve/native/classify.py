"""/classify: the probabilities of a classifier's labels, for each text."""

from __future__ import annotations

import msgspec
from starlette.requests import Request as HttpRequest

from quire.client.vectors import probabilities
from quire.serve.errors import invalid
from quire.serve.native.protocol import CLASSIFY
from quire.serve.openai.texts import ListAnswer, vectors_for
from quire.serve.service import Service


class Classified(msgspec.Struct):
    """The likeliest label of a text, and the probabilities of all."""

    index: int
    label: str
    probs: list[float]
    num_classes: int


class ClassifyAnswer(ListAnswer[Classified]):
    """Answer of /classify."""


async def classify(service: Service, http: HttpRequest) -> bytes:
    """Read, check, queue and wait."""
    body = await service.read(http, CLASSIFY)
    model, info = service.check_model(body.model), service.front.info
    if info.scores is None:
        raise invalid(f"{model} is not a classifier: it has no labels", "model", "unsupported_parameter")
    found = await vectors_for(service, http, body, "classify-", None, "model")

    def answer() -> bytes:
        data = []
        for i, vector in enumerate(found.vectors):
            probs = probabilities(vector, info.scores) if found.requests[i].activate else vector
            data.append(Classified(i, info.labels[probs.index(max(probs))], probs, len(probs)))
        return found.answer(data)

    return await service.make(len(found.vectors), answer)
