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
from quire.serve.stream import Answer, EventStream, HandedBackError
from quire.serve.threads import within
from quire.types import Delta

if TYPE_CHECKING:
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

    async def _begin(self) -> bytes:
        with self._service.handed_back(self._answer.call):
            try:
                deltas = await within(SIGN_SECONDS, self._answer.call.take())
            except asyncio.TimeoutError:
                return self._sign_of_life()
            return b"".join([data async for data in self._events(deltas)])

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
        """The line that says that the engine goes on; empty if it has not since the last."""
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
        return self._told() + super()._last()

    def _told(self) -> bytes:
        return b"".join(b": t " + line + b"\n" for line in self._teller.lines())

    def _failed(self, error: Exception) -> bytes:
        if isinstance(error, HandedBackError):
            return b": moved\n\n"
        return b": moved engine\n\n" if isinstance(error, EngineDiedError) else super()._failed(error)
