"""POST /internal/resume: go on with a stream where another replica stopped, by the endpoint's own code."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec
from fastapi import FastAPI
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.client.continuation import read_lines, resumed
from quire.client.requests import Front
from quire.serve.bodies import read_body
from quire.serve.errors import invalid
from quire.serve.routed import Route, check_route
from quire.types import Delta, Request

if TYPE_CHECKING:
    from quire.serve.call import Prompt
    from quire.serve.service import Service

BODIES = 8
"""BODIES of the largest size may come, as what was sent holds log-probabilities."""
HEADERS = ("anthropic-version", "content-type")
"""HEADERS of the client that an endpoint reads."""


class ResumeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The request as the client sent it, the lines `: t` of the events that it has, and the number of these events."""

    path: str
    body: str
    route: Route
    sent: list[str] = []
    events: int = 0
    headers: dict[str, str] = {}


class Resumption:
    """Holds what a call has made elsewhere: `past` deltas, the `requests` that go on, events that the client has."""

    def __init__(self, sent: Sequence[str], events: int) -> None:
        self._sent, self.events = sent, events
        self.past: list[Delta] = []
        self.requests: list[Request] = []

    async def prepare(self, front: Front, prompts: Sequence[Prompt]) -> None:
        """Read what was sent, for the prompts of the call. RequestError: it cannot be so."""
        self.past = read_lines(self._sent, [prompt.request for prompt in prompts], front.info.vocab_size)
        self.requests = await asyncio.to_thread(self._going_on, front, prompts)

    def _going_on(self, front: Front, prompts: Sequence[Prompt]) -> list[Request]:
        found = []
        for prompt in prompts:
            own = [delta for delta in self.past if delta.request_id == prompt.request.id]
            found.append(resumed(prompt.stream(front), own))
        return found


def add_resumption(app: FastAPI, service: Service, paths: frozenset[str]) -> None:
    """Add the route, for calls of the endpoints at `paths`."""
    decoder = msgspec.json.Decoder(ResumeRequest)

    async def resume(http: HttpRequest) -> Response:
        asked = decoder.decode(await read_body(http, BODIES * service.config.max_body_bytes))
        if asked.path not in paths:
            raise invalid(f"path: {asked.path[:99]!r} is no endpoint that streams", "path", "invalid_value")
        if asked.events < 0:
            raise invalid("events must be at least 0", "events", "invalid_value")
        return _Again(app.router, asked)

    app.add_api_route("/internal/resume", resume, methods=["POST"], include_in_schema=False)


class _Again(Response):
    """Answers the client's own request, whose caller has been admitted as a router."""

    def __init__(self, routes: ASGIApp, asked: ResumeRequest) -> None:
        super().__init__()
        self._routes, self._asked = routes, asked

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        asked, route = self._asked, check_route(self._asked.route)
        given = {name.lower(): value for name, value in asked.headers.items() if name.lower() in HEADERS}
        headers = [(name.encode(), value.encode("latin-1", "replace")) for name, value in given.items()]
        state = {**scope["state"], "request_id": route.id, "created": route.created, "owner": route.owner}
        state |= {"route": route, "resumption": Resumption(asked.sent, asked.events)}
        inner = {**scope, "path": asked.path, "raw_path": asked.path.encode(), "query_string": b""}
        body: Message | None = {"type": "http.request", "body": asked.body.encode(), "more_body": False}

        async def read() -> Message:
            nonlocal body
            message, body = body, None
            return message if message is not None else await receive()

        await self._routes({**inner, "headers": headers, "state": state}, read, send)
