"""The page with a server behind it that is made up: known numbers, a model that says what it is told."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import uvicorn
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from quire.serve.dashboard.router import dashboard_router, open_paths

ABOUT: dict[str, Any] = {
    "model": "made-up",
    "version": "9.9",
    "max_model_len": 400,
    "generates": True,
    "chat": True,
    "thinking": True,
    "efforts": ["low", "high"],
    "defaults": {"temperature": 0.7, "top_p": 0.95, "top_k": 0},
}

STATS: dict[str, Any] = {
    "model": "made-up",
    "block_size": 16,
    "healthy": True,
    "num_running": 3,
    "num_waiting": 12,
    "num_blocks": 4096,
    "num_used_blocks": 1024,
    "num_cached_blocks": 512,
    "num_free_blocks": 2560,
    "num_preemptions": 7,
    "prompt_tokens": 1000,
    "cached_tokens": 250,
    "generation_tokens": 12345,
    "finished": {"stop": 4, "length": 5, "abort": 0, "error": 1},
    "ttft_p50": 0.0384,
    "ttft_p99": 1.25,
    "itl_p50": 0.0073,
    "itl_p99": None,
}


@dataclass
class World:
    """What the page sees, changed by tests while it looks. `pieces` is what the model says after its `thoughts`."""

    stats: dict[str, Any] = field(default_factory=lambda: dict(STATS))
    pieces: list[str] = field(default_factory=lambda: ["Hello", ", ", "world."])
    thoughts: list[str] = field(default_factory=list)
    delay: float = 0.0
    key: str | None = None
    error: tuple[int, str] | None = None
    finish: str = "stop"
    requests: list[dict[str, Any]] = field(default_factory=list)
    aborted: int = 0
    snapshots: int = 0
    url: str = ""
    facts: dict[str, Any] = field(default_factory=lambda: dict(ABOUT))
    calls: list[dict[str, Any]] = field(default_factory=list)
    logprobs: bool = False
    break_after: int | None = None
    stopped: list[str] = field(default_factory=list)
    longest: int | None = None  # most messages that fit
    models: list[str] = field(default_factory=lambda: ["made-up"])

    def about(self) -> dict[str, Any]:
        return self.facts

    def history(self) -> dict[str, Any]:
        row = {"running": 1, "waiting": 0, "restarts": 0, "ttft_p50": 0.1, "itl_p50": 0.01}
        return {"300": [{"time": time.time() - 200 + i, "rate": 50.0 + i, **row} for i in range(100)]}

    def stop_request(self, request_id: str, owner: str | None) -> bool:
        self.stopped.append(request_id)
        return True

    async def snapshot(self, owner: str | None) -> dict[str, Any]:
        self.snapshots += 1
        return {"time": asyncio.get_running_loop().time(), "wall": time.time(), **self.stats}


def app_of(world: World) -> FastAPI:
    app = FastAPI()
    app.include_router(dashboard_router(world, interval=0.1))
    opened = open_paths()

    @app.middleware("http")
    async def gate(request: Request, call_next: Any) -> Response:
        given = request.headers.get("authorization")
        if world.key is not None and request.url.path not in opened and given != f"Bearer {world.key}":
            return JSONResponse({"error": {"message": "Incorrect API key"}}, 401)
        request.state.operator, request.state.owner = True, ""
        answer: Response = await call_next(request)
        return answer

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [{"id": name, "object": "model"} for name in world.models]}

    @app.post("/v1/embeddings")
    async def embed(request: Request) -> dict[str, Any]:
        body = await request.json()
        world.requests.append(body)
        vectors = [[1.0, 0.0], [0.6, 0.8], [0.8, 0.6]]
        return {"data": [{"embedding": v} for v in vectors[: len(body["input"])]]}

    @app.post("/tokenize")
    async def tokenize(request: Request) -> dict[str, Any]:
        words = (await request.json())["prompt"].split()
        return {"count": len(words), "tokens": list(range(len(words))), "token_strs": words}

    @app.post("/v1/chat/completions")
    @app.post("/v1/completions")
    async def write(request: Request) -> Response:
        body = await request.json()
        world.requests.append(body)
        if world.error is not None:
            status, message = world.error
            return JSONResponse({"error": {"message": message, "type": "x"}}, status)
        if world.longest is not None and len(body["messages"]) > world.longest:
            told = {"message": "too long: shorten it", "code": "context_length_exceeded"}
            return JSONResponse({"error": told}, 400)
        return Answer(pieces(world, "messages" in body), media_type="text/event-stream")

    return app


class Answer(StreamingResponse):
    """Ends its pieces as soon as the reader leaves, not when they are collected."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(cast(AsyncGenerator[str, None], self.body_iterator)):
            await super().__call__(scope, receive, send)


async def pieces(world: World, chat: bool) -> AsyncGenerator[str, None]:
    ended = False
    try:
        for thought in world.thoughts:
            delta = {"reasoning_content": thought}
            yield f"data: {json.dumps({'choices': [{'index': 0, 'delta': delta}]})}\n\n"
        for call in world.calls:
            yield f"data: {json.dumps({'choices': [{'index': 0, 'delta': {'tool_calls': [call]}}]})}\n\n"
        for i, piece in enumerate(world.pieces):
            if i == world.break_after:
                return
            part: dict[str, Any] = {"delta": {"content": piece}} if chat else {"text": piece}
            if world.logprobs and chat:
                top = [{"token": piece, "logprob": -0.1}, {"token": " other", "logprob": -2.3}]
                part["logprobs"] = {"content": [{"token": piece, "logprob": -0.1, "top_logprobs": top}]}
            end = world.finish if i == len(world.pieces) - 1 else None
            yield f"data: {json.dumps({'choices': [{'index': 0, **part, 'finish_reason': end}]})}\n\n"
            await asyncio.sleep(world.delay)
        usage = {
            "prompt_tokens": 31,
            "completion_tokens": len(world.pieces),
            "prompt_tokens_details": {"cached_tokens": 24},
        }
        yield f"data: {json.dumps({'choices': [], 'usage': usage})}\n\ndata: [DONE]\n\n"
        ended = True
    finally:
        world.aborted += not ended


@contextmanager
def page_server(world: World) -> Iterator[World]:
    """Serve the page of `world` on a free port."""
    config = uvicorn.Config(app_of(world), port=0, log_level="warning", timeout_graceful_shutdown=2)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            threading.Event().wait(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        world.url = f"http://127.0.0.1:{port}"
        yield world
    finally:
        world.stats["draining"] = True
        server.should_exit = True
        thread.join(60)
