"""A light HTTP client for streamed completions that records when each piece arrives.

An event costs a few microseconds, so a few hundred streams on the server's own machine measure the server rather than
this client. Knows no datasets.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import msgspec

from quire.errors import ConfigError, EngineError
from quire.serve.threads import within
from quire.serve.upstream import Address, Lost, Upstream, message

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

    address: Address
    base_path: str = ""
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
        return cls(Address(parts.hostname, port, tls), parts.path.rstrip("/"), dict(headers or {}))

    @property
    def url(self) -> str:
        return f"{'https' if self.address.tls else 'http'}://{self.address.shown}{self.base_path}"

    def head(self, method: str, path: str) -> bytes:
        """The request line and headers, without the length of the body."""
        lines = [f"{method} {self.base_path}{path} HTTP/1.1", f"Host: {self.address.shown}"]
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


class Client:
    """Keep-alive connections to one target. Use it from one event loop and close it when done."""

    def __init__(self, target: Target, timeout: float) -> None:
        self.target = target
        self.timeout = timeout
        self._upstream = Upstream(target.address, timeout)

    async def stream(self, path: str, body: bytes, outcome: Outcome) -> None:
        """POST `body` and read the events of the response into `outcome`. Any failure is recorded there too."""
        events = EventStream(outcome)
        outcome.start = time.perf_counter()
        sent = message(self.target.head("POST", path), ((b"Content-Type", b"application/json"),), body)
        asking = self._upstream.whole(sent, lambda data: events.feed(data, time.perf_counter()))
        try:
            status, said = await within(self.timeout, asking)
        except asyncio.TimeoutError:
            outcome.error = f"no end after {self.timeout:g} s"
        except Lost as lost:
            outcome.error = str(lost)
        else:
            if status == 200:
                events.end(time.perf_counter())
            else:
                outcome.error = f"HTTP {status}: {_reason(said)}"

    async def get(self, path: str) -> tuple[int, bytes]:
        """GET a page and return its status and body. Raises EngineError if there is no response."""
        try:
            return await within(self.timeout, self._upstream.whole(message(self.target.head("GET", path))))
        except (Lost, asyncio.TimeoutError) as error:
            why = str(error) or type(error).__name__
            raise EngineError(
                f"no response from {self.target.url}: {why}; is the server running there?"
            ) from error

    def close(self) -> None:
        self._upstream.close()


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
