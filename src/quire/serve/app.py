"""The web application: the table of endpoints, the middleware, and errors in each API's shape."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
from fastapi import FastAPI
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import Scope

from quire import __version__
from quire.errors import QuireError
from quire.hooks import ENDPOINTS as ENTRY_POINTS
from quire.hooks import load_hooks
from quire.lazy import Lazy
from quire.serve.admission import VERSION, Admission, CountAnswer, HeadLimits, is_anthropic, route_path
from quire.serve.anthropic import messages
from quire.serve.anthropic.protocol import CountRequest, MessageObject, MessagesRequest, error_body
from quire.serve.endpoints import Dialect, Endpoint, Generating, Plain
from quire.serve.errors import ErrorInfo, HttpError, as_http
from quire.serve.extensions import add_middleware
from quire.serve.native import pooling, programs, score, tokenize
from quire.serve.native.control import operators_paths
from quire.serve.native.operations import add_operations
from quire.serve.native.programs import ProgramRequest
from quire.serve.native.protocol import (
    ClassifyRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
    TokenizeRequest,
)
from quire.serve.openai import chat, completions, embeddings, models, responses
from quire.serve.openai.adapters import add_adapters
from quire.serve.openai.chat_protocol import ChatCompletion, ChatRequest
from quire.serve.openai.protocol import Completion, CompletionRequest
from quire.serve.openai.responses_protocol import InputTokens, ResponseObject, ResponsesRequest
from quire.serve.openapi import EVENT, add_get, document, json_response, reference, responses_of
from quire.serve.service import Service
from quire.serve.stream import Disconnected, reply
from quire.serve.web_options import WebConfig

if TYPE_CHECKING:
    from quire.serve import elsewhere, internal, resumption
else:
    elsewhere = Lazy("quire.serve.elsewhere")
    resumption = Lazy("quire.serve.resumption")
    internal = Lazy("quire.serve.internal")

log = logging.getLogger("quire.serve")


ENDPOINTS: tuple[Endpoint, ...] = (
    Generating("/v1/completions", completions.complete, CompletionRequest, Completion, "Continue prompts"),
    Generating("/v1/chat/completions", chat.chat, ChatRequest, ChatCompletion, "Answer a conversation"),
    Generating("/v1/responses", responses.respond, ResponsesRequest, ResponseObject, "Answer an input"),
    Generating("/v1/programs", programs.run_program, ProgramRequest, programs.ProgramObject, "Run a program"),
    Plain(
        "/v1/chat/completions/input_tokens",
        chat.count_input,
        ChatRequest,
        InputTokens,
        "Count the tokens of a conversation",
    ),
    Plain(
        "/v1/responses/input_tokens",
        responses.count_input,
        ResponsesRequest,
        InputTokens,
        "Count the tokens of an input",
    ),
    Generating(
        "/v1/messages", messages.create, MessagesRequest, MessageObject, "Answer a conversation (Anthropic)"
    ),
    Plain(
        "/v1/messages/count_tokens",
        messages.count,
        CountRequest,
        messages.TokenCount,
        "Count the tokens of a conversation (Anthropic)",
    ),
    Plain(
        "/v1/embeddings",
        embeddings.embed,
        EmbeddingRequest,
        embeddings.Embeddings,
        "Vectors of texts",
        binary=True,
    ),
    Plain(
        "/pooling",
        pooling.pool,
        PoolingRequest,
        pooling.PoolingAnswer,
        "Unprocessed vectors of texts",
        binary=True,
    ),
    Plain(
        "/classify", pooling.classify, ClassifyRequest, pooling.ClassifyAnswer, "Class probabilities of texts"
    ),
    *(
        Plain(path, score.score, ScoreRequest, score.ScoreAnswer, "Scores of pairs of texts")
        for path in ("/score", "/v1/score")
    ),
    *(
        Plain(path, score.rerank, RerankRequest, score.RerankAnswer, "Documents ranked for a query")
        for path in ("/rerank", "/v1/rerank", "/v2/rerank")
    ),
    Plain("/tokenize", tokenize.tokenize, TokenizeRequest, tokenize.Tokenized, "Text to token ids"),
    Plain("/detokenize", tokenize.detokenize, DetokenizeRequest, tokenize.Detokenized, "Token ids to text"),
)


def make_app(service: Service) -> FastAPI:
    """The application around one service."""
    app = make_routes(service)
    add_middleware(app, service.config)
    guard(app, service.config, service.metrics.answered, service.load)
    return app


def make_routes(service: Service) -> FastAPI:
    """Make the endpoints of one service, which `guard` or another application protects."""
    config = service.config
    app = FastAPI(
        title="Quire",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        openapi_url=None if config.disable_fastapi_docs else "/openapi.json",
        root_path=config.root_path,
    )
    dialects: list[Dialect] = load_hooks(ENTRY_POINTS)
    endpoints = with_dialects(dialects)
    for endpoint in endpoints:
        _add_endpoint(app, service, endpoint)
    _add_models(app, service)
    for dialect in dialects:
        if dialect.add_routes is not None:
            dialect.add_routes(app, service)
    add_operations(app, service)
    if config.router_api_key:
        service.load = internal.Load(service.engine)
        internal.add_internal(app, service)
        streaming = frozenset(endpoint.path for endpoint in endpoints if isinstance(endpoint, Generating))
        resumption.add_resumption(app, service, streaming)
    bodies = tuple({endpoint.body: None for endpoint in endpoints})
    answers = (
        *dict.fromkeys(e.answer for e in endpoints if isinstance(e.answer, type)),
        programs.ProgramsInfo,
    )
    app.openapi = lambda: document(app, bodies, answers)  # type: ignore[method-assign]
    return app


def with_dialects(dialects: list[Dialect]) -> list[Endpoint]:
    """List the endpoints with a body; a dialect's stands in place of Quire's own with the same path."""
    added = (endpoint for dialect in dialects for endpoint in dialect.endpoints)
    return [*{endpoint.path: endpoint for endpoint in (*ENDPOINTS, *added)}.values()]


def guard(
    app: Starlette, config: WebConfig, count: CountAnswer, load: Callable[[], bytes] | None = None
) -> None:
    """Put keys, limits on heads and CORS before the application, and errors in the shape of each API.

    Paths without a route are counted as "other". Answers to routers tell the `load`.
    """
    add_handlers(app)
    keys, known = config.keys(), {getattr(route, "path", "") for route in app.routes}
    app.add_middleware(
        Admission,
        keys=keys,
        for_operators=operators_paths(app),
        error_response=_error_response,
        count=lambda method, path, status: count(method, path if path in known else "other", status),
        show_id=config.enable_request_id_headers,
        load=load,
        limits=HeadLimits(config.h11_max_header_count, config.h11_max_incomplete_event_size),
    )
    app.add_middleware(
        CORSMiddleware,
        allow_origins=list(config.allowed_origins or (() if keys.private else ("*",))),
        allow_methods=list(config.allowed_methods),
        allow_headers=list(config.allowed_headers),
        allow_credentials=config.allow_credentials,
    )


def add_handlers(app: Starlette) -> None:
    """Answer errors in the shape of each API."""
    for kind in (
        HttpError,
        QuireError,
        msgspec.MsgspecError,
        UnicodeDecodeError,
        RecursionError,
        HTTPException,
        Exception,
    ):
        app.add_exception_handler(kind, _handle)


def _error_response(scope: Scope, error: HttpError) -> Response:
    """The error in the shape of the API that the path belongs to. Its reason is logged at debug level."""
    path, info = route_path(scope), error.info
    fields = {"request_id": scope.get("state", {}).get("request_id"), "status": error.status, "path": path}
    named = {name: value for name, value in (("param", info.param), ("code", info.code)) if value is not None}
    log.debug("refused: %s", info.message, extra={"fields": {**fields, **named}})
    shaped = is_anthropic(path, Headers(scope=scope))
    body = error_body(error, fields["request_id"]) if shaped else error.body()
    return Response(body, error.status, headers=error.headers, media_type="application/json")


async def _handle(http: HttpRequest, error: Exception) -> Response:
    if isinstance(error, Disconnected):
        return Response(status_code=499)
    if isinstance(error, HTTPException):  # the router's own: 404, 405
        said = error.detail
        if error.status_code == 404:
            served = [getattr(route, "path", "") for route in http.app.routes]
            said += elsewhere.hint(route_path(http.scope), served)
        elif allowed := (error.headers or {}).get("Allow"):
            said += f": use {allowed}"
        info = ErrorInfo(said, "invalid_request_error", None, None)
        error = HttpError(error.status_code, info, dict(error.headers or {}))
    return _error_response(http.scope, as_http(error))


def _add_endpoint(app: FastAPI, service: Service, endpoint: Endpoint) -> None:
    async def generate(http: HttpRequest) -> Response:
        answer = await endpoint.make(service, http)
        assert not isinstance(answer, bytes | Response)
        return await reply(http, answer, service)

    async def plain(http: HttpRequest) -> Response:
        answer = await endpoint.make(service, http)
        return answer if isinstance(answer, Response) else Response(answer, media_type="application/json")

    streams = isinstance(endpoint, Generating)
    content: dict[str, Any] = {"application/json": {"schema": reference(endpoint.answer)}}
    if streams:
        content["text/event-stream"] = {"schema": EVENT}
    if isinstance(endpoint, Plain) and endpoint.binary:
        content["application/octet-stream"] = {"schema": {"type": "string", "format": "binary"}}
    app.add_api_route(
        endpoint.path,
        generate if streams else plain,
        methods=["POST"],
        summary=endpoint.summary,
        operation_id=endpoint.path.strip("/").replace("/", "_") or "root",
        response_class=Response,
        responses=responses_of(content),
        openapi_extra={
            "requestBody": {
                "required": True,
                "content": {"application/json": {"schema": reference(endpoint.body)}},
            }
        },
    )


def _add_models(app: FastAPI, service: Service) -> None:
    async def about_programs() -> Response:
        return json_response(await programs.describe(service))

    add_get(app, "/v1/programs", about_programs, programs.ProgramsInfo, "Frames of messages, and bounds")
    add_adapters(app, service)
    add_model_cards(app, partial(models.model_list, service), partial(models.model_card, service))


def add_model_cards(
    app: FastAPI,
    all_cards: Callable[[bool], models.ModelList],
    find: Callable[[str, bool], models.ServedModelCard],
) -> None:
    """Add /v1/models in the shape of each API. Both functions are told whether an operator asks."""

    async def all_models(http: HttpRequest) -> Response:
        cards = all_cards(http.state.operator)
        return json_response(messages.models(cards) if VERSION in http.headers else cards)

    async def one_model(http: HttpRequest, model_id: str) -> Response:
        card = find(model_id, http.state.operator)
        return json_response(messages.model(card) if VERSION in http.headers else card)

    add_get(app, "/v1/models", all_models, models.ModelList, "The served names")
    add_get(app, "/v1/models/{model_id:path}", one_model, models.ServedModelCard, "One served name")
