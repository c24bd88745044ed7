"""The methods of `LLM` for its operator: figures, caches, sleep, traces, adapters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from prometheus_client.core import Metric as Family
from prometheus_client.core import Sample

from quire.client.adapters import LoadedAdapter, requests_for
from quire.client.metrics import Metrics
from quire.engine.verbs import ResetPrefixCache, Sleep, StartProfile, StopProfile, UnloadAdapter, WakeUp
from quire.errors import QuireError
from quire.llm.running import PREFIX, RunningEngine
from quire.sched import Scheduler
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


class OperatorMethods(RunningEngine):
    """Reads and changes the state of an engine."""

    def stats(self) -> EngineStats:
        """Read the engine's counters and gauges."""
        return self._engine.ask(lambda core: core.stats())

    def watch_steps(self, watch: Callable[[Scheduler], None] | None) -> None:
        """Call `watch` with the scheduler after each step, on the engine's thread; None ends that."""
        scheduler = self._core.scheduler
        self._core.on_step = None if watch is None else lambda *times: watch(scheduler)

    def get_metrics(self) -> list[Metric]:
        """Read counters, gauges and histograms under vLLM's names (vllm:...)."""
        return self._engine.ask(lambda core: read_metrics(self._observer.counts, core.stats()))

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Forget cached prefixes. Running requests keep theirs, unless they are reset: then they compute them again.

        Returns True: it always succeeds.
        """
        return bool(self._engine.do(ResetPrefixCache(reset_running_requests)))

    def reset_mm_cache(self) -> None:
        """Does nothing: no input but text is cached."""

    def sleep(self, level: int = 1, mode: str = "abort") -> None:
        """Give memory back until `wake_up`: the KV cache at level 1, the weights too at level 2, nothing at level 0.

        Running requests are ended (mode "abort"), finished first ("wait"), or resumed afterwards ("keep").
        """
        self._asleep = True
        try:
            self._engine.do(Sleep(level, mode))
        except BaseException:
            self._asleep = False
            raise

    def release_kv_cache_memory(self) -> None:
        """Sleep at level 1."""
        self.sleep(1)

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Take the memory again; only "weights" or "kv_cache" if `tags` say so. It sleeps until both are there."""
        self._asleep = bool(self._engine.do(WakeUp(None if tags is None else tuple(tags))))

    def is_sleeping(self) -> bool:
        return self._asleep

    def start_profile(
        self, profile_prefix: str | None = None, delay_iterations: int = 0, max_iterations: int = 0
    ) -> None:
        """Trace steps until `stop_profile` (Chrome's format), in the directory of `profiler_config`."""
        self._engine.do(StartProfile(profile_prefix, delay_iterations, max_iterations))

    def stop_profile(self) -> str | None:
        """Write the trace and return its path; None if none was started."""
        path = self._engine.do(StopProfile())
        return None if path is None else str(path)

    def collective_rpc(
        self, method: Any, timeout: float | None = None, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Refused: there are no worker processes, and the engine runs no foreign code."""
        raise QuireError(
            "collective_rpc is not supported: this engine has no workers; use the methods of LLM"
        )

    def apply_model(self, func: Callable[[Any], Any]) -> Any:
        """Refused: the model is a recorded plan, not a module of torch."""
        raise QuireError("apply_model is not supported: the model is no torch module; use logits_processors")

    def add_lora(self, lora_request: Any) -> bool:
        """Load an adapter before its first request. True: it was not loaded before. ModelError: it cannot be."""
        (request,) = requests_for(lora_request, 1)
        known = request is not None and self._adapters.find_request(request) is not None
        self._adapters_of(lora_request, 1)
        return not known

    def remove_lora(self, lora_id: int) -> bool:
        """Forget an adapter; running requests finish with it. False: no adapter has the number."""
        with self._loading:
            found = self._numbered(lora_id)
            digest = None if found is None else self._adapters.remove(found.name)
            if digest is not None:
                self._engine.do(UnloadAdapter(digest))
        return found is not None

    def list_loras(self) -> set[int]:
        """List the numbers of the loaded adapters."""
        return {one.number for one in self._adapters.all}

    def pin_lora(self, lora_id: int) -> bool:
        """Keep an adapter in memory, whatever others are used. False: no adapter has the number."""
        found = self._numbered(lora_id)
        if found is not None:
            self._load_adapter(found.path, pin=True)
        return found is not None

    def _numbered(self, number: int) -> LoadedAdapter | None:
        return next((one for one in self._adapters.all if one.number == number), None)
