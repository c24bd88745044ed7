"""Server-sent events: encoding, and the response that streams them. Knows ASGI, no endpoint and no engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from types import TracebackType
from typing import Any, Protocol

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from quire.errors import QuireError
from quire.serve.errors import HttpError, as_http

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
    """What a client's leaving ends, and so does leaving its `with`."""

    def fail(self, error: Exception) -> None: ...
    def __enter__(self) -> Any: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class Answer(Protocol):
    """What an endpoint makes of a call."""

    @property
    def call(self) -> Running: ...

    @property
    def streaming(self) -> bool: ...

    async def whole(self) -> bytes:
        """The JSON body, once everything is done."""
        ...

    def events(self) -> AsyncGenerator[bytes, None]:
        """The encoded events of the stream, those of one step together."""
        ...

    def error_event(self, error: HttpError) -> bytes:
        """How the stream says that it failed, its end included."""
        ...


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
            body = await answer.whole()
    return Response(body, media_type="application/json")


class EventStream(Response):
    """Streams an answer's events. An error before the first event is raised, to become a plain HTTP error.

    A reader that does not read holds up this stream alone: the server's transport stops taking bytes, and the
    call's news wait, merged, until it reads on.
    """

    def __init__(self, answer: Answer, keep_alive: float) -> None:
        super().__init__(headers={"cache-control": "no-cache"}, media_type="text/event-stream")
        del self.headers["content-length"]
        self._answer = answer
        self._keep_alive = keep_alive

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def write(data: bytes) -> None:
            nonlocal started
            if not started:
                started = True
                head = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
                await send(head)
            await send({"type": "http.response.body", "body": data, "more_body": True})

        try:
            with self._answer.call:
                async with watched(receive, self._answer.call), aclosing(self._answer.events()) as events:
                    async for data in self._kept_alive(events) if self._keep_alive else events:
                        if data:
                            await write(data)
        except Disconnected:
            return
        except Exception as error:
            failure = as_http(error)
            if not started:
                raise failure from error
            await write(self._answer.error_event(failure))
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _kept_alive(self, events: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """The events, with a comment for each interval of silence."""
        waiting: asyncio.Task[bytes] | None = None
        try:
            while True:
                waiting = waiting or asyncio.ensure_future(_next(events))
                done, _ = await asyncio.wait({waiting}, timeout=self._keep_alive)
                if not done:
                    yield KEEP_ALIVE
                    continue
                finished, waiting = waiting, None
                try:
                    yield finished.result()
                except StopAsyncIteration:
                    return
        finally:
            if waiting is not None:
                waiting.cancel()


async def _next(events: AsyncIterator[bytes]) -> bytes:
    return await events.__anext__()
