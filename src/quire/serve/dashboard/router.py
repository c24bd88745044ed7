"""The page at `/`: its files, and the live data that it draws. The data is `PageSource`'s.

Pages and scripts hold no data and need no key. Everything else here does; the page asks for the key and sends it like
any client. Nothing is loaded from other servers, and the page has no inline script or style.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from importlib.resources import files
from typing import TYPE_CHECKING, Any

import msgspec
from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import RedirectResponse, Response, StreamingResponse

if TYPE_CHECKING:
    from quire.serve.dashboard.stats import PageSource

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
DATA_HEADERS = {**HEADERS, "Cache-Control": "no-store"}

_encode = msgspec.json.Encoder().encode


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
    """Load all files of the page by name."""
    found = {}
    for entry in (files("quire.serve.dashboard") / "static").iterdir():
        kind = KINDS.get(entry.name.rpartition(".")[2])
        if kind is not None:
            body = entry.read_bytes()
            found[entry.name] = Asset(body, kind, f'"{hashlib.sha256(body).hexdigest()[:20]}"')
    return found


def open_paths() -> frozenset[str]:
    """List the paths that hold no data and must be open to a browser that has no key yet."""
    names = {name for name in load_assets() if not name.endswith(".html")}
    return frozenset({"/", "/dashboard/reference"} | {f"/dashboard/{name}" for name in names})


def dashboard_router(source: PageSource, interval: float = INTERVAL) -> APIRouter:
    """Make the page's routes, none of them in the API's document.

    The application's middleware checks keys and lets `open_paths` through. While somebody watches, events come every
    `interval` seconds.
    """
    router = APIRouter(include_in_schema=False)
    assets = load_assets()

    @router.get("/")
    async def index(request: HttpRequest) -> Response:
        return assets["index.html"].answer(request)

    @router.get("/dashboard/reference")
    async def reference(request: HttpRequest) -> Response:
        return assets["reference.html"].answer(request)

    @router.get("/docs")
    async def docs() -> Response:
        return RedirectResponse("dashboard/reference")

    @router.get("/dashboard/events")
    async def events(request: HttpRequest) -> Response:
        headers = {**DATA_HEADERS, "X-Accel-Buffering": "no"}
        return StreamingResponse(
            _events(source, _owner(request), interval), media_type="text/event-stream", headers=headers
        )

    @router.get("/dashboard/history")
    async def history() -> Response:
        return _json({"rings": source.history()})

    @router.get("/dashboard/about")
    async def about() -> Response:
        return _json(source.about())

    @router.delete("/dashboard/requests/{request_id:path}")
    async def stop(request_id: str, request: HttpRequest) -> Response:
        stopped = source.stop_request(request_id, _owner(request))
        return Response(status_code=204 if stopped else 404, headers=DATA_HEADERS)

    @router.get("/dashboard/{name}")
    async def asset(name: str, request: HttpRequest) -> Response:
        found = assets.get(name)
        if found is None or name.endswith(".html"):
            return Response(status_code=404, headers=HEADERS)
        return found.answer(request)

    return router


def _owner(request: HttpRequest) -> str | None:
    """Name the user whose requests the caller sees and stops; None for an operator, who sees all."""
    state: dict[str, Any] = request.scope["state"]
    return None if state["operator"] else state["owner"]


def _json(value: Any) -> Response:
    return Response(_encode(value), media_type="application/json", headers=DATA_HEADERS)


async def _events(source: PageSource, owner: str | None, interval: float) -> AsyncIterator[bytes]:
    """Snapshots as server-sent events until the server drains, so that a viewer never delays shutdown."""
    while True:
        snapshot = await source.snapshot(owner)
        yield b"data: " + _encode(snapshot) + b"\n\n"
        if snapshot.get("draining"):
            return
        await asyncio.sleep(interval)
