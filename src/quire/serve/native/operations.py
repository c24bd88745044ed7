"""Endpoints for operators: health, version, load, metrics, the dashboard's numbers; and /reset_prefix_cache."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from prometheus_client import ProcessCollector
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from quire import __version__
from quire.client.client import AsyncEngine
from quire.engine.verbs import ResetPrefixCache
from quire.serve.dashboard.about import about_model
from quire.serve.dashboard.router import dashboard_router
from quire.serve.dashboard.stats import PageSource
from quire.serve.errors import unavailable
from quire.serve.native.control import add_control, add_post, for_operators
from quire.serve.openapi import add_get, json_response
from quire.serve.service import Service
from quire.serve.throughput import Throughput

STATS_TIMEOUT = 0.5  # seconds to wait for fresh numbers from a busy engine


def add_operations(app: FastAPI, service: Service) -> None:
    """Add the routes to the application."""
    source = PageSource(service.engine, lambda: _state(service), lambda: about_model(service))
    service.background.append(source.run)
    if not service.config.disable_log_stats:
        service.background.append(Throughput(service.metrics).run)
    process = ProcessCollector(registry=None)
    its_engine = engine_collector(service.metrics.prefix, service.engine)

    async def health() -> Response:
        if service.healthy:
            return Response()
        raise unavailable("the server is shutting down" if service.draining else service.engine.condition)

    async def version() -> Response:
        return json_response({"version": __version__})

    async def load() -> Response:
        return json_response({"server_load": service.engine.num_live})

    async def metrics(request: HttpRequest) -> Response:
        await service.engine.stats(STATS_TIMEOUT)
        text, kind = service.metrics.text(request.headers.get("accept", ""), process, its_engine)
        return Response(text, headers={"content-type": kind})

    async def reset() -> Response:
        await service.engine.do(ResetPrefixCache())
        return Response()

    async def stats() -> Response:
        await service.engine.stats(STATS_TIMEOUT)
        return json_response(await source.snapshot())

    add_get(app, "/health", health, None, "200 while the engine makes progress, or idles and answers")
    add_get(app, "/ping", health, None, "The same as /health")
    add_post(app, "/ping", health)
    add_get(app, "/version", version, dict[str, str], "Version of the server")
    add_get(app, "/load", load, dict[str, int], "Number of queued and running requests")
    add_get(app, "/stats", stats, dict[str, Any], "Counters and gauges of the engine")
    app.add_api_route("/metrics", metrics, include_in_schema=False)
    if service.config.disable_fastapi_docs:
        for path in ("/docs", "/dashboard/reference"):  # in front of the dashboard's own
            app.add_api_route(path, _absent, include_in_schema=False)
    app.include_router(dashboard_router(source))
    add_post(app, "/reset_prefix_cache", reset)
    for_operators(app, "/reset_prefix_cache")
    add_control(app, service)


def engine_collector(prefix: str, engine: AsyncEngine) -> ProcessCollector:
    """Collect what the system says of an engine's process."""
    return ProcessCollector(f"{prefix}_engine", lambda: engine.pid or "none", registry=None)


async def _absent() -> Response:
    raise HTTPException(404)


def _state(service: Service) -> dict[str, Any]:
    engine = service.engine
    return {
        "model": service.name,
        "healthy": service.healthy,
        "draining": service.draining,
        "requests_live": engine.num_live,
        "requests_queued": engine.num_queued,
    }
