"""Counts and times of the requests of an `LLM`, in the form of vLLM's `get_metrics`."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from prometheus_client.core import Metric as Family
from prometheus_client.core import Sample

from quire.client.metrics import Metrics, RequestTimes
from quire.types import Delta, EngineStats, Request, ScheduledBatch

PREFIX = "vllm"


@dataclass(slots=True)
class Metric:
    """Metric with its name and labels."""

    name: str
    labels: dict[str, str]


@dataclass(slots=True)
class Counter(Metric):
    """Counter: a number that only rises."""

    value: int = 0


@dataclass(slots=True)
class Vector(Metric):
    """Counters by position."""

    values: list[int] = field(default_factory=list)


@dataclass(slots=True)
class Gauge(Metric):
    """Gauge: a number that rises and falls."""

    value: float = 0.0


@dataclass(slots=True)
class Histogram(Metric):
    """Observations: how many, their sum, and how many are at most each bound (buckets by bound, as text)."""

    count: int = 0
    sum: float = 0.0
    buckets: dict[str, int] = field(default_factory=dict)


class LocalMetrics:
    """Follows the requests of one engine of this process. All methods but `begin` are for the engine thread."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._live: dict[str, tuple[RequestTimes, set[int]]] = {}

    def begin(self, request: Request) -> RequestTimes:
        """Begin to follow a request that is about to be queued; its times fill as it runs."""
        times = RequestTimes(request, time.monotonic())
        self._live[request.id] = times, set(range(request.sampling.n))
        return times

    def scheduled(self, batch: ScheduledBatch) -> None:
        now = time.monotonic()
        for new in batch.new:
            if new.request.id in self._live:
                self._metrics.scheduled(self._live[new.request.id][0], now)

    def stepped(self, deltas: list[Delta]) -> None:
        now = time.monotonic()
        known = [
            (self._live[delta.request_id][0], delta) for delta in deltas if delta.request_id in self._live
        ]
        self._metrics.step(known, now)
        for times, delta in known:
            if delta.finish_reason is not None:
                samples = self._live[delta.request_id][1]
                samples.discard(delta.index)
                if not samples:
                    del self._live[delta.request_id]
                    self._metrics.end(times, delta.finish_reason, now)

    def dropped(self, request_id: str) -> None:
        self._live.pop(request_id, None)

    def read(self, stats: EngineStats) -> list[Metric]:
        """All metrics now."""
        self._metrics.stats = stats
        return [metric for family in self._metrics.collect() for metric in _read_family(family)]


def _read_family(family: Family) -> Iterator[Metric]:
    """Yield the metrics of a family, one for each set of labels. Leave out families of the web server."""
    if not family.name.startswith(f"{PREFIX}:"):
        return
    grouped: dict[tuple[tuple[str, str], ...], list[Sample]] = {}
    for sample in family.samples:
        shared = tuple((k, v) for k, v in sample.labels.items() if k not in ("le", "position"))
        grouped.setdefault(shared, []).append(sample)
    for labels, samples in grouped.items():
        if family.type == "histogram":
            totals = {sample.name.rpartition("_")[2]: sample.value for sample in samples}
            buckets = {sample.labels["le"]: int(sample.value) for sample in samples if "le" in sample.labels}
            yield Histogram(family.name, dict(labels), int(totals["count"]), totals["sum"], buckets)
        elif any("position" in sample.labels for sample in samples):
            yield Vector(family.name, dict(labels), [int(sample.value) for sample in samples])
        elif family.type == "counter":
            yield Counter(family.name, dict(labels), int(samples[0].value))
        else:
            yield Gauge(family.name, dict(labels), samples[0].value)
