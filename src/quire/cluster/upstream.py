"""A small HTTP client of one replica: connections that are kept, answers read as they come, at the reader's pace.

An answer costs one protocol and one parser (httptools), which is what a thousand open streams need. Redirects are
never followed.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable
from typing import cast
from urllib.parse import urlsplit

import httptools

from quire.errors import ConfigError, QuireError
from quire.serve.threads import within

Headers = list[tuple[bytes, bytes]]
CONNECT_SECONDS = 3.0
IDLE_SECONDS = 30.0
"""An unused connection is kept for IDLE_SECONDS, fewer than the 75 of a replica: it never closes one as we write."""
MOST_BUFFERED = 1 << 18
"""Bytes that wait for a slow client before the replica is read no further."""


class Lost(QuireError):
    """The answer will not come to its end.

    `cause` is for metrics: killed, silent, frozen (the engine alone), refused, drained, engine (it died), busy.
    """

    def __init__(self, cause: str, message: str) -> None:
        super().__init__(message)
        self.cause = cause


class Address:
    """Where a replica listens: `http[s]://host[:port]`, `host:port` or `unix:/path`. ConfigError: neither."""

    def __init__(self, text: str) -> None:
        self.text, self.unix = text, text.removeprefix("unix:") if text.startswith("unix:") else None
        try:
            parts = urlsplit("http://localhost" if self.unix else text if "://" in text else f"http://{text}")
            port = parts.port
        except ValueError as error:
            raise ConfigError(f"--replica {text!r}: {error}") from error
        plain = not (parts.path.strip("/") or parts.query or parts.fragment or parts.username or " " in text)
        if parts.scheme not in ("http", "https") or not parts.hostname or not plain or port == 0:
            raise ConfigError(f"--replica must look like http://host:port or unix:/path, got {text!r}")
        self.tls = ssl.create_default_context() if parts.scheme == "https" else None
        self.host, self.port = parts.hostname, port or (443 if self.tls else 80)


class Connection(asyncio.Protocol):
    """One connection, and the answer that is on its way there."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._waiter: asyncio.Future[None] | None = None
        self.reused, self.used = False, 0.0
        self._begin()

    def send(self, message: bytes) -> None:
        self._begin()
        if self._transport is None or self._transport.is_closing():
            self.fail(Lost("killed", "the replica closed the connection"))
        else:
            self._transport.write(message)

    def _begin(self) -> None:
        self.status, self.heard = 0, time.monotonic()
        self.headers: Headers = []
        self.answered = self.ended = self.signs = self.paused = self._framed = self._keep = False
        self._parts: list[bytes] = []
        self._error: Exception | None = None
        self._parser = httptools.HttpResponseParser(self)

    async def head(self) -> None:
        """Wait for status and headers. Raises Lost, or the error given to `fail`."""
        while not self.status:
            await self._wait()

    async def take(self) -> bytes:
        """Take the bytes that have come since; b"" is the answer's end. Raises Lost, or the error given to `fail`."""
        while not self._parts:
            if self.ended:
                return b""
            await self._wait()
        data, self._parts = b"".join(self._parts), []
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

    def fail(self, error: Exception) -> None:
        """End the answer: its reader gets `error`, the connection is closed."""
        self._error = self._error or error
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

    async def _wait(self) -> None:
        if self._error is None:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        if self._error is not None and not self._parts:
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
            self.fail(Lost("killed", f"the replica's answer is not HTTP: {error}"))

    def connection_lost(self, exc: Exception | None) -> None:
        self.ended |= bool(self.status) and not self._framed and exc is None and self._error is None
        if not self.ended:
            self._error = self._error or Lost("killed", "the replica closed the connection")
        self._wake()

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
        self._parts.append(body)
        if not self.paused and self._transport is not None and sum(map(len, self._parts)) > MOST_BUFFERED:
            self.paused = True
            self._transport.pause_reading()
        self._wake()

    def on_message_complete(self) -> None:
        if self.status:
            self.ended, self._keep = True, self._framed and self._parser.should_keep_alive()
            self._wake()


class Upstream:
    """The connections to one replica; answers come over those in `live`."""

    def __init__(self, address: Address, key: str) -> None:
        self._address = address
        host = f"[{address.host}]" if ":" in address.host else address.host
        self._fixed = f"host: {host}:{address.port}\r\nauthorization: Bearer {key}\r\n".encode()
        self._idle: list[Connection] = []
        self.live: set[Connection] = set()

    async def ask(
        self, method: str, path: str, headers: Headers, body: bytes, made: Callable[[Connection], object]
    ) -> Connection:
        """Send a request, call `made` with its connection, wait for the answer's head. Raises Lost. Release it then."""
        lines = b"".join(b"%s: %s\r\n" % pair for pair in headers)
        size = b"content-length: %d\r\n" % len(body) if method == "POST" else b""
        message = f"{method} {path} HTTP/1.1\r\n".encode() + self._fixed + lines + size + b"\r\n" + body
        while True:
            connection = await self._connect()
            connection.send(message)
            self.live.add(connection)
            made(connection)
            try:
                await connection.head()
            except Lost as lost:
                self.release(connection)
                if lost.cause == "killed" and connection.reused and not connection.answered:
                    continue  # the replica had closed this connection before the request
                raise
            return connection

    async def get(self, path: str, seconds: float, headers: Headers | None = None) -> tuple[int, bytes]:
        """Get a small answer. Lost: none, or not in time."""
        made: list[Connection] = []
        try:
            connection = await within(seconds, self.ask("GET", path, headers or [], b"", made.append))
            return connection.status, await within(seconds, connection.rest())
        except asyncio.TimeoutError:
            raise Lost("silent", f"no answer in {seconds:g} s") from None
        finally:
            for connection in made:
                self.release(connection)

    def release(self, connection: Connection) -> None:
        """Keep the connection for another request, or close it: at once, so that the replica stops working on it."""
        self.live.discard(connection)
        if connection.usable:
            connection.used, connection.reused = time.monotonic(), True
            self._idle.append(connection)
        else:
            connection.close()

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
                return (await within(CONNECT_SECONDS, loop.create_unix_connection(Connection, to.unix)))[1]
            opening = loop.create_connection(Connection, to.host, to.port, ssl=to.tls)
            return (await within(CONNECT_SECONDS, opening))[1]
        except asyncio.TimeoutError:
            raise Lost("refused", f"no connection in {CONNECT_SECONDS:g} s") from None
        except OSError as error:
            raise Lost("refused", f"no connection: {error.strerror or error}") from error
