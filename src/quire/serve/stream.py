"""Server-sent events: their encoding, and the response that streams them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.client.generation import Generation
from quire.errors import OverloadedError, QuireError
from quire.lazy import Lazy
from quire.serve.errors import HttpError, as_http, invalid
from quire.serve.threads import FEW_SCORES, within
from quire.types import Delta

if TYPE_CHECKING:
    from quire.serve import marked
    from quire.serve.resumption import Resumption
    from quire.serve.service import Service
else:
    marked = Lazy("quire.serve.marked")

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"

PART_BYTES = 1 << 20
_encode = msgspec.json.Encoder().encode


class Disconnected(QuireError):
    """The client disconnected before the answer was complete."""


class HandedBackError(OverloadedError):
    """This server gives a stream up that another one can go on with."""


def event(data: Any, name: str | None = None) -> bytes:
    """Encode an event with `data` as JSON. JSON has no raw newline, so one data line is enough."""
    if name is None:
        return b"data: " + _encode(data) + b"\n\n"
    return b"event: " + name.encode() + b"\ndata: " + _encode(data) + b"\n\n"


class Running(Protocol):
    """Anything that must end when its client disconnects."""

    def fail(self, error: Exception) -> None: ...


class RunningCall(Running, Protocol):
    """The requests of an answer; see `Call`."""

    generation: Generation
    resumption: Resumption | None

    async def take(self) -> list[Delta]: ...
    async def finish(self) -> None: ...
    def pieces(self, deltas: list[Delta]) -> list[Any]: ...
    def slices(self, deltas: list[Delta]) -> AsyncIterator[list[Any]]: ...
    @property
    def size(self) -> int: ...
    def __enter__(self) -> object: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class Answer(Protocol):
    """A call in the shape of one endpoint."""

    @property
    def call(self) -> RunningCall: ...

    @property
    def streaming(self) -> bool: ...

    def whole(self) -> bytes:
        """The JSON body, once the call has finished."""
        ...

    def step(self, pieces: list[Any]) -> bytes:
        """The encoded events for new pieces; may be empty."""
        ...

    def end(self) -> bytes:
        """The encoded events after the last piece."""
        ...

    def error_event(self, error: HttpError) -> bytes:
        """The encoded events that end a stream with an error."""
        ...


class Direct:
    """Outermost ASGI middleware: lets streams bypass the other layers when they send events."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["quire.send"] = send
        await self._app(scope, receive, _in_parts(send))


def _in_parts(send: Send) -> Send:
    """Send a large body in parts, between which other calls go on."""

    async def answer(message: Message) -> None:
        last = max(0, len(body := message.get("body", b"")) - 1) // PART_BYTES * PART_BYTES
        for at in range(0, last, PART_BYTES):
            await send({"type": message["type"], "body": body[at : at + PART_BYTES], "more_body": True})
            await asyncio.sleep(0)
        await send({**message, "body": body[last:]} if last else message)

    return answer


async def _watch(receive: Receive, running: Running) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    running.fail(Disconnected("the client disconnected"))


@asynccontextmanager
async def watched(receive: Receive, running: Running) -> AsyncIterator[None]:
    """Fail `running` with Disconnected if the client disconnects while inside."""
    watcher = asyncio.create_task(_watch(receive, running))
    try:
        yield
    finally:
        watcher.cancel()


async def reply(http: HttpRequest, answer: Answer, service: Service) -> Response:
    """Make the answer, streamed or as one JSON body. A client that disconnects ends the call."""
    keep_alive, route = service.config.sse_keep_alive_interval, http.state.route
    resumed = http.state.resumption is not None
    if resumed and not (answer.streaming and answer.call.resumption):
        with answer.call:
            raise invalid("this call has no resumed form: send it again", "path", "invalid_value")
    if answer.streaming:
        if resumed or (route is not None and route.resumable):
            return marked.MarkedStream(answer, keep_alive, service)
        return EventStream(answer, keep_alive)
    with answer.call:
        async with watched(http.receive, answer.call):
            await answer.call.finish()
    body = await service.threads.run(answer.call.size, answer.whole)
    return Response(body, media_type="application/json")


class EventStream(Response):
    """Streams the events of an answer.

    An error before the first event is raised, and so becomes a plain HTTP error; except with `keep_alive` (seconds
    of silence before a comment line), which sends the headers at once. A client that stops reading blocks only its
    own stream: the transport stops taking bytes, and the call's deltas are merged until it reads on.
    """

    def __init__(self, answer: Answer, keep_alive: float) -> None:
        super().__init__(headers={"cache-control": "no-cache"}, media_type="text/event-stream")
        del self.headers["content-length"]
        self._answer = answer
        self._keep_alive = keep_alive
        self._num_scores = 0  # entries of log-probabilities since the last event

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        call = self._answer.call
        direct: Send = _in_parts(scope.get("quire.send", send))
        try:
            with call:
                async with watched(receive, call):
                    data = await self._begin()
                    await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                    if data:
                        await direct({"type": "http.response.body", "body": data, "more_body": True})
                    # In its own task, so that each event does not wake all the layers above.
                    await asyncio.create_task(self._stream(direct))
        except Disconnected:
            return

    async def _begin(self) -> bytes:
        """Make the first events. An error before them is raised."""
        if self._keep_alive:
            return b""
        return b"".join([part async for part in self._events(await self._answer.call.take())])

    async def _stream(self, send: Send) -> None:
        call = self._answer.call
        try:
            while deltas := await (self._kept_alive(send) if self._keep_alive else call.take()):
                async for data in self._events(deltas):
                    await send({"type": "http.response.body", "body": data, "more_body": True})
            data = self._last()
        except Disconnected:
            return
        except Exception as error:
            data = self._failed(error)
        await send({"type": "http.response.body", "body": data, "more_body": False})

    def _last(self) -> bytes:
        return self._answer.end()

    def _failed(self, error: Exception) -> bytes:
        return self._answer.error_event(as_http(error))

    async def _events(self, deltas: list[Delta]) -> AsyncIterator[bytes]:
        """The encoded events of deltas, if there are any; a slice at a time if they are many."""
        answer, call = self._answer, self._answer.call
        self._num_scores += sum(delta.num_scores for delta in deltas)
        if len(deltas) == 1 and self._num_scores <= FEW_SCORES:
            if data := answer.step(call.pieces(deltas)):
                self._num_scores = 0
                yield data
            return
        async for pieces in call.slices(deltas):
            many = self._num_scores > FEW_SCORES
            if data := await asyncio.to_thread(answer.step, pieces) if many else answer.step(pieces):
                self._num_scores = 0
                yield data

    async def _kept_alive(self, send: Send) -> list[Delta]:
        """The next deltas; sends a comment line after each interval of silence."""
        while True:
            try:
                return await within(self._keep_alive, self._answer.call.take())
            except asyncio.TimeoutError:
                await send({"type": "http.response.body", "body": KEEP_ALIVE, "more_body": True})
