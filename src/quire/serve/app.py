"""The web application: routes, errors in the API's shape, the OpenAPI document. Knows no engine but through Service."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from quire import __version__
from quire.errors import QuireError
from quire.serve import anthropic, chat, completions, embeddings, responses, tokenize, vectors
from quire.serve.dashboard.about import about_model
from quire.serve.dashboard.router import dashboard_router
from quire.serve.dashboard.stats import PageSource
from quire.serve.errors import ErrorBody, ErrorInfo, HttpError, as_http, not_found, unavailable
from quire.serve.gate import Gate, Keys
from quire.serve.protocol import (
    ChatCompletion,
    ChatRequest,
    Completion,
    CompletionRequest,
    ModelCard,
    ModelList,
)
from quire.serve.service import Service
from quire.serve.sse import Answer, Disconnected, reply

ERRORS = (400, 401, 404, 408, 413, 415, 422, 499, 500, 503, 504)

# One event of a stream, as OpenAPI sees it.
EVENT = {
    "type": "object",
    "required": ["data"],
    "properties": {"data": {"type": "string"}, "event": {"type": "string"}},
}

_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class Generating:
    """An endpoint that runs prompts and may stream."""

    path: str
    make: Callable[[Service, HttpRequest], Awaitable[Answer]]
    body: type
    answer: type
    summary: str


@dataclass(frozen=True, slots=True)
class Plain:
    """An endpoint that takes a body and answers it with JSON."""

    path: str
    make: Callable[[Service, HttpRequest], Awaitable[bytes]]
    body: type
    answer: type
    summary: str


ENDPOINTS: tuple[Generating | Plain, ...] = (
    Generating("/v1/completions", completions.complete, CompletionRequest, Completion, "Continue prompts"),
    Generating("/v1/chat/completions", chat.chat, ChatRequest, ChatCompletion, "Answer a conversation"),
    Generating(
        "/v1/responses",
        responses.respond,
        responses.ResponsesRequest,
        responses.ResponseObject,
        "Answer an input",
    ),
    Generating(
        "/v1/messages",
        anthropic.create,
        anthropic.MessagesRequest,
        anthropic.MessageObject,
        "Answer a conversation, as Anthropic does",
    ),
    Plain(
        "/v1/messages/count_tokens",
        anthropic.count,
        anthropic.CountRequest,
        anthropic.TokenCount,
        "Count a conversation's tokens",
    ),
    Plain(
        "/v1/embeddings",
        embeddings.embed,
        embeddings.EmbeddingRequest,
        embeddings.Embeddings,
        "Vectors of texts",
    ),
    *(
        Plain(path, make, body, answer, summary)
        for paths, make, body, answer, summary in (
            (
                "/pooling",
                vectors.pool,
                embeddings.PoolingRequest,
                vectors.PoolingAnswer,
                "Vectors as they are",
            ),
            (
                "/classify",
                vectors.classify,
                vectors.ClassifyRequest,
                vectors.ClassifyAnswer,
                "Classes of texts",
            ),
            ("/score /v1/score", vectors.score, vectors.ScoreRequest, vectors.ScoreAnswer, "Scores of pairs"),
            (
                "/rerank /v1/rerank /v2/rerank",
                vectors.rerank,
                vectors.RerankRequest,
                vectors.RerankAnswer,
                "Documents by how well they suit a query",
            ),
        )
        for path in paths.split()
    ),
    Plain("/tokenize", tokenize.tokenize, tokenize.TokenizeRequest, tokenize.Tokenized, "Text to token ids"),
    Plain(
        "/detokenize",
        tokenize.detokenize,
        tokenize.DetokenizeRequest,
        tokenize.Detokenized,
        "Token ids to text",
    ),
)


def make_app(service: Service) -> FastAPI:
    """The application around one service."""
    app = FastAPI(
        title="Quire", version=__version__, docs_url=None, redoc_url=None, root_path=service.config.root_path
    )
    for endpoint in ENDPOINTS:
        _add_endpoint(app, service, endpoint)
    _add_models(app, service)
    _add_operations(app, service)
    for kind in (
        HttpError,
        QuireError,
        msgspec.MsgspecError,
        UnicodeDecodeError,
        RecursionError,
        HTTPException,
    ):
        app.add_exception_handler(kind, _handle)
    app.add_exception_handler(Exception, _handle)
    config = service.config
    known = {getattr(route, "path", "") for route in app.routes}
    app.add_middleware(
        Gate,
        keys=Keys(config.api_keys()),
        shape=_shaped,
        count=lambda method, path, status: service.metrics.answered(
            method, path if path in known else "other", status
        ),
        show_id=config.enable_request_id_headers,
    )
    app.add_middleware(
        CORSMiddleware,
        allow_origins=list(config.allowed_origins),
        allow_methods=list(config.allowed_methods),
        allow_headers=list(config.allowed_headers),
        allow_credentials=config.allow_credentials,
    )
    app.openapi = lambda: _document(app)  # type: ignore[method-assign]
    return app


def _shaped(path: str, error: HttpError) -> Response:
    """The error as the API of that path says it."""
    body = anthropic.error_body(error) if path.startswith("/v1/messages") else error.body()
    return Response(body, error.status, headers=error.headers, media_type="application/json")


async def _handle(http: HttpRequest, error: Exception) -> Response:
    if isinstance(error, Disconnected):
        return Response(status_code=499)
    if isinstance(error, HTTPException):  # the router's own: 404, 405
        info = ErrorInfo(str(error.detail), "invalid_request_error", None, None)
        error = HttpError(error.status_code, info, dict(error.headers or {}))
    return _shaped(http.scope["path"], as_http(error))


def _add_endpoint(app: FastAPI, service: Service, endpoint: Generating | Plain) -> None:
    async def generate(http: HttpRequest) -> Response:
        answer = await endpoint.make(service, http)
        assert not isinstance(answer, bytes)
        return await reply(http, answer, service.config.sse_keep_alive_interval)

    async def plain(http: HttpRequest) -> Response:
        return Response(await endpoint.make(service, http), media_type="application/json")

    streams = isinstance(endpoint, Generating)
    content: dict[str, Any] = {"application/json": {"schema": _ref(endpoint.answer)}}
    if streams:
        content["text/event-stream"] = {"schema": EVENT}
    app.add_api_route(
        endpoint.path,
        generate if streams else plain,
        methods=["POST"],
        summary=endpoint.summary,
        operation_id=endpoint.path.strip("/").replace("/", "_"),
        response_class=Response,
        responses=_responses(content),
        openapi_extra={
            "requestBody": {
                "required": True,
                "content": {"application/json": {"schema": _ref(endpoint.body)}},
            }
        },
    )


def _add_models(app: FastAPI, service: Service) -> None:
    def card(name: str) -> ModelCard:
        info = service.front.info
        return ModelCard(name, service.created, info.name, info.max_model_len)

    async def models() -> Response:
        return _json(ModelList([card(name) for name in service.names]))

    async def model(model_id: str) -> Response:
        if model_id not in service.names:
            raise not_found(f"The model `{model_id}` does not exist", "model", "model_not_found")
        return _json(card(model_id))

    _get(app, "/v1/models", models, ModelList, "The served names")
    _get(app, "/v1/models/{model_id:path}", model, ModelCard, "One served name")


def _add_operations(app: FastAPI, service: Service) -> None:
    async def health() -> Response:
        if service.healthy:
            return Response()
        raise unavailable(
            "the server is shutting down" if service.draining else f"the engine is {service.engine.state}"
        )

    async def version() -> Response:
        return _json({"version": __version__})

    async def load() -> Response:
        return _json({"server_load": service.engine.num_live})

    async def metrics() -> Response:
        await service.engine.stats(timeout=0.5)
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4")

    async def reset() -> Response:
        await service.engine.reset_prefix_cache()
        return Response()

    async def stats() -> Response:
        await service.engine.stats(timeout=0.5)
        return _json(await source.snapshot())

    source = PageSource(
        service.metrics, service.engine, lambda: _state(service), lambda: about_model(service)
    )
    service.background.append(source.run)

    _get(app, "/health", health, None, "200 while the engine makes progress or idles and answers")
    _get(app, "/ping", health, None, "The same as /health")
    app.add_api_route("/ping", health, methods=["POST"], response_class=Response, responses=_responses({}))
    _get(app, "/version", version, dict[str, str], "Version of the server")
    _get(app, "/load", load, dict[str, int], "Requests that are queued or running")
    _get(app, "/stats", stats, dict[str, Any], "The engine's numbers")
    app.add_api_route("/metrics", metrics, include_in_schema=False)
    app.include_router(dashboard_router(source))
    app.add_api_route(
        "/reset_prefix_cache", reset, methods=["POST"], response_class=Response, responses=_responses({})
    )


def _state(service: Service) -> dict[str, Any]:
    engine = service.engine
    return {
        "model": service.name,
        "healthy": service.healthy,
        "draining": service.draining,
        "requests_live": engine.num_live,
        "requests_queued": engine.num_queued,
    }


def _get(
    app: FastAPI, path: str, handler: Callable[..., Awaitable[Response]], answer: Any, summary: str
) -> None:
    content = {} if answer is None else {"application/json": {"schema": _ref(answer)}}
    app.add_api_route(path, handler, summary=summary, response_class=Response, responses=_responses(content))


def _json(value: Any) -> Response:
    return Response(_encode(value), media_type="application/json")


# --- the OpenAPI document ---------------------------------------------------------------------------------

TYPES = (ErrorBody, ModelList, ModelCard, *(t for e in ENDPOINTS for t in (e.body, e.answer)))


def _ref(kind: Any) -> dict[str, Any]:
    (schema,), _ = msgspec.json.schema_components([kind], ref_template="#/components/schemas/{name}")
    return schema


def _responses(content: dict[str, Any]) -> dict[int | str, dict[str, Any]]:
    error = {"description": "Error", "content": {"application/json": {"schema": {}}}}
    found: dict[int | str, dict[str, Any]] = dict.fromkeys(ERRORS, error)
    found[200] = {"description": "Success", "content": content}
    return found


def _document(app: FastAPI) -> dict[str, Any]:
    """FastAPI's document with the schemas of our structs."""
    if app.openapi_schema is None:
        document = get_openapi(title=app.title, version=app.version, routes=app.routes)
        _, components = msgspec.json.schema_components(TYPES, ref_template="#/components/schemas/{name}")
        document.setdefault("components", {}).setdefault("schemas", {}).update(components)
        document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        app.openapi_schema = document
    return app.openapi_schema
