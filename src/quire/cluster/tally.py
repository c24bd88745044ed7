"""The counts of a router, as Prometheus reads them: replicas are numbers there, never addresses."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric

DECISION_BUCKETS = (0.00001, 0.00002, 0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.1)
COUNTED = {
    "requests": ("Requests passed on, by outcome.", "outcome"),
    "moves": ("Streams that went on elsewhere, by cause.", "cause"),
    "retries": ("Requests sent again, by cause.", "cause"),
    "refusals": ("Requests that no replica got, by reason.", "reason"),
    "checks": ("Moved streams compared with another run.", "result"),
}


class Tally:
    """Counters of COUNTED and of answers; `gauges` gives the state at each scrape."""

    def __init__(self, prefix: str, gauges: Callable[[], Mapping[str, Mapping[str, float]]]) -> None:
        self.registry = registry = CollectorRegistry()
        self._prefix, self._gauges = f"{prefix}_route", gauges
        ProcessCollector(registry=registry)
        self._counters = {
            name: Counter(f"{self._prefix}_{name}", text, (label,), registry=registry)
            for name, (text, label) in COUNTED.items()
        }
        labels = ("method", "handler", "status")
        self.answers = Counter("http_requests", "HTTP requests answered.", labels, registry=registry)
        name, text = f"{self._prefix}_decision_seconds", "Time to choose a replica."
        self.decisions = Histogram(name, text, buckets=DECISION_BUCKETS, registry=registry)
        registry.register(self)

    def count(self, name: str, label: str) -> None:
        """Count one of COUNTED."""
        self._counters[name].labels(label).inc()

    def collect(self) -> Iterable[Metric]:
        """Make the gauges of a scrape."""
        for name, values in self._gauges().items():
            family = GaugeMetricFamily(f"{self._prefix}_{name}", name.replace("_", " "), labels=("what",))
            for key, value in values.items():
                family.add_metric((key,), value)
            yield family
