"""The stream that a router asked to be marked: another replica can go on where it stops.

Comment lines, which the router takes out, stand between its events: `: t` before an event tells what the samples had
made when it was written (`quire.client.continuation`), `: s` tells each second that the engine goes on, and its load,
and `: moved` that this replica gives the stream up.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from starlette.types import Message, Send

from quire.client.continuation import Teller
from quire.errors import EngineDiedError
from quire.serve.errors import invalid
from quire.serve.stream import Answer, EventStream, HandedBackError
from quire.serve.threads import within
from quire.types import Delta

if TYPE_CHECKING:
    from quire.serve.resumption import Resumption
    from quire.serve.service import Service

SIGN_SECONDS = 1.0
"""SIGN_SECONDS lie between signs of life. An answer that begins sooner may still be a plain HTTP error."""


class MarkedStream(EventStream):
    """Streams the events of an answer with the comment lines for a router."""

    def __init__(self, answer: Answer, keep_alive: float, service: Service) -> None:
        super().__init__(answer, keep_alive)
        self._service = service
        self._teller = Teller(answer.call.generation.requests)
        self._sign: object = None
        resumption = answer.call.resumption
        self._skip = 0 if resumption is None else resumption.events  # events that the client has

    async def _begin(self) -> bytes:
        with self._service.handed_back(self._answer.call):
            again = b""
            if (resumption := self._answer.call.resumption) is not None:
                again = await asyncio.to_thread(self._again, resumption)
            try:
                deltas = await within(SIGN_SECONDS, self._answer.call.take())
            except asyncio.TimeoutError:
                return again + self._sign_of_life()
            return again + b"".join([data async for data in self._events(deltas)])

    def _again(self, resumption: Resumption) -> bytes:
        """Make the events of what was made elsewhere; return those that the client lacks."""
        answer, call = self._answer, self._answer.call
        data = self._beyond(b"".join(answer.step(call.pieces([delta])) for delta in resumption.past))
        if self._skip and any(request.open_samples for request in resumption.requests):
            raise invalid("events: what was sent makes fewer", "events", "invalid_value")
        return data

    def _beyond(self, data: bytes) -> bytes:
        """Drop the events at the start of `data` that the client has."""
        while self._skip and data:
            data, self._skip = data.partition(b"\n\n")[2], self._skip - 1
        return data

    async def _stream(self, send: Send) -> None:
        one_at_a_time = asyncio.Lock()

        async def whole(message: Message) -> None:
            async with one_at_a_time:
                await send(message)

        async def tick() -> None:
            while True:
                await asyncio.sleep(SIGN_SECONDS)
                if not one_at_a_time.locked() and (data := self._sign_of_life()):
                    await whole({"type": "http.response.body", "body": data, "more_body": True})

        with self._service.handed_back(self._answer.call):
            ticker = asyncio.create_task(tick())
            try:
                await super()._stream(whole)
            finally:
                ticker.cancel()

    def _sign_of_life(self) -> bytes:
        """Write the line that says that the engine goes on; empty if it has not since the last."""
        sign, self._sign = self._service.engine.sign_of_life, self._sign
        if sign is None or sign == self._sign:
            return b""
        self._sign = sign
        return b": s " + self._service.load() + b"\n\n"

    async def _events(self, deltas: list[Delta]) -> AsyncIterator[bytes]:
        for delta in deltas:
            self._teller.take(delta)
            async for data in super()._events([delta]):
                yield self._told() + data

    def _last(self) -> bytes:
        return self._told() + self._beyond(super()._last())

    def _told(self) -> bytes:
        return b"".join(b": t " + line + b"\n" for line in self._teller.lines())

    def _failed(self, error: Exception) -> bytes:
        if isinstance(error, HandedBackError):
            return b": moved\n\n"
        return b": moved engine\n\n" if isinstance(error, EngineDiedError) else super()._failed(error)
