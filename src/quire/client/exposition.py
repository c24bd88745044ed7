"""Prometheus families of the counts in `quire.client.metrics`, built when somebody reads them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily as Counter
from prometheus_client.core import GaugeMetricFamily as Gauge
from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from quire.cgroups import memory_groups, tightest
from quire.client.metrics import Metrics

OPEN_METRICS = "application/openmetrics-text; version=1.0.0"

# Of the last minute; perc are shares from 0 to 1, as in vLLM's names.
WORKED = {
    "busy_perc": "Share of the last minute in which steps ran.",
    "read_bytes_per_second": "Bytes of weights and caches that steps read in the last minute, per second.",
    "operations_per_second": "Operations of steps in the last minute, per second.",
    "bandwidth_perc": "Share of the machine's memory bandwidth that steps used in the last minute.",
    "arithmetic_perc": "Share of the machine's arithmetic that steps used in the last minute.",
    "read_limit_bytes_per_second": "Memory bandwidth of the machine (--machine-limits).",
    "operations_limit_per_second": "Arithmetic of the machine (--machine-limits).",
}
OOM_KILLS = "Processes of the control group that Linux killed because memory ran out."


def scrape(accept: str, *collectors: Collector) -> tuple[bytes, str]:
    """Make a scrape and its content type: OpenMetrics if the Accept header asks for it, else Prometheus' text."""
    registry = CollectorRegistry()
    for collector in collectors:
        registry.register(collector)
    encode, kind = choose_encoder(OPEN_METRICS if "application/openmetrics-text" in accept.lower() else "")
    return encode(registry), kind


class Families(Collector):
    """The families of `metrics`."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        """Yield all families; called by the registry."""
        yield from self._gauges()
        yield from self._counters()
        for name, (text, histogram) in self._metrics.histograms.items():
            family = HistogramMetricFamily(self._name(name), text, labels=("model_name", "engine"))
            family.add_metric((self._metrics.model_name, "0"), histogram.rows(), histogram.total)
            yield family

    def _name(self, name: str) -> str:
        return f"{self._metrics.prefix}:{name}"

    def _family(
        self,
        kind: type[Gauge | Counter],
        name: str,
        text: str,
        *samples: tuple[Any, ...],
        labels: tuple[str, ...] = (),
    ) -> Metric:
        """Make a family of the model. A sample has a value of each of the `labels`, and a number."""
        family = kind(self._name(name), text, labels=("model_name", "engine", *labels))
        for *values, number in samples:
            family.add_metric((self._metrics.model_name, "0", *values), number)
        return family

    def _gauges(self) -> Iterator[Metric]:
        metrics, stats = self._metrics, self._metrics.stats
        held = stats.num_used_blocks / stats.num_blocks if stats.num_blocks else 0.0
        for name, text, value in (
            ("num_requests_running", "Running sequences.", stats.num_running),
            ("num_requests_waiting", "Waiting sequences.", stats.num_waiting),
            ("kv_cache_usage_perc", "Share of KV blocks in use, from 0 to 1.", held),
            ("kv_blocks_cached", "KV blocks kept for reuse that no sequence uses.", stats.num_cached_blocks),
            ("kv_blocks_free", "KV blocks that hold nothing.", stats.num_free_blocks),
            ("kv_blocks_kept", "KV blocks held for sessions of programs.", stats.num_kept_blocks),
            ("state_snapshots", "Snapshots of recurrent states.", stats.num_snapshots),
            ("state_snapshot_bytes", "Bytes that they take.", stats.snapshot_bytes),
            ("num_programs_running", "Running programs.", stats.num_programs),
            ("num_program_sessions", "Programs that wait for their next call.", stats.num_sessions),
        ):
            yield self._family(Gauge, name, text, (value,))
        for name, value in metrics.work.shares(time.monotonic()).items():
            yield self._family(Gauge, f"engine_{name}", WORKED[name], (value,))
        waiting = ("capacity", stats.num_waiting)
        text = "Waiting sequences, by reason."
        yield self._family(Gauge, "num_requests_waiting_by_reason", text, waiting, labels=("reason",))
        text = (
            "The longest time that the engine's loop spent on something other than a forward pass, by cause."
        )
        stays = stats.longest_stays.items()
        yield self._family(Gauge, "engine_longest_stay_seconds", text, *stays, labels=("cause",))
        yield from self._memory()
        if metrics.fingerprint:
            text, labels = "The class of servers that answer alike; always 1.", ("system_fingerprint",)
            yield self._family(
                Gauge, "system_fingerprint_info", text, (metrics.fingerprint, 1.0), labels=labels
            )
        if cache := metrics.cache_config:
            text, sample = "The KV cache; always 1.", (*cache.values(), 1.0)
            yield self._family(Gauge, "cache_config_info", text, sample, labels=tuple(cache))
        if metrics.adapters is not None:
            yield self._adapter_info(*metrics.adapters())

    def _memory(self) -> Iterator[Metric]:
        """Yield the memory of this process's control groups, those of the engine too."""
        groups = memory_groups()
        kills = Counter(self._name("memory_oom_kills"), OOM_KILLS)
        kills.add_metric((), groups[0].kills if groups else 0)
        yield kills
        group = tightest(groups)
        if group is not None and group.limit is not None:
            for name, text, value in (
                ("limit", "Bytes that the control group may use.", group.limit),
                ("used", "Bytes that it uses, but for what can be given back.", group.used),
                ("left", "Bytes that are left of the limit.", group.left),
            ):
                yield Gauge(self._name(f"memory_{name}_bytes"), text, value)

    def _adapter_info(self, most: int, running: list[str], waiting: list[str]) -> Metric:
        family = Gauge(
            self._name("lora_requests_info"),
            "Adapters of running and of waiting requests; the time of the scrape.",
            labels=("max_lora", "running_lora_adapters", "waiting_lora_adapters"),
        )
        family.add_metric((str(most), ",".join(running), ",".join(waiting)), time.time())
        return family

    def _counters(self) -> Iterator[Metric]:
        metrics, total = self._metrics, self._metrics.total
        for name, text, value in (
            ("prefix_cache_queries", "Prompt tokens looked up in the cache.", total("prefix_queries")),
            ("prefix_cache_hits", "Prompt tokens found in the cache.", total("prefix_hits")),
            ("state_snapshots_taken", "Snapshots of recurrent states taken.", total("snapshots_taken")),
            ("state_snapshots_hit", "Requests that went on from one.", total("snapshot_hits")),
            ("state_snapshots_evicted", "Snapshots that made room.", total("snapshots_evicted")),
            ("num_preemptions", "Preemptions.", total("num_preemptions")),
            ("oom", "Steps for which the device had no memory.", total("num_oom")),
            ("jump_forward_tokens", "Forward passes saved by grammars.", total("jump_forward_tokens")),
            ("spec_decode_num_drafts", "Drafts verified.", total("spec_drafts")),
            ("spec_decode_num_draft_tokens", "Tokens of drafts verified.", total("spec_draft_tokens")),
            ("spec_decode_num_accepted_tokens", "Tokens of drafts accepted.", total("spec_accepted_tokens")),
            ("prompt_tokens", "Prompt tokens of requests that got a first token.", metrics.prompt_tokens),
            ("prompt_tokens_cached", "Those found in the cache.", metrics.cached_tokens),
            ("generation_tokens", "Generated tokens.", metrics.generation_tokens),
            ("program_steps", "Gens and selects of programs.", metrics.program_steps),
            ("step_read_bytes", "Bytes that steps read, by the model's cost.", total("read_bytes")),
            ("step_operations", "Operations of steps, by the model's cost.", total("operations")),
            ("memory_refusals", "Requests larger than the whole KV cache.", total("memory_refusals")),
            ("engine_restarts", "Restarts of the engine process.", metrics.restarts),
        ):  # fmt: skip
            yield self._family(Counter, name, text, (value,))
        for name, text, label, values in (
            (
                "spec_decode_num_accepted_tokens_per_pos",
                "Tokens of drafts accepted, by position.",
                "position",
                {str(place): count for place, count in enumerate(metrics.accepted_per_pos())},
            ),
            ("request_ignored_fields", "Unknown fields of requests.", "handler", metrics.ignored_fields),
            ("programs", "Calls of programs that the engine has ended.", "finished_reason", metrics.programs),
            ("request_success", "Finished requests.", "finished_reason", metrics.finished),
            (
                "engine_kills",
                "Engine processes that were killed, or ran out of memory.",
                "cause",
                metrics.kills,
            ),
            ("admission_rejections", "Requests refused on arrival.", "reason", metrics.rejections),
        ):
            yield self._family(Counter, name, text, *values.items(), labels=(label,))
        answers = Counter("http_requests", "HTTP requests answered.", labels=("method", "handler", "status"))
        for labels, value in metrics.answers.items():
            answers.add_metric(labels, value)
        yield answers
