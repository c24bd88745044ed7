"""Collects the page's live data from the metrics and the engine client of the API process. Knows no HTTP.

Quantiles cover the last half minute: the difference between two readings of a histogram.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from quire.client.metrics import Metrics, RequestTimes

# Seconds that a ring covers, and seconds per row: 300, 240 and 288 rows.
SPANS = ((300, 1.0), (3600, 15.0), (86400, 300.0))
TICK = 1.0


def quantile(bounds: Sequence[float], counts: Sequence[int], share: float) -> float | None:
    """Find the value below which `share` of the observations lie; None without any.

    `counts` has one entry more than `bounds`, for values above the last, which count as the last bound. Buckets are
    taken as evenly filled.
    """
    total = sum(counts)
    if not total:
        return None
    rank, below = share * total, 0
    for i, count in enumerate(counts[: len(bounds)]):
        if count and below + count >= rank:
            low = bounds[i - 1] if i else 0.0
            return low + (bounds[i] - low) * (rank - below) / count
        below += count
    return bounds[-1]


@dataclass(frozen=True, slots=True)
class Reading:
    """Counters and histograms at one moment. `time` is wall-clock seconds, so that rows survive a reload."""

    time: float
    generation_tokens: int
    num_running: int
    num_waiting: int
    restarts: int
    histograms: Mapping[str, tuple[Sequence[float], Sequence[int]]]  # name -> bounds, counts


def row(before: Reading, now: Reading) -> dict[str, Any]:
    """Make the row of the interval between two readings."""
    seconds = max(now.time - before.time, 1e-6)
    found: dict[str, Any] = {
        "time": now.time,
        "rate": max(0, now.generation_tokens - before.generation_tokens) / seconds,
        "running": now.num_running,
        "waiting": now.num_waiting,
        "restarts": now.restarts,
    }
    for name, (bounds, counts) in now.histograms.items():
        fresh = [new - old for new, old in zip(counts, before.histograms[name][1], strict=True)]
        found[f"{name}_p50"] = quantile(bounds, fresh, 0.5)
    return found


@dataclass(slots=True)
class Ring:
    """Rows of one resolution; `base` is the reading at the end of the last row."""

    interval: float
    rows: deque[dict[str, Any]]
    base: Reading | None = None


class History:
    """Rings that `tick` fills; it must be called about once a second."""

    def __init__(self, read: Callable[[], Reading]) -> None:
        self._read = read
        self._rings = {span: Ring(each, deque(maxlen=int(span / each))) for span, each in SPANS}

    def tick(self) -> None:
        """Take a reading; close the rows whose interval is over."""
        now = self._read()
        for ring in self._rings.values():
            if ring.base is None or now.time < ring.base.time:
                ring.base = now
            elif now.time - ring.base.time >= ring.interval * 0.95:
                ring.rows.append(row(ring.base, now))
                ring.base = now

    def rings(self) -> dict[str, list[dict[str, Any]]]:
        """Give all rows by the seconds that their ring covers, oldest first."""
        return {str(span): list(ring.rows) for span, ring in self._rings.items()}

    def latest(self) -> dict[str, dict[str, Any]]:
        """Give the newest row of each ring that has one."""
        return {str(span): ring.rows[-1] for span, ring in self._rings.items() if ring.rows}


WINDOW = 30.0
QUANTILES = {"p50": 0.5, "p99": 0.99}
PARTS = {"prefill": "inter_token_prefill_seconds", "step": "step_time_seconds"}
LATENCIES = {"ttft": "time_to_first_token_seconds", "itl": "inter_token_latency_seconds"}
MOST_ROWS = 50  # of live requests in a snapshot


class Requests(Protocol):
    """The engine client as far as the table of live requests needs it."""

    def live_times(self) -> list[RequestTimes]: ...
    def stop_request(self, request_id: str, owner: str | None = None) -> bool: ...


class PageSource:
    """The data that the page shows. `state` adds the server's state; `about` describes the model."""

    def __init__(
        self,
        metrics: Metrics,
        requests: Requests | None = None,
        state: Callable[[], dict[str, Any]] = dict,
        about: Callable[[], dict[str, Any]] = dict,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._metrics = metrics
        self._requests = requests
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
        return self._history.rings()

    def stop_request(self, request_id: str, owner: str | None = None) -> bool:
        return self._requests is not None and self._requests.stop_request(request_id, owner)

    async def snapshot(self, owner: str | None = None) -> dict[str, Any]:
        """EngineStats, latency quantiles in seconds (`ttft_p50`, ..., None if nothing was observed), requests by how
        they ended, live requests (of the owner, if given), the newest rows of the history, `time` (steady) and `wall`
        seconds, and `state`."""
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
        if self._requests is None:
            return {"requests": [], "requests_hidden": 0}
        block_size = int(self._metrics.cache_config.get("block_size", 0)) or 1
        live = [one for one in self._requests.live_times() if owner in (None, one.request.owner)]
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
