"""/pooling, /classify, /score and /rerank, as vLLM has them: what a model says of texts without writing any."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec
from msgspec import Meta
from starlette.requests import Request as HttpRequest

from quire.client.scoring import Scoring, plan_scores
from quire.client.vectors import probabilities
from quire.serve.completions import MAX_PROMPTS
from quire.serve.embeddings import (
    EmbeddingUsage,
    PoolingRequest,
    TextsRequest,
    coded,
    pooled_requests,
    run_vectors,
    usage_of,
)
from quire.serve.errors import invalid
from quire.serve.protocol import LogprobCount, Name, Priority
from quire.serve.service import Service

Texts = str | list[str]


class ClassifyRequest(TextsRequest, kw_only=True, forbid_unknown_fields=True):
    """POST /classify."""


class ScoreRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /score."""

    text_1: Texts
    text_2: Texts
    model: Name | None = None
    truncate_prompt_tokens: LogprobCount | None = None
    priority: Priority = 0


class RerankRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /rerank. `top_n` 0 is all."""

    query: str
    documents: list[str]
    model: Name | None = None
    top_n: Annotated[int, Meta(ge=0, le=1 << 31)] = 0
    return_documents: bool = True
    truncate_prompt_tokens: LogprobCount | None = None
    priority: Priority = 0


class Pooled(msgspec.Struct):
    index: int
    data: list[float] | str
    object: Literal["pooling"] = "pooling"


class Classified(msgspec.Struct):
    index: int
    label: str
    probs: list[float]
    num_classes: int


class Scored(msgspec.Struct):
    index: int
    score: float
    object: Literal["score"] = "score"


class PoolingAnswer(msgspec.Struct):
    """Answer of /pooling."""

    id: str
    created: int
    model: str
    data: list[Pooled]
    usage: EmbeddingUsage
    object: Literal["list"] = "list"


class ClassifyAnswer(msgspec.Struct):
    """Answer of /classify."""

    id: str
    created: int
    model: str
    data: list[Classified]
    usage: EmbeddingUsage
    object: Literal["list"] = "list"


class ScoreAnswer(msgspec.Struct):
    """Answer of /score."""

    id: str
    created: int
    model: str
    data: list[Scored]
    usage: EmbeddingUsage
    object: Literal["list"] = "list"


class RerankDocument(msgspec.Struct):
    text: str


class Ranked(msgspec.Struct, omit_defaults=True):
    index: int
    relevance_score: float
    document: RerankDocument | None = None


class RerankAnswer(msgspec.Struct):
    """Answer of /rerank, the best document first."""

    id: str
    model: str
    usage: EmbeddingUsage
    results: list[Ranked]


_pooling = msgspec.json.Decoder(PoolingRequest)
_classify = msgspec.json.Decoder(ClassifyRequest)
_score = msgspec.json.Decoder(ScoreRequest)
_rerank = msgspec.json.Decoder(RerankRequest)
_encode = msgspec.json.Encoder().encode


async def pool(service: Service, http: HttpRequest) -> bytes:
    """The model's vector of each text as it is: an embedding, or a classifier's outputs."""
    body = await service.read(http, _pooling)
    model, call_id = service.check_model(body.model), service.new_id("pool-", http)
    requests = await pooled_requests(service, body, body.pooling or service.config.pooling, call_id)
    vectors = await run_vectors(service, http, requests)
    data = [Pooled(i, coded(vector, body.encoding_format)) for i, vector in enumerate(vectors)]
    return _encode(PoolingAnswer(call_id, service.created, model, data, usage_of(requests)))


async def classify(service: Service, http: HttpRequest) -> bytes:
    """The probabilities of a classifier's labels."""
    body = await service.read(http, _classify)
    model, call_id = service.check_model(body.model), service.new_id("classify-", http)
    info = service.front.info
    if info.scores is None:
        raise invalid(f"{model} is no classifier: it has no labels", "model", "unsupported_parameter")
    requests = await pooled_requests(service, body, None, call_id)
    data = []
    for i, vector in enumerate(await run_vectors(service, http, requests)):
        probs = probabilities(vector, info.scores)
        data.append(Classified(i, info.labels[probs.index(max(probs))], probs, len(probs)))
    return _encode(ClassifyAnswer(call_id, service.created, model, data, usage_of(requests)))


async def score(service: Service, http: HttpRequest) -> bytes:
    """How well each second text suits the first."""
    body = await service.read(http, _score)
    model, call_id = service.check_model(body.model), service.new_id("score-", http)
    firsts = [body.text_1] if isinstance(body.text_1, str) else body.text_1
    seconds = [body.text_2] if isinstance(body.text_2, str) else body.text_2
    scoring = await _scoring(service, body, firsts, seconds, call_id)
    scores = scoring.scores(await run_vectors(service, http, scoring.requests))
    data = [Scored(i, value) for i, value in enumerate(scores)]
    return _encode(ScoreAnswer(call_id, service.created, model, data, usage_of(scoring.requests)))


async def rerank(service: Service, http: HttpRequest) -> bytes:
    """Documents by how well they suit the query; equal ones stay in order."""
    body = await service.read(http, _rerank)
    model, call_id = service.check_model(body.model), service.new_id("rerank-", http)
    scoring = await _scoring(service, body, [body.query], body.documents, call_id)
    scores = scoring.scores(await run_vectors(service, http, scoring.requests))
    best = sorted(range(len(scores)), key=lambda i: -scores[i])[: body.top_n or None]
    shown = body.documents if body.return_documents else [None] * len(scores)
    results = [
        Ranked(i, scores[i], None if text is None else RerankDocument(text))
        for i, text in ((i, shown[i]) for i in best)
    ]
    return _encode(RerankAnswer(call_id, model, usage_of(scoring.requests), results))


async def _scoring(
    service: Service,
    body: ScoreRequest | RerankRequest,
    firsts: Sequence[str],
    seconds: Sequence[str],
    call_id: str,
) -> Scoring:
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
