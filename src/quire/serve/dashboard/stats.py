"""The live numbers of the page, from the metrics of the API process. Knows no HTTP.

Quantiles are over the last half minute: the difference of two readings of a histogram, its buckets taken as
evenly filled.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from quire.client.metrics import Metrics

WINDOW = 30.0
QUANTILES = {"p50": 0.5, "p99": 0.99}
LATENCIES = {"ttft": "time_to_first_token_seconds", "itl": "inter_token_latency_seconds"}


def quantile(bounds: Sequence[float], counts: Sequence[int], share: float) -> float | None:
    """The value below which `share` of the observations lie; None without any.

    `counts` has one entry more than `bounds`, for values above the last, which count as the last bound.
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


class MetricsSource:
    """Snapshots of `metrics`; `about` adds what else is known at that moment (model, draining, ...)."""

    def __init__(
        self,
        metrics: Metrics,
        about: Callable[[], dict[str, Any]] = dict,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._metrics = metrics
        self._about = about
        self._clock = clock
        self._readings: dict[str, deque[tuple[float, list[int]]]] = {name: deque() for name in LATENCIES}

    async def snapshot(self) -> dict[str, Any]:
        """EngineStats, latency quantiles in seconds (`ttft_p50`, ..., None where nothing was seen), counts of
        requests by how they ended, `time` in seconds on a steady clock, and what `about` says."""
        now, metrics = self._clock(), self._metrics
        found: dict[str, Any] = {
            "time": now,
            "model": metrics.model_name,
            "block_size": int(metrics.cache_config.get("block_size", 0)),
            **metrics.stats.as_dict(),
            "prompt_tokens": metrics.prompt_tokens,
            "cached_tokens": metrics.cached_tokens,
            "generation_tokens": metrics.generation_tokens,
            "finished": dict(metrics.finished),
        }
        for name, histogram in LATENCIES.items():
            found |= self._recent(name, histogram, now)
        return {**found, **self._about()}

    def _recent(self, name: str, histogram: str, now: float) -> dict[str, float | None]:
        """Quantiles of what was observed since the oldest reading of the window."""
        source = self._metrics.histograms[histogram][1]
        readings = self._readings[name]
        while readings and now - readings[0][0] > WINDOW:
            readings.popleft()
        counts = list(source.counts)
        base = readings[0][1] if readings else counts
        readings.append((now, counts))
        recent = [new - old for new, old in zip(counts, base, strict=True)]
        return {f"{name}_{word}": quantile(source.bounds, recent, share) for word, share in QUANTILES.items()}
