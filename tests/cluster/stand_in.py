"""Replicas that speak the router's wire with made-up tokens, and do what a test tells them: die, freeze, hand back."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import xxhash

KEY = "the-key-of-routers"
Fault = tuple[str, int]  # what happens, and after how many events of a stream


@dataclass
class Seen:
    """A request as it came."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes


@dataclass
class StandIn:
    """One replica. `faults` are taken one by one, by the streams that come."""

    kind: str = "class-a"
    models: tuple[str, ...] = ("stories",)
    faults: list[Fault] = field(default_factory=list)
    status: int = 200  # of whole answers
    hangs: bool = False
    silent: float = 0.0  # seconds, of its engine
    healthy: bool = True
    port: int = 0
    pause: float = 0.002
    seen: list[Seen] = field(default_factory=list)
    computed: int = 0  # tokens, but for those that came with /internal/resume
    writers: set[asyncio.StreamWriter] = field(default_factory=set)
    server: asyncio.Server | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def paths(self) -> list[str]:
        """The paths of clients' requests."""
        return [one.path for one in self.seen]

    # --- in the loop's thread

    async def open(self) -> None:
        self.server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self.server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        """End as a killed process does."""
        if self.server is not None:
            self.server.close()
            self.server = None
        for writer in [*self.writers]:
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writers.add(writer)
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
                method, _, rest = head[0].partition(" ")
                path = rest.rpartition(" ")[0]
                pairs = [line.partition(": ") for line in head[1:] if line]
                headers = {name.lower(): value for name, _, value in pairs}
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                while self.hangs:
                    await asyncio.sleep(0.05)
                if writer.transport.is_closing():
                    return
                await self._answer(Seen(method, path, headers, body), writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self.writers.discard(writer)
            writer.transport.abort()

    async def _answer(self, seen: Seen, writer: asyncio.StreamWriter) -> None:
        def whole(status: int, value: Any, *more: str) -> None:
            body = json.dumps(value).encode()
            lines = [
                f"HTTP/1.1 {status} X",
                "content-type: application/json",
                f"content-length: {len(body)}",
                *more,
            ]
            writer.write("\r\n".join([*lines, "", ""]).encode() + body)

        if seen.headers.get("authorization") != f"Bearer {KEY}":
            return whole(401, {})
        if seen.path == "/health":
            return whole(200 if self.healthy else 503, {})
        if seen.path == "/internal/replica":
            return whole(200, {"class": self.kind, "models": {name: {} for name in self.models}})
        if seen.path.startswith("/internal/events"):
            await asyncio.sleep(0.1)
            return whole(200, {"next": 0, "reset": False, "load": {"silent": self.silent}, "events": []})
        if seen.path == "/v1/models":
            return whole(200, {"object": "list", "data": [{"id": name} for name in self.models]})
        self.seen.append(seen)
        asked = json.loads(seen.body or b"{}")
        resumed = seen.path == "/internal/resume"
        route = asked["route"] if resumed else json.loads(seen.headers["x-quire-route"])
        path = asked["path"] if resumed else seen.path
        inner = json.loads(asked["body"]) if resumed else asked
        if not inner.get("stream"):
            if self.faults:
                await self._fault(self.faults.pop(0)[0], writer, whole)
                return None
            if self.status != 200:
                return whole(self.status, {"error": {"message": "secret-address"}}, "retry-after: 7")
            return whole(200, {"id": route["id"], "seed": route["seed"], "class": self.kind})
        writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n"
            b'x-quire-load: {"step": 2}\r\n\r\n'
        )
        sent = len(asked["sent"]) if resumed else 0
        fault, at = self.faults.pop(0) if self.faults else ("", -1)
        number = 0
        async for block in self._events(inner, route, path, sent, asked.get("events", 0) if resumed else 0):
            if number == at:
                await self._fault(fault, writer, whole, begun=True)
                return None
            number += 1
            self._chunk(writer, block)
            await writer.drain()
            await asyncio.sleep(self.pause)
        writer.write(b"0\r\n\r\n")
        return None

    async def _fault(self, fault: str, writer: asyncio.StreamWriter, whole: Any, begun: bool = False) -> None:
        if fault == "killed":
            await self.close()
        elif fault == "cut":
            writer.write(b"0\r\n\r\n")
        elif fault == "half":  # a part of an event, then the end
            self._chunk(writer, b': t 99\ndata: {"ha')
            await writer.drain()
            writer.transport.abort()
        elif fault == "silent":
            self.hangs = True
            while self.hangs:
                await asyncio.sleep(0.05)
            writer.transport.abort()
        elif fault == "frozen":  # the engine alone: comments go on
            self.silent = 9.0
            while self.silent and not writer.transport.is_closing():
                if begun:
                    self._chunk(writer, b": keep-alive\n\n")
                await asyncio.sleep(0.05)
            writer.transport.abort()
        elif fault in ("moved", "moved engine"):
            self._chunk(writer, f": {fault}\n\n".encode())
            writer.write(b"0\r\n\r\n")
        elif fault == "engine":
            whole(500, {"error": {"code": "engine_error"}}, "x-quire-moved: engine")

    def _chunk(self, writer: asyncio.StreamWriter, data: bytes) -> None:
        writer.write(b"%x\r\n%s\r\n" % (len(data), data))

    async def _events(
        self, body: dict[str, Any], route: dict[str, Any], path: str, sent: int, dropped: int
    ) -> AsyncIterator[bytes]:
        """The blocks of an answer: a first event without a token, one for each token, the last."""
        marked = path != "/v1/programs"
        name = route["id"]
        blocks = [f'data: {{"id": "{name}", "role": 1}}']
        for number in range(body.get("max_tokens", 20)):
            token = xxhash.xxh3_64_intdigest(f"{body.get('seed', route['seed'])}/{number}".encode()) % 1000
            more = "x" * body.get("size", 0)
            blocks.append(f'data: {{"id": "{name}", "n": {number}, "token": {token}, "more": "{more}"}}')
        end = {
            "/v1/messages": "event: message_stop\ndata: {}",
            "/v1/responses": "event: response.completed\ndata: {}",
        }
        blocks.append(end.get(path, "data: [DONE]"))
        for number, block in enumerate(blocks):
            token = 0 < number < len(blocks) - 1
            if token and number > sent:
                self.computed += 1
            mark = f": t {number}\n" if token and marked and number > sent else ""
            if number >= dropped:
                yield f"{mark}{block}\n\n".encode()
            if marked and number % 7 == 3:
                yield b': s {"step": 5, "queued": 3}\n\n'


class Loop:
    """An event loop in a thread of its own, with stand-ins."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()

    def run(self, job: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(job, self.loop).result(60)


@dataclass
class Running:
    """A router process and its log."""

    process: subprocess.Popen[str]
    url: str = ""
    lines: list[str] = field(default_factory=list)

    @property
    def client(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=120)

    @property
    def log(self) -> str:
        return "\n".join(self.lines)

    def counts(self) -> dict[str, float]:
        """The metrics."""
        lines = httpx.get(f"{self.url}/metrics", timeout=120).text.splitlines()
        return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if line[0] != "#"}

    def metric(self, start: str) -> float:
        return sum(value for name, value in self.counts().items() if name.startswith(start))


@contextmanager
def router(*options: str, keys: bool = True) -> Iterator[Running]:
    """A router that listens."""
    key = ("--router-api-key", KEY) if keys else ()
    with started("route", *options, *key) as running:
        yield running


@contextmanager
def started(*words: str) -> Iterator[Running]:
    """A command that routes, once it listens."""
    command = [sys.executable, "-m", "quire.cli", *words, "--port", "0"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    running = Running(process)
    ready = threading.Event()

    def read() -> None:
        assert process.stderr is not None
        for line in process.stderr:
            running.lines.append(line.rstrip("\n"))
            if "serving the replicas' models at" in line:
                running.url = line.rpartition(" at ")[2].strip()
                ready.set()
        ready.set()

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        assert ready.wait(300), running.log
        assert running.url, running.log
        yield running
    finally:
        if process.poll() is None:
            process.kill()
        process.wait(60)
        reader.join()
        assert process.stderr is not None
        process.stderr.close()
    assert "Traceback" not in running.log, running.log
