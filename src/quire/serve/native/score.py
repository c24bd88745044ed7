"""/score and /rerank: how well texts match; /rerank puts documents in order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec
from starlette.requests import Request as HttpRequest

from quire.client.scoring import Scoring, ScoringRules, plan_scores
from quire.serve.errors import invalid
from quire.serve.native.protocol import RERANK, SCORE, PairsRequest, RerankDocument, ScoreRequest
from quire.serve.openai.texts import MAX_PROMPTS, ListAnswer, TextUsage, Vectors, run_vectors, usage_of
from quire.serve.service import Service


class Scored(msgspec.Struct):
    """The score of a pair of texts."""

    index: int
    score: float
    object: Literal["score"] = "score"


class ScoreAnswer(ListAnswer[Scored]):
    """Answer of /score."""


_FIRSTS = ("text_1", "queries", "data_1")
_SECONDS = ("text_2", "documents", "items", "data_2")


async def score(service: Service, http: HttpRequest, body: ScoreRequest | None = None) -> bytes:
    """Read a body unless it is given, check, queue and wait."""
    body = body or await service.read(http, SCORE)
    model, call_id = service.check_model(body.model), service.new_id("score-", http, body.request_id)
    firsts, seconds = _texts(body, _FIRSTS), _texts(body, _SECONDS)
    scoring = await plan_pairs(service, http, body, firsts, seconds, call_id)
    vectors = await run_vectors(service, http, scoring.requests, model)
    fingerprint = service.fingerprint(model)
    found = Vectors(call_id, http.state.created, model, scoring.requests, vectors, fingerprint)

    def answer() -> bytes:
        return found.answer([Scored(i, value) for i, value in enumerate(scoring.scores(vectors))])

    return await service.make(len(vectors), answer)


def _texts(body: ScoreRequest, names: Sequence[str]) -> list[str]:
    """Return the texts of the one field of `names` that is given."""
    given = [name for name in names if getattr(body, name) is not None]
    if len(given) != 1:
        what = f"{given[0]} and {given[1]} mean the same" if given else f"Missing field: {names[0]}"
        code = "invalid_value" if given else "missing_required_parameter"
        raise invalid(f"{what}: give one of {', '.join(names)}", given[1] if given else names[0], code)
    value: str | list[str] = getattr(body, given[0])
    return [value] if isinstance(value, str) else value


async def plan_pairs(
    service: Service,
    http: HttpRequest,
    body: PairsRequest,
    firsts: Sequence[str],
    seconds: Sequence[str],
    call_id: str,
) -> Scoring:
    """Plan the requests to run, and the scores out of their vectors. 400 for too many texts."""
    if max(len(firsts), len(seconds)) > MAX_PROMPTS:
        raise invalid(f"one call takes at most {MAX_PROMPTS} texts", None, "invalid_value")
    if body.instruction:
        firsts = [f"{body.instruction}\n{text}" for text in firsts]
    rules = ScoringRules(
        body.truncate_prompt_tokens,
        body.truncation_side,
        body.max_tokens_per_query or None,
        body.max_tokens_per_doc or None,
        service.front.activates if body.use_activation is None else body.use_activation,
        body.priority,
    )

    def plan() -> Scoring:
        return plan_scores(service.front, lambda: service.next_request_id(call_id), firsts, seconds, rules)

    return await service.work(http, plan)


class Ranked(msgspec.Struct, omit_defaults=True):
    index: int
    relevance_score: float
    document: RerankDocument | None = None


class RerankAnswer(msgspec.Struct):
    """Answer of /rerank, the best document first."""

    id: str
    model: str
    usage: TextUsage
    results: list[Ranked]
    system_fingerprint: str | None = None


_encode = msgspec.json.Encoder().encode


async def rerank(service: Service, http: HttpRequest) -> bytes:
    """Read, check, queue and wait. Documents with equal scores keep their order."""
    body = await service.read(http, RERANK)
    model = service.check_model(body.model)
    call_id = service.new_id("rerank-", http, body.request_id)
    if (body.query is None) == (body.queries is None):
        raise invalid("give one of query, queries", "query", "missing_required_parameter")
    query = body.query or body.queries or ""
    texts = [document if isinstance(document, str) else document.text for document in body.documents]
    scoring = await plan_pairs(service, http, body, [query], texts, call_id)
    vectors = await run_vectors(service, http, scoring.requests, model)
    scores = await service.make(len(vectors), lambda: scoring.scores(vectors))
    best = sorted(range(len(scores)), key=lambda i: -scores[i])[: body.top_n or None]
    shown = texts if body.return_documents else [None] * len(scores)
    results = [
        Ranked(i, scores[i], None if text is None else RerankDocument(text))
        for i, text in ((i, shown[i]) for i in best)
    ]
    usage = usage_of(scoring.requests)
    return _encode(RerankAnswer(call_id, model, usage, results, service.fingerprint(model)))
