"""One scrape of many models: each series has its model's name."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import ProcessCollector
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from quire.client.exposition import scrape
from quire.serve.many.house import House, Housed
from quire.serve.native.operations import STATS_TIMEOUT, engine_collector


async def metrics_of(house: House, models: list[Housed], prefix: str, accept: str) -> tuple[bytes, str]:
    """Make the scrape of some models, and its content type. One that was never loaded has only its state."""
    for model in models:
        await model.engine.stats(STATS_TIMEOUT)
    return scrape(accept, ProcessCollector(registry=None), Joined(house, models, prefix))


class Joined(Collector):
    """Samples of the same family beside each other."""

    def __init__(self, house: House, models: list[Housed], prefix: str) -> None:
        self._house, self._models, self._prefix = house, models, prefix

    def collect(self) -> Iterable[Metric]:
        loaded, waiting = (
            GaugeMetricFamily(f"{self._prefix}:model_{name}", text, labels=("model_name",))
            for name, text in (("loaded", "Whether it is loaded."), ("waiting", "Requests that wait for it."))
        )
        found: dict[str, Metric] = {family.name: family for family in (loaded, waiting)}
        for model in self._models:
            loaded.add_metric((model.name,), model.served is not None)
            waiting.add_metric((model.name,), self._house.residents.models[model.name].waiting)
            metrics = model.engine.metrics
            for part in (metrics.families, engine_collector(self._prefix, model.engine)):
                for family in part.collect() if metrics.model_name else ():
                    joined = found.setdefault(
                        family.name, Metric(family.name, family.documentation, family.type)
                    )
                    for sample in family.samples:
                        if sample.labels or part is not metrics.families:
                            sample = sample._replace(labels={**sample.labels, "model_name": model.name})
                        if sample.labels or not joined.samples:  # without labels: the machine's
                            joined.samples.append(sample)
        return found.values()
