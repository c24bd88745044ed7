"""Endpoints that an operator may switch on: sleeping, traces of steps, the tokenizer's configuration."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from quire.engine.verbs import Sleep, StartProfile, StopProfile, WakeUp
from quire.errors import EngineError, QuireError
from quire.serve.errors import invalid
from quire.serve.openapi import add_get, json_response, responses_of
from quire.serve.service import Service


def add_control(app: FastAPI, service: Service) -> None:
    """Add the routes that options ask for. Only operators reach them."""
    if service.config.enable_sleep_mode:
        _add_sleep(app, service)
    if service.engine.config.device.profiler_config is not None:
        _add_profile(app, service)
    if service.config.enable_tokenizer_info_endpoint:
        _add_tokenizer_info(app, service)
    for_operators(app, "/sleep", "/wake_up", "/is_sleeping", "/start_profile", "/stop_profile")


def add_post(app: FastAPI, path: str, handler: Any) -> None:
    app.add_api_route(path, handler, methods=["POST"], response_class=Response, responses=responses_of({}))


def for_operators(app: Starlette, *paths: str) -> None:
    """Let only operators reach these paths, with any method."""
    app.state.for_operators = operators_paths(app) | {*paths}


def operators_paths(app: Starlette) -> frozenset[str]:
    """List the paths that only operators reach."""
    return getattr(app.state, "for_operators", frozenset())


def _add_sleep(app: FastAPI, service: Service) -> None:
    engine = service.engine

    async def sleep(http: HttpRequest) -> Response:
        query = http.query_params
        level = query.get("level", "1")
        if level not in ("0", "1", "2"):
            raise invalid(f"level must be 0, 1 or 2, got {level!r}", "level", "invalid_value")
        await _checked(engine.do(Sleep(int(level), query.get("mode", "abort"))))
        return Response()

    async def wake_up(http: HttpRequest) -> Response:
        await _checked(engine.do(WakeUp(tuple(http.query_params.getlist("tags")) or None)))
        return Response()

    async def is_sleeping() -> Response:
        return json_response({"is_sleeping": engine.sleeping})

    add_post(app, "/sleep", sleep)
    add_post(app, "/wake_up", wake_up)
    add_get(app, "/is_sleeping", is_sleeping, dict[str, bool], "Whether the engine has given its memory back")


def _add_profile(app: FastAPI, service: Service) -> None:
    async def start() -> Response:
        await service.engine.do(StartProfile())
        return Response()

    async def stop() -> Response:
        return json_response({"path": await service.engine.do(StopProfile())})

    add_post(app, "/start_profile", start)
    add_post(app, "/stop_profile", stop)


def _add_tokenizer_info(app: FastAPI, service: Service) -> None:
    async def info() -> Response:
        tokenizer, template = service.front.tokenizer, service.front.template
        if tokenizer is None:
            raise QuireError("this engine has no tokenizer")
        about = {
            "tokenizer_class": type(tokenizer).__name__,
            "vocab_size": service.front.info.vocab_size,
            "model_max_length": service.front.info.max_model_len,
            "chat_template": None if template is None else template.source,
            **tokenizer.special_tokens,
        }
        return json_response(about)

    add_get(app, "/tokenizer_info", info, dict[str, Any], "Configuration of the tokenizer")


async def _checked(job: Any) -> None:
    """Await `job`; a refusal of the engine becomes a 400."""
    try:
        await job
    except EngineError as error:
        raise invalid(str(error), None, "invalid_value") from error
