"""Live numbers of the engine for people: one snapshot, or a stream of them. Reads the metrics, writes nothing."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from types import TracebackType

import msgspec

from quire.serve.errors import HttpError
from quire.serve.service import Service
from quire.serve.sse import event
from quire.types import EngineStats

INTERVAL = 0.5


class Snapshot(msgspec.Struct):
    """The state of one moment. Means and rates are over the time since the snapshot before."""

    time: float
    model: str
    healthy: bool
    engine: EngineStats
    restarts: int
    requests_live: int
    requests_queued: int
    requests_finished: int
    prompt_tokens: int
    cached_tokens: int
    generation_tokens: int
    tokens_per_second: float = 0.0
    mean_ttft: float | None = None
    mean_itl: float | None = None


class Recorder:
    """Takes snapshots one after another; each knows what changed since the last."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._last = time.monotonic()
        self._tokens = service.metrics.generation_tokens
        self._sums = self._read_sums()

    def _read_sums(self) -> dict[str, tuple[int, float]]:
        histograms = self._service.metrics.histograms
        names = ("time_to_first_token_seconds", "inter_token_latency_seconds")
        return {name: (histograms[name][1].count, histograms[name][1].total) for name in names}

    def take(self) -> Snapshot:
        service, metrics = self._service, self._service.metrics
        now, sums = time.monotonic(), self._read_sums()
        means: list[float | None] = []
        for name, (count, total) in sums.items():
            before_count, before_total = self._sums[name]
            means.append((total - before_total) / (count - before_count) if count > before_count else None)
        rate = (metrics.generation_tokens - self._tokens) / max(now - self._last, 1e-6)
        self._last, self._tokens, self._sums = now, metrics.generation_tokens, sums
        return Snapshot(
            time.time(),
            service.name,
            service.healthy,
            metrics.stats,
            metrics.restarts,
            service.engine.num_live,
            service.engine.num_queued,
            sum(metrics.finished.values()),
            metrics.prompt_tokens,
            metrics.cached_tokens,
            metrics.generation_tokens,
            rate,
            *means,
        )


class Watching:
    """A reader of the feed, until it leaves."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self._left = asyncio.Event()

    def fail(self, error: Exception) -> None:
        self.error = error
        self._left.set()

    async def sleep(self, seconds: float) -> bool:
        """Whether the reader is still there after `seconds`."""
        try:
            await asyncio.wait_for(self._left.wait(), seconds)
        except asyncio.TimeoutError:
            return True
        return False

    def __enter__(self) -> Watching:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._left.set()


class StatsAnswer:
    """GET /stats/stream: a snapshot at once and then every half second, until the reader or the server goes."""

    streaming = True

    def __init__(self, service: Service) -> None:
        self.call = Watching()
        self._service = service

    async def whole(self) -> bytes:
        return msgspec.json.encode(Recorder(self._service).take())

    async def events(self) -> AsyncGenerator[bytes, None]:
        recorder = Recorder(self._service)
        while not self._service.draining:
            yield event(recorder.take())
            if not await self.call.sleep(INTERVAL):
                return

    def error_event(self, error: HttpError) -> bytes:
        return b"data: " + error.body() + b"\n\n"
