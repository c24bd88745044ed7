"""/score: how well pairs of texts match."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec
from starlette.requests import Request as HttpRequest

from quire.client.scoring import Scoring, plan_scores
from quire.serve.errors import invalid
from quire.serve.openai.prompts import MAX_PROMPTS
from quire.serve.openai.protocol import CountOrAll, Int32, Name
from quire.serve.openai.texts import TextUsage, run_vectors, usage_of
from quire.serve.service import Service

Texts = str | list[str]


class PairsRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The fields of every body whose texts are scored in pairs."""

    model: Name | None = None
    truncate_prompt_tokens: CountOrAll | None = None
    priority: Int32 = 0


class ScoreRequest(PairsRequest, kw_only=True, forbid_unknown_fields=True):
    """POST /score: one first text for all second texts, or as many as there are second texts."""

    text_1: Texts
    text_2: Texts


class Scored(msgspec.Struct):
    index: int
    score: float
    object: Literal["score"] = "score"


class ScoreAnswer(msgspec.Struct):
    """Answer of /score."""

    id: str
    created: int
    model: str
    data: list[Scored]
    usage: TextUsage
    object: Literal["list"] = "list"


decoder = msgspec.json.Decoder(ScoreRequest)
_encode = msgspec.json.Encoder().encode


async def score(service: Service, http: HttpRequest) -> bytes:
    body = await service.read(http, decoder)
    model, call_id = service.check_model(body.model), service.new_id("score-", http)
    firsts = [body.text_1] if isinstance(body.text_1, str) else body.text_1
    seconds = [body.text_2] if isinstance(body.text_2, str) else body.text_2
    scoring = await plan_pairs(service, body, firsts, seconds, call_id)
    scores = scoring.scores(await run_vectors(service, http, scoring.requests))
    data = [Scored(i, value) for i, value in enumerate(scores)]
    return _encode(ScoreAnswer(call_id, service.created, model, data, usage_of(scoring.requests)))


async def plan_pairs(
    service: Service,
    body: PairsRequest,
    firsts: Sequence[str],
    seconds: Sequence[str],
    call_id: str,
) -> Scoring:
    """The requests to run, and the scores out of their vectors. 400 for too many texts."""
    if max(len(firsts), len(seconds)) > MAX_PROMPTS:
        raise invalid(f"one call takes at most {MAX_PROMPTS} texts", None, "invalid_value")

    def plan() -> Scoring:
        return plan_scores(
            service.front,
            lambda: service.next_request_id(call_id),
            firsts,
            seconds,
            body.truncate_prompt_tokens,
            body.priority,
        )

    return await service.work(sum(map(len, [*firsts, *seconds])), plan)
