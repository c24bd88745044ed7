"""A light HTTP client for streamed completions that records when each piece arrives.

Each connection is one asyncio protocol, and httptools does the framing. An event costs a few microseconds, so a few
hundred streams on the server's own machine measure the server rather than this client. Knows no datasets.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from dataclasses import dataclass, field
from typing import Any, cast
from urllib.parse import urlsplit

import httptools
import msgspec

from quire.errors import ConfigError, EngineError

MAX_ERROR_BODY = 2000


class _Delta(msgspec.Struct):
    role: str | None = None
    content: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: msgspec.Raw = msgspec.Raw()


_decode = msgspec.json.Decoder(_Event).decode


@dataclass(slots=True, eq=False)
class Outcome:
    """The result of one request. Times are in seconds; `start` is on the monotonic clock.

    `ttft` runs from sending to the first piece of output, `itls` between pieces, `latency` to the last piece.
    `output_tokens`, `prompt_tokens` and `cached_tokens` are the server's own counts, None if it reports
    none. `error` is empty if the request ran to its end.
    """

    start: float = 0.0
    queue_time: float = 0.0
    ttft: float = 0.0
    latency: float = 0.0
    itls: list[float] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    output_tokens: int | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    error: str = ""

    @property
    def ok(self) -> bool:
        return not self.error

    @property
    def text(self) -> str:
        return "".join(self.pieces)


@dataclass(frozen=True, slots=True)
class Target:
    """The server to send to. `headers` may hold a key, so they are never shown."""

    host: str
    port: int
    base_path: str = ""
    tls: ssl.SSLContext | None = None
    headers: dict[str, str] = field(default_factory=dict, repr=False)

    @classmethod
    def from_url(cls, url: str, headers: dict[str, str] | None = None, insecure: bool = False) -> Target:
        """`http[s]://host[:port][/path]`; `insecure` accepts any certificate."""
        parts = urlsplit(url if "//" in url else f"http://{url}")
        try:
            port = parts.port
        except ValueError as error:
            raise ConfigError(f"--base-url {url}: {error}") from error
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"--base-url must look like http://host:port, got {url!r}")
        if parts.username is not None:
            raise ConfigError("--base-url must not hold a user or password: use --api-key or --header")
        tls = ssl.create_default_context() if parts.scheme == "https" else None
        if tls is not None and insecure:
            tls.check_hostname = False
            tls.verify_mode = ssl.CERT_NONE
        for name, value in (headers or {}).items():
            if not name or any(c in f"{name}{value}" for c in "\r\n\0"):
                raise ConfigError(f"header {name!r} holds a line break or has no name")
        port = port or (443 if tls else 80)
        return cls(parts.hostname, port, parts.path.rstrip("/"), tls, dict(headers or {}))

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.tls else 'http'}://{host}:{self.port}{self.base_path}"

    def head(self, method: str, path: str) -> bytes:
        """The request line and headers, without the length of the body."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        lines = [f"{method} {self.base_path}{path} HTTP/1.1", f"Host: {host}:{self.port}"]
        lines += [f"{name}: {value}" for name, value in self.headers.items()]
        return "\r\n".join(lines).encode("utf-8") + b"\r\n"


class EventStream:
    """Parses server-sent events from bytes split anywhere, and writes them into an Outcome."""

    __slots__ = ("_buffer", "_data", "_last", "done", "finished", "outcome", "started")

    def __init__(self, outcome: Outcome) -> None:
        self.outcome = outcome
        self.done = False
        self.finished = False
        self.started = False
        self._last = 0.0
        self._buffer = b""
        self._data: list[bytes] = []

    def feed(self, body: bytes, now: float) -> None:
        """Take the bytes that arrived at `now`."""
        if not self._buffer and not self._data and body.endswith(b"\n\n") and body.count(b"\n") == 2:
            self._event(body[5:-2] if body.startswith(b"data:") else b"", now)
            return
        *lines, self._buffer = (self._buffer + body).split(b"\n")
        for line in lines:
            line = line.rstrip(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:])
            elif not line:
                self._flush(now)

    def end(self, now: float) -> None:
        """Decide whether the complete response is a success."""
        if self._buffer.startswith(b"data:"):
            self._data.append(self._buffer[5:])
        self._flush(now)
        if self.outcome.error:
            return
        if not self.started:
            self.outcome.error = "the response held no token"
        elif not (self.done or self.finished):
            self.outcome.error = "the stream ended without a finish reason"

    def _flush(self, now: float) -> None:
        if self._data:
            data, self._data = b"\n".join(self._data), []
            self._event(data, now)

    def _event(self, data: bytes, now: float) -> None:
        outcome = self.outcome
        if not data or data.isspace():
            return
        try:
            event = _decode(data)
        except msgspec.DecodeError as error:
            if data.strip() == b"[DONE]":
                self.done = True
            else:
                outcome.error = outcome.error or f"an event does not follow the API: {error}"
            return
        if event.error and bytes(event.error) != b"null":
            outcome.error = (
                outcome.error or f"the stream broke off: {bytes(event.error).decode(errors='replace')}"
            )
        if event.choices:
            self._choice(event.choices[0], now)
        usage = event.usage
        if usage is not None:
            outcome.output_tokens = usage.completion_tokens
            outcome.prompt_tokens = usage.prompt_tokens
            if usage.prompt_tokens_details is not None:
                outcome.cached_tokens = usage.prompt_tokens_details.cached_tokens

    def _choice(self, choice: _Choice, now: float) -> None:
        """Count one piece. As in vLLM, an event with a choice counts even if its text is empty (a special token, or
        text held back), but an event that only names the role does not."""
        delta = choice.delta
        self.finished |= choice.finish_reason is not None
        text = choice.text if delta is None else delta.content
        if delta is not None and delta.role is not None and not text and choice.finish_reason is None:
            return
        outcome = self.outcome
        if self.started:
            outcome.itls.append(now - self._last)
        else:
            self.started = True
            outcome.ttft = now - outcome.start
        self._last = now
        outcome.latency = now - outcome.start
        if text:
            outcome.pieces.append(text)


class _Connection(asyncio.Protocol):
    """One connection. It carries one request at a time."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.reused = False
        self.stream: EventStream | None = None
        self._idle()

    def _idle(self) -> None:
        self.finished: asyncio.Future[None] | None = None
        self.status = 0
        self.body: list[bytes] = []
        self.keep_alive = False
        self.answered = False
        self._framed = False
        self._now = 0.0

    def send(self, message: bytes, stream: EventStream | None) -> asyncio.Future[None]:
        assert self.transport is not None
        self._idle()
        self.stream = stream
        self.finished = asyncio.get_running_loop().create_future()
        self._parser = httptools.HttpResponseParser(self)
        self.transport.write(message)
        return self.finished

    @property
    def usable(self) -> bool:
        return self.transport is not None and not self.transport.is_closing()

    def close(self) -> None:
        if self.transport is not None:
            self.transport.abort()

    # --- called by asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._now = time.perf_counter()
        self.answered = True
        if self.finished is None or self.finished.done():
            self.close()
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(f"the response is not HTTP: {error}")

    def connection_lost(self, exc: Exception | None) -> None:
        if self.finished is None or self.finished.done():
            return
        if self.status and not self._framed and exc is None:
            self.on_message_complete()  # a body that ends with the connection
        else:
            self._fail(f"the connection was closed{f': {exc}' if exc else ''}")

    def _fail(self, why: str) -> None:
        if self.finished is not None and not self.finished.done():
            self.finished.set_exception(ConnectionError(why))
        self.close()

    # --- called by httptools

    def on_header(self, name: bytes, value: bytes) -> None:
        self._framed |= name.lower() in (b"content-length", b"transfer-encoding")

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        if self.stream is not None and self.status == 200:
            self.stream.feed(body, self._now)
        else:
            self.body.append(body)

    def on_message_complete(self) -> None:
        if self.status < 200 or self.finished is None or self.finished.done():
            return
        self.keep_alive = self._framed and self._parser.should_keep_alive()
        if self.stream is not None and self.status == 200:
            self.stream.end(self._now)
        self.finished.set_result(None)


class Client:
    """Keep-alive connections to one target. Use it from one event loop and close it when done."""

    def __init__(self, target: Target, timeout: float) -> None:
        self.target = target
        self.timeout = timeout
        self._idle: list[_Connection] = []

    async def stream(self, path: str, body: bytes, outcome: Outcome) -> None:
        """POST `body` and read the events of the response into `outcome`. Any failure is recorded there too."""
        head = self.target.head("POST", path)
        outcome.start = time.perf_counter()
        try:
            connection = await self._exchange(_message(head, body), EventStream(outcome))
        except asyncio.TimeoutError:
            outcome.error = f"no end after {self.timeout:g} s"
        except OSError as error:
            outcome.error = str(error) or type(error).__name__
        else:
            if connection.status != 200:
                outcome.error = f"HTTP {connection.status}: {_reason(b''.join(connection.body))}"

    async def get(self, path: str) -> tuple[int, bytes]:
        """GET a page and return its status and body. Raises EngineError if there is no response."""
        try:
            connection = await self._exchange(_message(self.target.head("GET", path), b""), None)
        except (OSError, asyncio.TimeoutError) as error:
            why = str(error) or type(error).__name__
            raise EngineError(
                f"no response from {self.target.url}: {why}; is the server running there?"
            ) from error
        return connection.status, b"".join(connection.body)

    def close(self) -> None:
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    async def _exchange(self, message: bytes, stream: EventStream | None) -> _Connection:
        while True:
            connection = await self._connect()
            try:
                await asyncio.wait_for(connection.send(message, stream), self.timeout)
            except (asyncio.TimeoutError, asyncio.CancelledError):
                connection.close()
                raise
            except ConnectionError:
                if connection.reused and not connection.answered:
                    continue  # the server had closed this idle connection before the request
                raise
            if connection.keep_alive and connection.usable:
                self._idle.append(connection)
            else:
                connection.close()
            return connection

    async def _connect(self) -> _Connection:
        while self._idle:
            connection = self._idle.pop()
            if connection.usable:
                connection.reused = True
                return connection
        target = self.target
        opening = asyncio.get_running_loop().create_connection(
            _Connection, target.host, target.port, ssl=target.tls
        )
        _, connection = await asyncio.wait_for(opening, self.timeout)
        return connection


def _message(head: bytes, body: bytes) -> bytes:
    if not body:
        return head + b"\r\n"
    return head + b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body) + body


def _reason(body: bytes) -> str:
    """The message of an error body in OpenAI's format, else its text."""
    text = body[:MAX_ERROR_BODY].decode(errors="replace")
    try:
        found: Any = json.loads(body)
    except ValueError:
        return text
    error = found.get("error", found) if isinstance(found, dict) else found
    message = error.get("message") if isinstance(error, dict) else None
    return str(message or text)
