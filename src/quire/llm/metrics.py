"""Counts and times of the requests of an `LLM`, in the form of vLLM's `get_metrics`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from prometheus_client.core import Metric as Family
from prometheus_client.core import Sample

from quire.client.metrics import Metrics
from quire.llm.running import PREFIX
from quire.types import EngineStats


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


def read_metrics(counts: Metrics, stats: EngineStats) -> list[Metric]:
    """Read all metrics now."""
    counts.stats = stats
    return [metric for family in counts.families.collect() for metric in _read_family(family)]


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
