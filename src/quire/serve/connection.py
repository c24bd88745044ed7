"""One HTTP connection, with bounds that uvicorn lacks. Works on bytes, before any key is checked.

A head is at most 64 KiB and arrives within 30 seconds, and so does the rest of a body whose answer has been sent. As
many connections are taken as the process has descriptors for, less a reserve. An `Upgrade` that is not taken leaves the
request as it is (RFC 9110, section 7.8).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

import httptools
from uvicorn._types import ASGISendEvent
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from quire.engine.log import Tally

log = logging.getLogger("quire.serve")

MAX_HEAD_BYTES = 65536
HEAD_SECONDS = 30.0
# Requests that wait on one connection for the answers before them.
MAX_PIPELINED = 64
# Descriptors kept for files, pipes and the engine's socket.
RESERVE = 64
LOG_INTERVAL = 10.0
# A closed connection takes bytes for this long, so that its client reads the answer before the reset.
LINGER_SECONDS = 1.0

_PHRASES = {
    400: "Bad Request",
    408: "Request Timeout",
    431: "Request Header Fields Too Large",
    503: "Service Unavailable",
}


class Room:
    """How many connections the process can hold. Logs, now and then, how many were refused."""

    def __init__(self, descriptors: int) -> None:
        self.limit = max(1, descriptors - RESERVE) if descriptors >= 0 else 1 << 30  # negative: no limit
        self._refused = Tally(LOG_INTERVAL)

    def refuse(self) -> None:
        """Count a connection that was refused."""
        if count := self._refused.add():
            log.warning(
                "refused %d connections: %d are open, as many as the limit on open files allows (ulimit -n)",
                count,
                self.limit,
            )


def _for_http_1_0(
    cycle: RequestResponseCycle, asked: bool
) -> Callable[[ASGISendEvent], Coroutine[Any, Any, None]]:
    """Send answers without chunks: one of unknown length ends with its connection, others keep it if `asked` to."""
    send, known = cycle.send, True

    async def answer(message: ASGISendEvent) -> None:
        nonlocal known
        if message["type"] == "http.response.start":
            headers = [*message.get("headers", ())]
            known = any(name.lower() == b"content-length" for name, _ in headers)
            cycle.keep_alive = asked and known
            if cycle.keep_alive:
                headers.append((b"connection", b"keep-alive"))
            if not known:
                cycle.chunked_encoding = False
            message = {**message, "headers": headers}
        elif message["type"] == "http.response.body" and not known:
            cycle.expected_content_length = len(message.get("body", b""))
        await send(message)

    return answer


class _HeadFirst:
    """The transport of one answer. Its head waits for what follows in this turn of the loop: one write for both."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport, self._loop, self._head = transport, loop, b""
        self.write: Callable[[bytes], None] = self._begin
        self.is_closing = transport.is_closing

    def _begin(self, head: bytes) -> None:
        self._head, self.write = head, self._go_on
        self._loop.call_soon(self._flush)

    def _go_on(self, data: bytes) -> None:
        self.write = self._transport.write
        self.write(self._head + data)

    def _flush(self) -> None:
        if self.write == self._go_on:
            self._go_on(b"")

    def close(self) -> None:
        self._flush()
        self._transport.close()


class Connection(HttpToolsProtocol):
    """uvicorn's protocol with bounded heads, timeouts and a bounded number of connections."""

    def __init__(self, *args: Any, room: Room, head_seconds: float = HEAD_SECONDS, **options: Any) -> None:
        super().__init__(*args, **options)
        self.access_log = False  # AccessLog writes these lines, with ids
        self._room = room
        self._head_seconds = head_seconds
        # Bytes that the parser took since it last got to the end of a head, or to a part of a body.
        self._unread = 0
        self._in_body = False
        self._closing = False
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self._room.limit:
            self._room.refuse()
            self._close(503, "too many connections: try again later")
        else:
            self._wait_for_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._closing:
            return
        view = memoryview(data)
        while view and not self._closing and not self.transport.is_closing():
            room = MAX_HEAD_BYTES - self._unread
            if room <= 0:
                self._close(431, f"the request's head is larger than {MAX_HEAD_BYTES} bytes")
                return
            part, view = view[:room], view[room:]
            self._unread += len(part)
            self._feed(bytes(part))
        if self._timer is None and not self._in_body and self._unread:
            self._wait_for_head()  # the head of a later request has begun

    def _feed(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._ignore_upgrade(data[upgrade.args[0] :])
        except httptools.HttpParserError:
            self._close(400, "Invalid HTTP request received.")

    def _ignore_upgrade(self, rest: bytes) -> None:
        """Read the request again without its `Upgrade`: the parser stops after such a head."""
        head = [self.parser.get_method(), b" ", self.url, b" HTTP/1.1\r\n"]
        for name, value in self.headers:
            if name == b"connection":
                value = b", ".join(t for t in value.split(b",") if t.strip().lower() != b"upgrade")
            if name != b"upgrade":
                head += [name, b": ", value, b"\r\n"]
        self.parser = httptools.HttpRequestParser(self)
        self._feed(b"".join([*head, b"\r\n", rest]))

    # --- called by the parser

    def on_headers_complete(self) -> None:
        if self.parser.get_method() == b"CONNECT":
            raise ValueError("this server is no proxy")
        if len(self.pipeline) >= MAX_PIPELINED:
            raise ValueError("too many requests wait on this connection")
        if self.parser.should_upgrade():
            return  # the head comes again, without the upgrade
        self._stop_waiting()
        self._unread, self._in_body = 0, True
        super().on_headers_complete()
        self.cycle.transport = _HeadFirst(self.transport, self.loop)  # type: ignore[assignment]
        if self.scope["http_version"] == "1.0":
            self.cycle.send = _for_http_1_0(self.cycle, self.parser.should_keep_alive())  # type: ignore[method-assign,assignment]

    def on_body(self, body: bytes) -> None:
        self._unread = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        self._unread, self._in_body = 0, False
        self._stop_waiting()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._in_body:  # nobody reads the rest of the body
            self._wait_for_head()

    # --- timeouts

    def _wait_for_head(self) -> None:
        self._stop_waiting()
        self._timer = self.loop.call_later(self._head_seconds, self._too_late)

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _too_late(self) -> None:
        self._timer = None
        if self._unread and not self._in_body:
            self._close(408, f"the request's head did not arrive within {self._head_seconds:g} s")
        else:
            self.transport.close()

    def _close(self, status: int, message: str) -> None:
        """Send an error, unless an answer is under way, and close the connection once the client has read it."""
        self._closing = True
        self._stop_waiting()
        self._unset_keepalive_if_required()
        if self.transport.is_closing():
            return
        if self.cycle is not None and not self.cycle.response_complete:
            self.transport.close()
            return
        retry = "retry-after: 1\r\n" if status == 503 else ""
        self.transport.write(
            f"HTTP/1.1 {status} {_PHRASES[status]}\r\ncontent-type: text/plain; charset=utf-8\r\n{retry}"
            f"content-length: {len(message)}\r\nconnection: close\r\n\r\n{message}".encode()
        )
        if self.transport.can_write_eof():
            self.transport.write_eof()
            self.loop.call_later(LINGER_SECONDS, self.transport.close)
        else:
            self.transport.close()
