"""/rerank: documents in the order of how well they match a query."""

from __future__ import annotations

import msgspec
from starlette.requests import Request as HttpRequest

from quire.serve.errors import invalid
from quire.serve.native.protocol import RERANK, RerankDocument
from quire.serve.native.score import plan_pairs
from quire.serve.openai.texts import TextUsage, run_vectors, usage_of
from quire.serve.service import Service


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
