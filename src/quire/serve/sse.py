"""Server-sent events: encoding, and the response that streams them. Knows ASGI, no endpoint and no engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Protocol

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from quire.errors import QuireError
from quire.serve.call import Call, Piece
from quire.serve.errors import HttpError, as_http
from quire.types import Delta

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"

_encode = msgspec.json.Encoder().encode


class Disconnected(QuireError):
    """The client went away before the answer was done."""


def event(data: Any, name: str | None = None) -> bytes:
    """One event with `data` as JSON. JSON has no raw newline, so one data line is enough."""
    if name is None:
        return b"data: " + _encode(data) + b"\n\n"
    return b"event: " + name.encode() + b"\ndata: " + _encode(data) + b"\n\n"


class Running(Protocol):
    """What a client's leaving ends."""

    def fail(self, error: Exception) -> None: ...


class Answer(Protocol):
    """What an endpoint makes of a call."""

    @property
    def call(self) -> Call: ...

    @property
    def streaming(self) -> bool: ...

    def whole(self) -> bytes:
        """The JSON body, when everything is done."""
        ...

    def step(self, pieces: list[Piece]) -> bytes:
        """The encoded events of some news, which may be none."""
        ...

    def end(self) -> bytes:
        """The encoded events after the last news."""
        ...

    def error_event(self, error: HttpError) -> bytes:
        """How the stream says that it failed, its end included."""
        ...


class Direct:
    """ASGI middleware, outermost: lets streams write without passing through all layers for each event."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["quire.send"] = send
        await self._app(scope, receive, send)


async def _watch(receive: Receive, running: Running) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    running.fail(Disconnected("the client went away"))


@asynccontextmanager
async def watched(receive: Receive, running: Running) -> AsyncIterator[None]:
    """While inside, a client that goes away ends what runs: who waits for it gets Disconnected."""
    watcher = asyncio.create_task(_watch(receive, running))
    try:
        yield
    finally:
        watcher.cancel()


async def reply(http: HttpRequest, answer: Answer, keep_alive: float) -> Response:
    """The answer as it is wanted: streamed, or whole as one JSON body. A client that goes away ends the call."""
    if answer.streaming:
        return EventStream(answer, keep_alive)
    with answer.call:
        async with watched(http.receive, answer.call):
            await answer.call.finish()
    return Response(answer.whole(), media_type="application/json")


class EventStream(Response):
    """Streams an answer's events. An error before the first event is raised, to become a plain HTTP error, but
    with `keep_alive`, which starts the answer at once.

    A reader that does not read holds up this stream alone: the server's transport stops taking bytes, and the
    call's news wait, merged, until it reads on.
    """

    def __init__(self, answer: Answer, keep_alive: float) -> None:
        super().__init__(headers={"cache-control": "no-cache"}, media_type="text/event-stream")
        del self.headers["content-length"]
        self._answer = answer
        self._keep_alive = keep_alive

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        call = self._answer.call
        direct: Send = scope.get("quire.send", send)
        try:
            with call:
                async with watched(receive, call):
                    data = b""
                    if not self._keep_alive:
                        data = self._answer.step(call.pieces(await call.take()))
                    await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                    # A task of its own, so that waking it does not wake all layers around this one.
                    await asyncio.create_task(self._stream(data, direct))
        except Disconnected:
            return

    async def _stream(self, data: bytes, send: Send) -> None:
        answer, call = self._answer, self._answer.call
        try:
            while True:
                if data:
                    await send({"type": "http.response.body", "body": data, "more_body": True})
                deltas = await (self._kept_alive(send) if self._keep_alive else call.take())
                if not deltas:
                    break
                data = answer.step(call.pieces(deltas))
            data = answer.end()
        except Disconnected:
            return
        except Exception as error:
            data = answer.error_event(as_http(error))
        await send({"type": "http.response.body", "body": data, "more_body": False})

    async def _kept_alive(self, send: Send) -> list[Delta]:
        """The next news, with a comment for each interval of silence before them."""
        while True:
            try:
                return await asyncio.wait_for(self._answer.call.take(), self._keep_alive)
            except asyncio.TimeoutError:
                await send({"type": "http.response.body", "body": KEEP_ALIVE, "more_body": True})
