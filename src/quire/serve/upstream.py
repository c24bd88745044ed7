"""A small HTTP client of one server: connections that are kept, answers read as they come, at the reader's pace.

An answer costs one protocol and one parser (httptools), which is what a thousand open streams need. Redirects are
never followed.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from typing import NamedTuple, cast

import httptools

from quire.errors import QuireError
from quire.serve.threads import within

Headers = Iterable[tuple[bytes, bytes]]
Sink = Callable[[bytes], None]
CONNECT_SECONDS = 3.0
IDLE_SECONDS = 30.0
"""An unused connection is kept for IDLE_SECONDS, fewer than the 75 of a server: it never closes one as we write."""
MOST_BUFFERED = 1 << 18
"""Bytes that wait for a slow reader before the server is read no further."""


class Lost(QuireError):
    """The answer will not come to its end.

    `cause` is for metrics: killed, silent, frozen (the engine alone), refused, drained, engine (it died), busy.
    """

    def __init__(self, cause: str, message: str) -> None:
        super().__init__(message)
        self.cause = cause


class Address(NamedTuple):
    """Where a server listens: host and port, with TLS or without, or the path of a Unix socket."""

    host: str
    port: int
    tls: ssl.SSLContext | None = None
    unix: str | None = None

    @property
    def shown(self) -> str:
        """Write host and port as a head has them."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class Connection(asyncio.Protocol):
    """One connection, and the answer that is on its way there."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._loop = asyncio.get_running_loop()
        self._waiter: asyncio.Future[None] | None = None
        self.reused, self.used = False, 0.0
        self._begin()

    def send(self, message: bytes, sink: Sink | None) -> None:
        self._begin(sink)
        if self._transport is None or self._transport.is_closing():
            self.fail(Lost("killed", "the connection was closed"))
        else:
            self._transport.write(message)

    def _begin(self, sink: Sink | None = None) -> None:
        self.status, self.heard = 0, time.monotonic()
        self.headers: list[tuple[bytes, bytes]] = []
        self.answered = self.ended = self.signs = self.paused = self._framed = self._keep = False
        self._sink, self._data = sink, b""
        self._error: Lost | None = None
        self._parser = httptools.HttpResponseParser(self)

    async def head(self) -> None:
        """Wait for status and headers. Raises Lost."""
        while not self.status:
            await self._more()

    async def take(self) -> bytes:
        """Take the bytes that have come since; b"" is the answer's end. Raises Lost."""
        while not self._data and not self.ended:
            await self._more()
        data, self._data = self._data, b""
        if self.paused and self._transport is not None:
            self.paused, self.heard = False, time.monotonic()
            self._transport.resume_reading()
        return data

    async def rest(self) -> bytes:
        """Take the whole body."""
        parts = []
        while data := await self.take():
            parts.append(data)
        return b"".join(parts)

    def header(self, name: bytes) -> bytes:
        return next((value for key, value in self.headers if key == name), b"")

    def fail(self, lost: Lost) -> None:
        """End the answer: its reader gets `lost`, the connection is closed."""
        self._error = self._error or lost
        self._wake()
        self.close()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    @property
    def usable(self) -> bool:
        """Whether another request may follow the last one."""
        transport = self._transport
        return transport is not None and not transport.is_closing() and self.ended and self._keep

    async def _more(self) -> None:
        if self._error is None:
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        if self._error is not None and not self._data:
            raise self._error

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # --- called by the event loop and the parser

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self.heard, self.answered = time.monotonic(), True
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self.fail(Lost("killed", f"the response is not HTTP: {error}"))

    def connection_lost(self, exc: Exception | None) -> None:
        if self.status and not self._framed and exc is None and self._error is None:
            self.on_message_complete()  # a body that ends with the connection
        if not self.ended:
            self.fail(Lost("killed", "the connection was closed"))

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        if self._parser.get_status_code() < 200:
            self.headers = []
            return
        self.status = self._parser.get_status_code()
        self._framed = bool(self.header(b"content-length") or self.header(b"transfer-encoding"))
        self._wake()

    def on_body(self, body: bytes) -> None:
        if self._sink is not None and self.status == 200:
            self._sink(body)
            return
        self._data += body
        if len(self._data) > MOST_BUFFERED and not self.paused and self._transport is not None:
            self.paused = True
            self._transport.pause_reading()
        self._wake()

    def on_message_complete(self) -> None:
        if self.status:
            self.ended, self._keep = True, self._framed and self._parser.should_keep_alive()
            self._wake()


def message(head: bytes, headers: Headers = (), body: bytes = b"") -> bytes:
    """Write a request. `head` is its first line and headers, with line ends."""
    lines = [b"%s: %s\r\n" % pair for pair in headers]
    if head.startswith(b"POST"):
        lines.append(b"content-length: %d\r\n" % len(body))
    return b"".join([head, *lines, b"\r\n", body])


class Upstream:
    """The connections to one server; answers come over those in `live`."""

    def __init__(self, address: Address, seconds: float = CONNECT_SECONDS) -> None:
        self._address, self._seconds = address, seconds
        self._idle: list[Connection] = []
        self.live: set[Connection] = set()

    @asynccontextmanager
    async def asked(self, message: bytes, sink: Sink | None = None) -> AsyncIterator[Connection]:
        """Send a request, and wait for the head of its answer. Leaving early ends it: the server stops. Raises Lost.

        A `sink` gets the bytes of a body with status 200 at once, and nobody takes them.
        """
        while True:
            connection = await self._connect()
            self.live.add(connection)
            try:
                connection.send(message, sink)
                await connection.head()
                yield connection
            except Lost as lost:
                if lost.cause == "killed" and connection.reused and not connection.answered:
                    continue  # the server had closed this connection before the request
                raise
            finally:
                self.live.discard(connection)
                if connection.usable:
                    connection.used, connection.reused = time.monotonic(), True
                    self._idle.append(connection)
                else:
                    connection.close()
            return

    async def whole(self, message: bytes, sink: Sink | None = None) -> tuple[int, bytes]:
        """Ask for a whole answer: its status, and its body unless that goes to a `sink`. Raises Lost."""
        async with self.asked(message, sink) as connection:
            return connection.status, await connection.rest()

    def close(self) -> None:
        while self._idle:
            self._idle.pop().close()

    async def _connect(self) -> Connection:
        while self._idle:
            connection = self._idle.pop()
            if connection.usable and time.monotonic() - connection.used < IDLE_SECONDS:
                return connection
            connection.close()
        loop, to = asyncio.get_running_loop(), self._address
        try:
            if to.unix is not None:
                return (await within(self._seconds, loop.create_unix_connection(Connection, to.unix)))[1]
            opening = loop.create_connection(Connection, to.host, to.port, ssl=to.tls)
            return (await within(self._seconds, opening))[1]
        except asyncio.TimeoutError:
            raise Lost("refused", f"no connection in {self._seconds:g} s") from None
        except OSError as error:
            raise Lost("refused", f"no connection: {error.strerror or error}") from error
