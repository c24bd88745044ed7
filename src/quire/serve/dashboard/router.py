"""The page for people at `/`: its files, and the live numbers that it draws. Knows no engine.

Pages and scripts hold no data and need no key; the events do, so the page asks for one and sends it as any
client does. Nothing is loaded from elsewhere, and no script or style stands in the page itself.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, Protocol

import msgspec
from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import Response, StreamingResponse

INTERVAL = 0.5
KINDS = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}

_encode = msgspec.json.Encoder().encode


class StatsSource(Protocol):
    """Where the live numbers come from."""

    async def snapshot(self) -> Mapping[str, Any]:
        """The fields of EngineStats and what `quire.serve.dashboard.stats` adds; `draining` ends the stream."""
        ...


@dataclass(frozen=True, slots=True)
class Asset:
    """One file of the page."""

    body: bytes
    kind: str
    tag: str

    def answer(self, request: HttpRequest) -> Response:
        headers = {**HEADERS, "ETag": self.tag}
        if request.headers.get("if-none-match") == self.tag:
            return Response(status_code=304, headers=headers)
        return Response(self.body, media_type=f"{self.kind}; charset=utf-8", headers=headers)


def load_assets() -> dict[str, Asset]:
    """All files of the page by name."""
    found = {}
    for entry in (files("quire.serve.dashboard") / "static").iterdir():
        kind = KINDS.get(entry.name.rpartition(".")[2])
        if kind is not None:
            body = entry.read_bytes()
            found[entry.name] = Asset(body, kind, f'"{hashlib.sha256(body).hexdigest()[:20]}"')
    return found


def open_paths() -> frozenset[str]:
    """The paths that hold no data and must be open to a browser that has no key yet."""
    return frozenset({"/"} | {f"/dashboard/{name}" for name in load_assets() if name != "index.html"})


def dashboard_router(
    stats_source: StatsSource,
    authorize: Callable[[HttpRequest], None] | None = None,
    interval: float = INTERVAL,
) -> APIRouter:
    """Routes `/`, `/dashboard/{file}` and `/dashboard/events`, none of them in the API's document.

    `authorize` raises where a request for events brings no valid key; leave it out where a middleware checks
    keys already. Events come every `interval` seconds, while someone listens.
    """
    router = APIRouter(include_in_schema=False)
    assets = load_assets()

    @router.get("/")
    async def index(request: HttpRequest) -> Response:
        return assets["index.html"].answer(request)

    @router.get("/dashboard/events")
    async def events(request: HttpRequest) -> Response:
        if authorize is not None:
            authorize(request)
        headers = {**HEADERS, "Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        return StreamingResponse(
            _events(stats_source, interval), media_type="text/event-stream", headers=headers
        )

    @router.get("/dashboard/{name}")
    async def asset(name: str, request: HttpRequest) -> Response:
        found = assets.get(name)
        if found is None or name == "index.html":
            return Response(status_code=404, headers=HEADERS)
        return found.answer(request)

    return router


async def _events(source: StatsSource, interval: float) -> AsyncIterator[bytes]:
    """Snapshots as server-sent events, until the server drains: a viewer must not keep it from ending."""
    while True:
        snapshot = await source.snapshot()
        yield b"data: " + _encode(snapshot) + b"\n\n"
        if snapshot.get("draining"):
            return
        await asyncio.sleep(interval)
