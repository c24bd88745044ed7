"""The web application of several models: sends each request to the model that its body names, once that is loaded."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import msgspec
from fastapi import FastAPI
from starlette.datastructures import Headers
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from quire.errors import ConfigError
from quire.hooks import ENDPOINTS as ENTRY_POINTS
from quire.hooks import load_hooks
from quire.serve.admission import CountAnswer, is_anthropic, route_path
from quire.serve.anthropic.protocol import error_body
from quire.serve.app import add_model_cards, guard, with_dialects
from quire.serve.bodies import read_body
from quire.serve.errors import HttpError, forbidden, invalid, not_found, unavailable
from quire.serve.extensions import add_middleware
from quire.serve.many.house import House, Housed, shutting_down
from quire.serve.many.metrics import metrics_of
from quire.serve.native.control import add_post, for_operators, operators_paths
from quire.serve.openai.models import ModelList, ServedModelCard, model_list
from quire.serve.openapi import add_get, json_response
from quire.serve.options import ServerConfig
from quire.serve.stream import DONE, KEEP_ALIVE
from quire.serve.threads import Threads

SILENCE = 5.0  # seconds of waiting after which a stream sends a comment line, unless options say otherwise
HEAD = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]


class Asked(msgspec.Struct):
    """What a body says about its model."""

    model: Any = None
    stream: Any = None


class HousedCard(ServedModelCard, kw_only=True):
    """A model of several, with its state. Operators see why it was not loaded."""

    state: str
    pinned: bool
    bytes: int
    running: int
    waiting: int
    error: str | None = None


class ModelRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Body of POST /v1/models/load, /v1/models/unload and /v1/models/pin."""

    model: str
    pinned: bool = True


def make_house(house: House, config: ServerConfig) -> FastAPI:
    """The application around all models."""
    app = FastAPI(title="Quire", docs_url=None, redoc_url=None, openapi_url=None, root_path=config.root_path)

    async def health() -> Response:
        if house.draining:
            raise shutting_down()
        return Response()

    async def metrics(http: HttpRequest) -> Response:
        name, accept = http.query_params.get("model"), http.headers.get("accept", "")
        models = [*house.models.values()] if name is None else [house.find(name)]
        text, kind = await metrics_of(house, models, config.metrics_prefix, accept)
        return Response(text, headers={"content-type": kind})

    app.add_api_route("/metrics", metrics, include_in_schema=False)
    for path in ("/health", "/ping"):
        add_get(app, path, health, None, "200 unless the server is shutting down")
    _add_models(app, house, config)
    app.mount("/", Choice(house, config))
    add_middleware(app, config)
    guard(app, config, lambda method, path, status: None)
    return app


def _add_models(app: FastAPI, house: House, config: ServerConfig) -> None:
    def changing(change: Callable[[Housed, ModelRequest], object]) -> Callable[..., Awaitable[Response]]:
        async def handler(http: HttpRequest) -> Response:
            body = msgspec.json.decode(await read_body(http, config.max_body_bytes), type=ModelRequest)
            model = house.find(body.model)
            try:
                done = change(model, body)
            except ConfigError as error:
                raise invalid(str(error), "model", "invalid_value") from error
            house.changed.set()
            if isinstance(done, Awaitable):
                await done
            return json_response(card(house, model, http.state.operator))

        return handler

    def find(name: str, operator: bool) -> ServedModelCard:
        found = next((one for one in cards(house, operator).data if one.id == name), None)
        if found is None:
            raise not_found(f"The model `{name}` does not exist", "model", "model_not_found")
        return found

    for name, change in (
        ("load", lambda model, _: house.load(model)),
        ("unload", lambda model, _: house.residents.unload(model.name)),
        ("pin", lambda model, body: house.residents.pin(model.name, body.pinned)),
    ):
        add_post(app, f"/v1/models/{name}", changing(change))
        for_operators(app, f"/v1/models/{name}")
    add_model_cards(app, partial(cards, house), find)


def card(house: House, model: Housed, operator: bool) -> HousedCard:
    """Describe a model; an `operator` sees where its files are."""
    resident, sized, served = house.residents.models[model.name], model.sized, model.served
    return HousedCard(
        id=model.name,
        created=house.created,
        root=sized.entry.path if operator else model.name,
        max_model_len=sized.max_model_len if served is None else served[0].front.info.max_model_len,
        system_fingerprint=None if served is None else served[0].fingerprint(model.name),
        state="failed" if resident.state == "unloaded" and model.cause else resident.state,
        pinned=resident.pinned,
        bytes=resident.size,
        running=resident.running,
        waiting=resident.waiting,
        error=model.cause if operator else None,
    )


def cards(house: House, operator: bool) -> ModelList:
    """Describe all models, then the aliases and adapters of those that are loaded."""
    others = (one for model in house.loaded for one in model_list(model.serving[0], operator).data)
    own = [card(house, model, operator) for model in house.models.values()]
    return ModelList([*own, *(one for one in others if one.id not in house.models)])


class Choice:
    """ASGI application that passes a request to the application of its model.

    The body names it; other requests are for the one that `?model=` names, or the first that is loaded. A stream that
    waits is kept alive by comments.
    """

    def __init__(self, house: House, config: ServerConfig) -> None:
        self._house, self._config, self._threads = house, config, Threads()
        self._silence = config.sse_keep_alive_interval or SILENCE
        self._paths = frozenset(endpoint.path for endpoint in with_dialects(load_hooks(ENTRY_POINTS)))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if route_path(scope) not in self._paths or scope["method"] != "POST":
            await self._operate(scope, receive, send)
            return
        body = await read_body(HttpRequest(scope, receive), self._config.max_body_bytes)
        asked = await self._threads.run(len(body), lambda: msgspec.json.decode(body, type=Asked))
        model, answer = self._house.find(asked.model), Answer(scope, send)
        if not await self._wait(model, receive, answer, self._silence if asked.stream is True else None):
            return
        messages = iter([{"type": "http.request", "body": body, "more_body": False}])

        async def again() -> Message:
            return next(messages, None) or await receive()

        try:
            service, app = model.serving
            answer.count = service.metrics.answered
            await app(answer.scope, again, answer.send)
        finally:
            self._house.exit(model)

    async def _wait(self, model: Housed, receive: Receive, answer: Answer, silence: float | None) -> bool:
        """Wait for the model. False: the client has gone, or was told an error in its stream."""
        entering, gone = asyncio.ensure_future(self._house.enter(model)), asyncio.ensure_future(receive())
        try:
            while not entering.done() and not gone.done():
                done, _ = await asyncio.wait({entering, gone}, timeout=silence, return_when="FIRST_COMPLETED")
                if not done:
                    await answer.comment()
            if entering.done():
                entering.result()
                return True
        except HttpError as error:
            if not answer.begun:
                raise
            await answer.end(error)
        finally:
            gone.cancel()
            if not entering.done():
                entering.cancel()
                await asyncio.gather(entering, return_exceptions=True)
                if not entering.cancelled() and entering.exception() is None:  # it was let run just now
                    self._house.exit(model)
        return False

    async def _operate(self, scope: Scope, receive: Receive, send: Send) -> None:
        name = HttpRequest(scope).query_params.get("model")
        models = self._house.loaded if name is None else [self._house.find(name)]
        if not models or models[0].served is None:
            raise unavailable("no such model is loaded: POST /v1/models/load loads one")
        app = models[0].serving[1]
        if route_path(scope) in operators_paths(app) and not scope["state"]["operator"]:
            raise forbidden(self._config.keys().operators_only, "operators_only")
        await app(scope, receive, send)


class Answer:
    """The answer to a request, which comments may have begun before its model answers."""

    def __init__(self, scope: Scope, send: Send) -> None:
        self._scope, self._send, self._status = scope, send, 200
        self.begun = False
        self.count: CountAnswer = lambda method, path, status: None

    @property
    def scope(self) -> Scope:
        return {**self._scope, "quire.send": self.send} if self.begun else self._scope

    async def comment(self) -> None:
        if not self.begun:
            self.begun = True
            await self._send({"type": "http.response.start", "status": 200, "headers": HEAD})
        await self._send({"type": "http.response.body", "body": KEEP_ALIVE, "more_body": True})

    async def end(self, error: HttpError) -> None:
        """End a stream that was begun with an error."""
        shaped = is_anthropic(route_path(self._scope), Headers(scope=self._scope))
        body = error_body(error, self._scope["state"]["request_id"]) if shaped else error.body()
        self._status = error.status
        await self.send({"type": "http.response.body", "body": body, "more_body": False})

    async def send(self, message: Message) -> None:
        """Send what the model answers. Once begun, the body of an error is the last event."""
        path = route_path(self._scope)
        if message["type"] == "http.response.start":
            self._status = message["status"]
            self.count("POST", path, self._status)
            if self.begun:
                return
        elif self.begun and self._status != 200:
            named = path.startswith(("/v1/messages", "/v1/responses"))
            head, tail = (b"event: error\n", b"\n\n") if named else (b"", b"\n\n" + DONE)
            message = {**message, "body": head + b"data: " + message["body"] + tail}
        await self._send(message)
