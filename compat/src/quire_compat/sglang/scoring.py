"""/v1/score: how likely each label is as the next token, in SGLang's form, beside Quire's own scores of pairs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from quire.client.outputs import OutputStream
from quire.errors import RequestError
from quire.serve.errors import invalid
from quire.serve.fields.shapes import Fields, Shape
from quire.serve.native import score as native
from quire.serve.native.protocol import SCORE, ScoreRequest
from quire.serve.service import Service
from quire.serve.stream import reply
from quire_compat.sglang.calls import Count, GenerateBody, Sampling
from quire_compat.sglang.generate import GenerateAnswer, queue

LABELS = Shape(
    {
        "query": "a text or token ids that each item follows",
        "items": "a text, texts, or lists of token ids",
        "label_token_ids": "the tokens whose probabilities after query and item are the scores of that item",
        "apply_softmax": "divide the scores of an item by their sum",
        "item_first": "put each item before the query",
    }
)


class ScoreBody(ScoreRequest, kw_only=True):
    """POST /v1/score: Quire's body, or `query`, `items` and `label_token_ids`."""

    query: str | list[Count] | None = None
    items: str | list[str | list[Count]] | None = None  # type: ignore[assignment]
    label_token_ids: list[Count] | None = None
    apply_softmax: bool = False
    item_first: bool = False


FIELDS = Fields(
    path="/v1/score",
    body=ScoreBody,
    taken={**SCORE.taken, **LABELS.taken},
    ignored=SCORE.ignored,
    refused=SCORE.refused,
)


async def score(service: Service, http: HttpRequest) -> bytes | Response:
    """Read, check, queue and wait."""
    body = await service.read(http, FIELDS)
    if body.query is None and body.label_token_ids is None:
        if isinstance(body.items, list) and not all(isinstance(item, str) for item in body.items):
            raise invalid("items that are token ids need query and label_token_ids", "items", "invalid_value")
        return await native.score(service, http, body)
    asked = labelled(body.query, body.items, body.label_token_ids, body.item_first)
    asked.lora_path, asked.priority = body.model, body.priority
    labels, most = asked.token_ids_logprob or [], service.front.info.vocab_size - 1
    if max(labels) > most:
        raise invalid(f"token ids are from 0 to {most}", "label_token_ids", "invalid_value")
    running = await queue(service, http, asked)
    answer = ScoreAnswer(service.check_model(body.model), running, labels, body.apply_softmax)
    return await reply(http, answer, service)


def labelled(
    query: str | list[int] | None,
    items: str | Sequence[str | list[int]] | None,
    labels: list[int] | None,
    item_first: bool,
) -> GenerateBody:
    """Make the call whose first token has the labels' log-probabilities. RequestError names what is missing."""
    for name, value in (("query", query), ("items", items), ("label_token_ids", labels)):
        if value is None or (not value and name != "query"):
            raise RequestError(f"Missing field: {name}. A score needs query, items and label_token_ids", name)
    rows: Sequence[Any] = [items] if isinstance(items, str) else items or ()
    if any(isinstance(item, str) != isinstance(query, str) for item in rows):
        raise RequestError("query and items must both be text, or both be token ids", "items")
    given: Any = query
    prompts = [item + given if item_first else given + item for item in rows]
    texts = isinstance(query, str)
    return GenerateBody(
        text=prompts if texts else None,
        input_ids=None if texts else prompts,
        sampling_params=Sampling(max_new_tokens=1, temperature=0.0),
        return_logprob=True,
        token_ids_logprob=labels,
    )


def scores_of(stream: OutputStream, labels: Sequence[int], softmax: bool) -> list[float]:
    """Return the probabilities of the labels as the first token; with `softmax` among one another."""
    entry = next(iter(stream.output.outputs[0].logprobs or ()))
    found = [entry[label].logprob for label in labels]
    top = max(found) if softmax else 0.0
    weights = [math.exp(value - top) for value in found]
    total = sum(weights) if softmax else 1.0
    return [weight / total for weight in weights]


class ScoreAnswer(GenerateAnswer):
    """Writes a call as SGLang's /v1/score does: a list of scores for each item."""

    def __init__(self, model: str, running: GenerateAnswer, labels: list[int], softmax: bool) -> None:
        self.call, self.streaming = running.call, False
        self._model, self._labels, self._softmax = model, labels, softmax

    def whole(self) -> bytes:
        count = self.call.usage.num_prompt
        answer = {
            "scores": [scores_of(stream, self._labels, self._softmax) for stream in self.call.streams],
            "model": self._model,
            "usage": {"prompt_tokens": count, "completion_tokens": 0, "total_tokens": count},
            "object": "scoring",
            "system_fingerprint": self.call.fingerprint,
        }
        return msgspec.json.encode(answer)
