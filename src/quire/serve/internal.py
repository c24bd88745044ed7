"""Tells routers, under /internal, what a replica serves and how much it has to do."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import msgspec
from fastapi import FastAPI
from starlette.responses import Response

from quire import __version__
from quire.client.client import AsyncEngine
from quire.client.metrics import Metrics
from quire.params import StructuredOutputsParams
from quire.serve.held import BLOCK_BYTES, Held, read
from quire.serve.service import Service
from quire.serve.threads import within

LOAD_SECONDS = 0.1  # for which a load is told again
KEPT = 4096  # changes that are told one by one: who has missed more hears all
MOST_WAIT = 60.0
LOOK_SECONDS = 0.25
"""LOOK_SECONDS lie between two looks at the engine for a router that waits for news."""
RATED = ("request_prefill_kv_computed_tokens", "request_prefill_time_seconds", "inter_token_latency_seconds")

_encode = msgspec.json.Encoder().encode


class Load:
    """Tells how much an engine has to do: its steps so far, prompt tokens to compute, requests, free tokens.

    `silent` are the seconds since its last sign of life.
    """

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self._told, self._until = b"", 0.0

    def __call__(self) -> bytes:
        """Make the JSON of the load, at most LOAD_SECONDS old."""
        if (now := time.monotonic()) >= self._until:
            self._told, self._until = _encode(self._now()), now + LOAD_SECONDS
        return self._told

    def _now(self) -> dict[str, float | None]:
        engine = self._engine
        stats, live = engine.metrics.stats, engine.live_times()
        waiting = [times for times in live if not times.first_token]
        return {
            "step": stats.num_steps,
            "queued": sum(max(1, len(times.request.tokens) - times.expected) for times in waiting),
            "running": len(live) - engine.num_queued,
            "waiting": engine.num_queued,
            "free": (stats.num_free_blocks + stats.num_cached_blocks) * engine.config.cache.block_size,
            "silent": round(engine.silence, 2),
            **rates(engine.metrics),
        }


class Events:
    """Tells routers which prefixes the cache is believed to hold: those of the requests that they named."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._news = asyncio.Event()
        self._losses = 0

    @property
    def _held(self) -> Held:
        """What the cache holds: nothing of what an engine held that has ended, or before its cache was emptied."""
        losses = self._service.metrics.restarts + self._service.engine.num_resets
        if self._losses != losses:
            self._losses = losses
            self._believed.clear()
        return self._believed

    @cached_property
    def _believed(self) -> Held:
        size = self._service.metrics.stats.num_blocks * self._service.engine.config.cache.block_size
        return Held(size, kept=KEPT, number=time.time_ns() // 1000)

    def touch(self, prefix: Sequence[str], num_tokens: int) -> int:
        """Note a request of `num_tokens`, whose text begins with the blocks of `prefix`; tell how many are cached."""
        each = max(1, num_tokens // len(prefix))
        came, _ = self._held.touch(read(prefix), each)
        self._news.set()
        return (len(prefix) - len(came)) * each

    async def since(self, number: int, wait: float, silence: float) -> bytes:
        """Tell the changes since a number, once there are some, after `wait` seconds, or once the engine is silent."""
        until, engine = time.monotonic() + min(wait, MOST_WAIT), self._service.engine
        while (
            (left := until - time.monotonic()) > 0
            and number == self._held.number
            and engine.silence < silence
        ):
            self._news.clear()
            with contextlib.suppress(asyncio.TimeoutError):
                await within(min(left, LOOK_SECONDS), self._news.wait())
        following, reset, events = self._held.since(number)
        load = msgspec.Raw(self._service.load())
        return _encode({"next": following, "reset": reset, "load": load, "events": events})


def rates(metrics: Metrics) -> dict[str, float | None]:
    """Tell the tokens a second of prompts, and of one answer, as measured (None: nothing was yet)."""
    computed, prefill, gaps = (metrics.histograms[name][1] for name in RATED)
    prompts = round(computed.total / prefill.total, 2) if prefill.total else None
    return {"prefill_rate": prompts, "decode_rate": round(gaps.count / gaps.total, 2) if gaps.total else None}


def about(service: Service) -> dict[str, Any]:
    """Describe the replica: its class, its models, its sizes."""
    info = service.front.info
    adapters = [adapter.name for adapter in service.adapters.loaded.all]
    return {
        "class": service.fingerprint(service.name),
        "models": {
            name: {"adapter": name in adapters, "class": service.fingerprint(name)}
            for name in (*service.names, *adapters)
        },
        "cache_tokens": service.metrics.stats.num_blocks * service.engine.config.cache.block_size,
        "max_model_len": info.max_model_len,
        "block_bytes": BLOCK_BYTES,
        "version": __version__,
    }


def add_internal(app: FastAPI, service: Service) -> None:
    """Add the routes for routers, which no page of the API describes."""

    async def replica() -> Response:
        return Response(_encode(about(service)), media_type="application/json")

    async def load() -> Response:
        return Response(service.load(), media_type="application/json")

    async def events(since: int = -1, wait: float = 0.0, silence: float = MOST_WAIT) -> Response:
        return Response(await held.since(since, wait, silence), media_type="application/json")

    async def warm() -> None:
        """Start the process that checks constraints: what comes from another replica shall not wait for it."""
        if service.front.tokenizer is not None:
            await service.grammars.check(StructuredOutputsParams(regex="a"), service.front.info)

    held = Events(service)
    service.on_prefix = held.touch
    service.background.append(warm)
    for path, handler in (
        ("/internal/replica", replica),
        ("/internal/load", load),
        ("/internal/events", events),
    ):
        app.add_api_route(path, handler, methods=["GET"], include_in_schema=False)
