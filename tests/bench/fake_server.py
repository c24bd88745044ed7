"""A server that speaks just enough of OpenAI's streaming API to be measured, and can misbehave on purpose."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Behaviour:
    """What the server does. `split` cuts the stream into writes of so many bytes; `break_after` closes the
    connection after so many tokens; `framing` is chunked or close; `fail_status` answers every nth request so."""

    model: str = "fake"
    delay: float = 0.0
    split: int | None = None
    usage: bool = True
    cached_tokens: int | None = None
    break_after: int | None = None
    error_after: int | None = None
    framing: str = "chunked"
    fail_every: int | None = None
    key: str | None = None
    done: bool = True
    newline: str = "\n"
    comment: bool = False
    metrics: str | None = None
    close_idle: bool = False
    not_ready: int = 0
    requests: list[dict[str, Any]] = field(default_factory=list)
    connections: int = 0
    running: int = 0
    most_running: int = 0


class FakeServer:
    def __init__(self, behaviour: Behaviour) -> None:
        self.behaviour = behaviour
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def serve(self, ready: threading.Event, stop: asyncio.Event) -> None:
        server = await asyncio.start_server(self._connection, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        ready.set()
        await stop.wait()
        server.close()
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.behaviour.connections += 1
        try:
            while await self._request(reader, writer):
                pass
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            writer.close()

    async def _request(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        headers = {k.lower(): v for k, _, v in (line.partition(": ") for line in head.split("\r\n")[1:])}
        method, path, _ = head.split(" ", 2)
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        behaviour = self.behaviour
        if behaviour.key is not None and headers.get("authorization") != f"Bearer {behaviour.key}":
            return self._answer(writer, 401, {"error": {"message": "wrong key", "type": "auth"}})
        if path == "/v1/models":
            behaviour.not_ready -= 1
            if behaviour.not_ready >= 0:
                return self._answer(writer, 503, {"error": {"message": "loading"}})
            return self._answer(writer, 200, {"data": [{"id": behaviour.model, "max_model_len": 4096}]})
        if method == "GET" and path == "/metrics" and behaviour.metrics is not None:
            return self._answer(writer, 200, behaviour.metrics.format(n=len(behaviour.requests)))
        if method != "POST":
            return self._answer(writer, 404, {"error": {"message": f"no {path}"}})
        behaviour.requests.append({"path": path, "headers": headers, **json.loads(body)})
        if behaviour.fail_every and len(behaviour.requests) % behaviour.fail_every == 0:
            return self._answer(writer, 503, {"error": {"message": "queue is full", "type": "overload"}})
        behaviour.running += 1
        behaviour.most_running = max(behaviour.most_running, behaviour.running)
        try:
            return await self._stream(writer, path, json.loads(body))
        finally:
            behaviour.running -= 1

    def _answer(self, writer: asyncio.StreamWriter, status: int, body: Any) -> bool:
        data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
        writer.write(b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n" % (status, len(data)) + data)
        return True

    def _events(self, path: str, request: dict[str, Any]) -> Iterator[str]:
        behaviour = self.behaviour
        chat = "messages" in request
        count = request.get("max_tokens") or request["max_completion_tokens"]
        if behaviour.comment:
            yield ": keep-alive"
        if chat:
            yield _data({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
        for i in range(count):
            if behaviour.error_after == i:
                yield _data({"error": {"message": "the engine died", "type": "engine"}})
            if behaviour.break_after == i:
                return
            text = f" t{i}é"
            end = "length" if i == count - 1 else None
            part = {"delta": {"content": text}} if chat else {"text": text}
            yield _data({"id": "x", "choices": [{"index": 0, **part, "finish_reason": end}], "usage": None})
        if behaviour.usage:
            prompt = request.get("prompt", "")
            usage: dict[str, Any] = {"prompt_tokens": len(prompt), "completion_tokens": count}
            if behaviour.cached_tokens is not None:
                usage["prompt_tokens_details"] = {"cached_tokens": behaviour.cached_tokens}
            yield _data({"choices": [], "usage": usage})
        if behaviour.done:
            yield "data: [DONE]"

    async def _stream(self, writer: asyncio.StreamWriter, path: str, request: dict[str, Any]) -> bool:
        behaviour = self.behaviour
        chunked = behaviour.framing == "chunked"
        framing = "Transfer-Encoding: chunked" if chunked else "Connection: close"
        writer.write(f"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n{framing}\r\n\r\n".encode())
        end = behaviour.newline * 2

        def frame(data: bytes) -> bytes:
            return b"%x\r\n%s\r\n" % (len(data), data) if chunked else data

        for event in self._events(path, request):
            data = (event + end).encode()
            size = behaviour.split or len(data)
            for i in range(0, len(data), size):
                writer.write(frame(data[i : i + size]))
                if behaviour.split:
                    await writer.drain()
                    await asyncio.sleep(0)
            if behaviour.delay:
                await asyncio.sleep(behaviour.delay)
        if behaviour.break_after is not None and chunked:
            return False
        if chunked:
            writer.write(b"0\r\n\r\n")
        await writer.drain()
        return chunked and not behaviour.close_idle


def _data(value: Any) -> str:
    return "data: " + json.dumps(value)


@contextmanager
def fake_server(**options: Any) -> Iterator[FakeServer]:
    """A server in a thread of its own, gone with the context."""
    server = FakeServer(Behaviour(**options))
    ready = threading.Event()
    loop = asyncio.new_event_loop()
    stop = asyncio.Event()

    def work() -> None:
        loop.run_until_complete(server.serve(ready, stop))
        loop.close()

    thread = threading.Thread(target=work)
    thread.start()
    assert ready.wait(60)
    try:
        yield server
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(60)
