"""Collects the page's live data from the metrics and the engine client of the API process. Knows no HTTP.

Quantiles cover the last half minute: the difference between two readings of a histogram.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from quire.client.client import AsyncEngine
from quire.client.metrics import RequestTimes
from quire.serve.dashboard.history import TICK, History, Reading, quantile

WINDOW = 30.0
QUANTILES = {"p50": 0.5, "p99": 0.99}
PARTS = {"prefill": "inter_token_prefill_seconds", "step": "step_time_seconds"}
LATENCIES = {"ttft": "time_to_first_token_seconds", "itl": "inter_token_latency_seconds"}
MOST_ROWS = 50  # of live requests in a snapshot


class PageSource:
    """The data that the page shows. `state` adds the server's state; `about` describes the model."""

    def __init__(
        self,
        engine: AsyncEngine,
        state: Callable[[], dict[str, Any]],
        about: Callable[[], dict[str, Any]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._metrics = engine.metrics
        self._engine = engine
        self._state = state
        self.about = about
        self._clock = clock
        self._history = History(self._read)
        self._readings: dict[str, deque[tuple[float, list[int]]]] = {
            name: deque() for name in LATENCIES | PARTS
        }

    async def run(self) -> None:
        """Keep the history; for the life of the server."""
        while True:
            self._history.tick()
            self._metrics.work.look(self._clock())
            await asyncio.sleep(TICK)

    def history(self) -> dict[str, Any]:
        """Give the rings of rows by their length in seconds."""
        return self._history.rings()

    def stop_request(self, request_id: str, owner: str | None = None) -> bool:
        """End a live request of the owner (None: of anybody) with an error that says so; False if none has the id."""
        return self._engine.stop_request(request_id, owner)

    async def snapshot(self, owner: str | None = None) -> dict[str, Any]:
        """Give EngineStats, latency quantiles in seconds (`ttft_p50`, ..., None if nothing was observed), requests by
        how they ended, live requests (of the owner, if given), the newest rows of the history, `time` (steady) and
        `wall` seconds, and `state`, whose `draining` ends the stream."""
        now, metrics = self._clock(), self._metrics
        found: dict[str, Any] = {
            "time": now,
            "wall": time.time(),
            "model": metrics.model_name,
            "block_size": int(metrics.cache_config.get("block_size", 0)),
            **metrics.stats.as_dict(),
            "work": metrics.work.shares(now),
            "prompt_tokens": metrics.prompt_tokens,
            "cached_tokens": metrics.cached_tokens,
            "generation_tokens": metrics.generation_tokens,
            "finished": dict(metrics.finished),
            "restarts": metrics.restarts,
            "rows": self._history.latest(),
            **self._live(now, owner),
        }
        for name, histogram in (LATENCIES | PARTS).items():
            found |= self._recent(name, histogram, now)
        return {**found, **self._state()}

    def _live(self, now: float, owner: str | None) -> dict[str, Any]:
        """Give the oldest live requests as rows, and the number of others."""
        block_size = int(self._metrics.cache_config.get("block_size", 0)) or 1
        live = [one for one in self._engine.live_times() if owner in (None, one.request.owner)]
        rows = [request_row(times, now, block_size) for times in live[:MOST_ROWS]]
        return {"requests": rows, "requests_hidden": len(live) - len(rows)}

    def _read(self) -> Reading:
        metrics = self._metrics
        histograms = {name: metrics.histograms[histogram][1] for name, histogram in LATENCIES.items()}
        return Reading(
            time.time(),
            metrics.generation_tokens,
            metrics.stats.num_running,
            metrics.stats.num_waiting,
            metrics.restarts,
            {name: (h.bounds, list(h.counts)) for name, h in histograms.items()},
        )

    def _recent(self, name: str, histogram: str, now: float) -> dict[str, float | None]:
        """Compute quantiles of what was observed since the oldest reading of the window."""
        source = self._metrics.histograms[histogram][1]
        readings = self._readings[name]
        while readings and now - readings[0][0] > WINDOW:
            readings.popleft()
        counts = list(source.counts)
        base = readings[0][1] if readings else counts
        readings.append((now, counts))
        recent = [new - old for new, old in zip(counts, base, strict=True)]
        return {f"{name}_{word}": quantile(source.bounds, recent, share) for word, share in QUANTILES.items()}


def request_row(times: RequestTimes, now: float, block_size: int) -> dict[str, Any]:
    """Describe a live request in counts and times, never text. `blocks` its tokens fill; sharing is not counted."""
    prompt = len(times.request.tokens)
    seconds = times.last_token - times.first_token
    state = "waiting" if not times.scheduled else "prompt" if not times.first_token else "writing"
    return {
        "id": times.request.id,
        "state": state,
        "age": max(0.0, now - times.arrival),
        "prompt": prompt,
        "cached": times.num_cached,
        "output": times.num_output,
        "rate": (times.num_output - 1) / seconds if seconds > 0 else None,
        "blocks": -(-(prompt + times.num_output) // block_size) if times.scheduled else 0,
    }
