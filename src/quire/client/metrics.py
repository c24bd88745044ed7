"""Counts and times of requests in the API process.

Names and labels after the prefix are vLLM's. Values are plain fields, so a token costs one list increment;
`quire.client.exposition` makes Prometheus' families of them during a scrape. Knows no engine and no HTTP.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from functools import cached_property
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from quire.config import CacheConfig
from quire.lazy import Lazy
from quire.types import Delta, EngineStats, FinishReason, Request

if TYPE_CHECKING:
    from quire.client import exposition
    from quire.client.exposition import Families
else:
    exposition = Lazy("quire.client.exposition")

TTFT_BUCKETS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0,
    80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
ITL_BUCKETS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5,
    10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
LATENCY_BUCKETS = (
    0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0,
    240.0, 480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip
STEP_BUCKETS = (
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.04, 0.05, 0.06, 0.07, 0.08, 0.09, 0.1, 0.11, 0.125, 0.15, 0.2,
    0.3, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0,
)  # fmt: skip
ITERATION_BUCKETS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
SMALL_BUCKETS = (1, 2, 5, 10, 20)
WORK = ("read_bytes", "operations", "step_seconds")
MINUTE = 60.0

# COUNTED fields of EngineStats must not fall when the engine restarts.
COUNTED = (
    "prefix_queries",
    "prefix_hits",
    "snapshots_taken",
    "snapshot_hits",
    "snapshots_evicted",
    "num_preemptions",
    "num_oom",
    "memory_refusals",
    "jump_forward_tokens",
    "spec_drafts",
    "spec_draft_tokens",
    "spec_accepted_tokens",
    *WORK,
)


def buckets_125(high: int) -> tuple[float, ...]:
    """Make the bounds 1, 2, 5, 10, 20, 50, ... up to `high`."""
    found: list[float] = []
    exponent = 0
    while True:
        for mantissa in (1, 2, 5):
            value = mantissa * 10**exponent
            if value > high:
                return tuple(found) or (1,)
            found.append(value)
        exponent += 1


class Histogram:
    """Counts of observed values by bucket; `bounds` are inclusive upper bounds of all buckets but the last."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Iterable[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    @property
    def count(self) -> int:
        return sum(self.counts)

    def rows(self) -> list[tuple[str, float]]:
        """Give cumulative counts by upper bound, in Prometheus' form."""
        rows, running = [], 0
        for bound, count in zip((*self.bounds, math.inf), self.counts, strict=True):
            running += count
            rows.append(("+Inf" if bound == math.inf else str(float(bound)), float(running)))
        return rows


@dataclass(slots=True)
class RequestTimes:
    """Times of one request in seconds on the monotonic clock; 0 if not yet.

    `prefill_wait` is the time by which other requests' prefill delayed its tokens. `last_by_sample` has
    the time of each sample's last token, the value of `Metrics.prefill_clock` then, and its tokens so far.
    """

    request: Request
    arrival: float
    expected: int = 0  # tokens of its prompt that are believed to be cached
    scheduled: float = 0.0
    first_token: float = 0.0
    last_token: float = 0.0
    num_cached: int = 0
    num_output: int = 0
    num_scheduled: int = 0
    prefill_wait: float = 0.0
    last_by_sample: dict[int, tuple[float, float, int]] = field(default_factory=dict)

    @property
    def num_preemptions(self) -> int:
        return max(0, self.num_scheduled - self.request.sampling.n)


class Work:
    """Rates of what steps read and compute over the last MINUTE, from looks at the counters, a second or more apart."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._looks: deque[tuple[float, list[float]]] = deque()

    def look(self, now: float) -> list[float]:
        """Look at the counters; return bytes, operations and seconds in steps, each per second."""
        looks, counts = self._looks, [self._metrics.total(name) for name in WORK]
        if not looks or now - looks[-1][0] >= 1.0:
            looks.append((now, counts))
        while len(looks) > 1 and looks[1][0] <= now - MINUTE:
            looks.popleft()
        begin, before = looks[0]
        seconds = max(now - begin, 1.0)
        return [max(0.0, after - count) / seconds for count, after in zip(before, counts, strict=True)]

    def shares(self, now: float) -> dict[str, float]:
        """Look, and give the rates by name, with their shares of the machine's limits if it is known what it can do."""
        read, computed, busy = self.look(now)
        found = {
            "read_bytes_per_second": read,
            "operations_per_second": computed,
            "busy_perc": min(1.0, busy),
        }
        if self._metrics.stats.limits is not None:
            bandwidth, arithmetic = self._metrics.stats.limits
            found |= {"bandwidth_perc": read / bandwidth, "arithmetic_perc": computed / arithmetic}
            found |= {"read_limit_bytes_per_second": bandwidth, "operations_limit_per_second": arithmetic}
        return found


class Metrics:
    """The values behind `/metrics`. Written only by the event loop of the API process."""

    def __init__(self, model_name: str, prefix: str = "quire", max_model_len: int = 1 << 20) -> None:
        self.model_name = model_name
        self.prefix = prefix
        self.stats = EngineStats()
        self.cache_config: dict[str, str] = {}
        self.fingerprint = ""  # system_fingerprint, once it is known
        # The most adapters of a step, and the names of running and waiting ones; None: adapters are off.
        self.adapters: Callable[[], tuple[int, list[str], list[str]]] | None = None
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.generation_tokens = 0
        self.prefill_clock = 0.0  # seconds by which prefill has delayed decoding sequences so far
        self.work = Work(self)
        self.restarts = 0
        self.kills = {"memory": 0, "hung": 0, "signal": 0}
        self.rejections = {"queue_full": 0, "draining": 0, "engine_down": 0}
        self.answers: dict[tuple[str, str, str], int] = {}
        self.ignored_fields: dict[str, int] = {}
        self.finished = {reason.value: 0 for reason in FinishReason}
        self.programs = {reason.value: 0 for reason in FinishReason}
        self.program_steps = 0
        self.before_restart: dict[str, float] = dict.fromkeys(COUNTED, 0)
        self._accepted_before: list[int] = []  # by position in a draft
        tokens = buckets_125(max_model_len)
        self.histograms: dict[str, tuple[str, Histogram]] = {
            name: (text, Histogram(bounds))
            for name, text, bounds in (
                ("time_to_first_token_seconds", "Arrival to first token.", TTFT_BUCKETS),
                ("inter_token_latency_seconds", "Time between tokens of a sample.", ITL_BUCKETS),
                ("request_time_per_output_token_seconds", "Mean time per token of a request.", ITL_BUCKETS),
                ("e2e_request_latency_seconds", "Arrival to end.", LATENCY_BUCKETS),
                ("request_queue_time_seconds", "Arrival to first computation.", LATENCY_BUCKETS),
                ("request_inference_time_seconds", "First computation to end.", LATENCY_BUCKETS),
                ("request_prefill_time_seconds", "First computation to first token.", LATENCY_BUCKETS),
                ("request_decode_time_seconds", "First token to end.", LATENCY_BUCKETS),
                ("request_prompt_tokens", "Prompt tokens of a request.", tokens),
                ("request_generation_tokens", "Output tokens of a request.", tokens),
                ("request_max_num_generation_tokens", "Output tokens of a request's longest sample.", tokens),
                ("request_prefill_kv_computed_tokens", "Prompt tokens not found in the cache.", tokens),
                ("request_params_n", "Samples requested.", SMALL_BUCKETS),
                ("request_params_max_tokens", "Output token limit of a request.", tokens),
                ("request_num_preemptions", "Preemptions of a request.", (0, *SMALL_BUCKETS)),
                ("step_time_seconds", "Time of a step.", STEP_BUCKETS),
                (
                    "inter_token_prefill_seconds",
                    "Part of the time between tokens of a sample that prompts of others took.",
                    STEP_BUCKETS,
                ),
                ("iteration_tokens_total", "Prompt and output tokens of a step.", ITERATION_BUCKETS),
            )
        }

    def name_model(self, model_name: str, config: CacheConfig, max_model_len: int) -> None:
        """Set the model, once the engine has started: the labels of all families, and cache_config_info."""
        self.model_name = model_name
        num_blocks = self.stats.num_blocks
        size = num_blocks * config.block_size
        labels = {name: str(value) for name, value in asdict(config).items()}
        labels["num_gpu_blocks"] = str(num_blocks)
        labels["kv_cache_size_tokens"] = str(size)
        labels["kv_cache_max_concurrency"] = f"{size / max_model_len:.2f}"
        self.cache_config = labels

    def observe(self, name: str, value: float) -> None:
        self.histograms[name][1].observe(value)

    # --- events of requests ----------------------------------------------------------------------------

    def scheduled(self, times: RequestTimes, at: float) -> None:
        """Record that a sample got a slot. The first slot ends the time in the queue; each beyond n is a preemption."""
        times.num_scheduled += 1
        if not times.scheduled:
            times.scheduled = max(at, times.arrival)

    def stepped(self, seconds: float, prompts: float) -> None:
        """Count a step that took `seconds`; prefill delayed its decoding sequences by `prompts` seconds."""
        self.observe("step_time_seconds", seconds)
        self.prefill_clock += prompts

    def step(self, deltas: list[tuple[RequestTimes, Delta]], now: float) -> None:
        """Count the deltas of one step, with the times of their requests."""
        num_tokens = num_prompt = 0
        gaps = self.histograms["inter_token_latency_seconds"][1]
        waits = self.histograms["inter_token_prefill_seconds"][1]
        clock = self.prefill_clock
        for times, delta in deltas:
            count = len(delta.tokens)
            if delta.embedding is not None:
                num_prompt += self._first_token(times, delta, now)
                times.last_token = now
            if not count:
                if times.request.program is not None:
                    self._program(delta)
                continue
            num_tokens += count
            times.num_output += count
            if not times.first_token:
                num_prompt += self._first_token(times, delta, now)
            last = times.last_by_sample.get(delta.index)
            if last is not None:
                gaps.observe(now - last[0])
                waits.observe(clock - last[1])
                times.prefill_wait += clock - last[1]
                count += last[2]
            times.last_by_sample[delta.index] = now, clock, count
            times.last_token = now
        if num_tokens or num_prompt:
            self.generation_tokens += num_tokens
            self.observe("iteration_tokens_total", num_tokens + num_prompt)

    def _program(self, delta: Delta) -> None:
        """Count the steps of a program and, at its end, the tokens of all its requests."""
        for event in delta.events or ():
            if event.kind == "end":
                self.program_steps += 1
        if delta.finish_reason is not None:
            self.programs[delta.finish_reason.value] += 1
            self.prompt_tokens += delta.usage.num_prompt
            self.cached_tokens += delta.usage.num_cached
            self.generation_tokens += delta.usage.num_output

    def _first_token(self, times: RequestTimes, delta: Delta, now: float) -> int:
        """Return the number of prompt tokens that this step completes."""
        times.first_token = now
        times.num_cached = delta.usage.num_cached
        self.observe("time_to_first_token_seconds", now - times.arrival)
        self.prompt_tokens += delta.usage.num_prompt
        self.cached_tokens += delta.usage.num_cached
        return delta.usage.num_prompt

    def end(self, times: RequestTimes, reason: FinishReason, now: float) -> None:
        """Record that a request has ended, for any reason. Called once per accepted request."""
        self.finished[reason.value] += 1
        params, num_prompt = times.request.sampling, len(times.request.tokens)
        self.observe("e2e_request_latency_seconds", now - times.arrival)
        self.observe("request_params_n", params.n)
        self.observe("request_params_max_tokens", times.request.max_tokens)
        self.observe("request_prompt_tokens", num_prompt)
        self.observe("request_generation_tokens", times.num_output)
        longest = max((count for _, _, count in times.last_by_sample.values()), default=0)
        self.observe("request_max_num_generation_tokens", longest)
        self.observe("request_num_preemptions", times.num_preemptions)
        if not times.first_token:
            return
        started = times.scheduled or times.arrival
        self.observe("request_queue_time_seconds", started - times.arrival)
        self.observe("request_prefill_time_seconds", max(0.0, times.first_token - started))
        self.observe("request_decode_time_seconds", times.last_token - times.first_token)
        self.observe("request_inference_time_seconds", max(0.0, times.last_token - started))
        self.observe("request_prefill_kv_computed_tokens", num_prompt - times.num_cached)
        if times.num_output > 1:
            mean = (times.last_token - times.first_token) / (times.num_output - 1)
            self.observe("request_time_per_output_token_seconds", mean)

    def answered(self, method: str, handler: str, status: int) -> None:
        """Count an answered HTTP request."""
        key = (method, handler, f"{status // 100}xx")
        self.answers[key] = self.answers.get(key, 0) + 1

    def killed(self, by: str | None) -> None:
        """Count an engine process that was killed, by its cause; None if it was not."""
        if by is not None:
            self.kills[by] += 1

    def ended(self) -> None:
        """Keep the values of an engine's counters, as the next one's start at 0, so that ours never fall."""
        for name in self.before_restart:
            self.before_restart[name] += getattr(self.stats, name)
        self._accepted_before = self.accepted_per_pos()
        self.stats = EngineStats(num_blocks=self.stats.num_blocks, num_free_blocks=self.stats.num_blocks)

    def total(self, name: str) -> float:
        """Read a counter of EngineStats, with what it was before restarts."""
        value: float = getattr(self.stats, name)
        return value + self.before_restart[name]

    def accepted_per_pos(self) -> list[int]:
        """Count accepted tokens of drafts by position, those before restarts included."""
        pairs = zip_longest(self._accepted_before, self.stats.spec_accepted_per_pos, fillvalue=0)
        return [before + now for before, now in pairs]

    # --- a scrape --------------------------------------------------------------------------------------

    @cached_property
    def families(self) -> Families:
        """The families of these values, for a scrape."""
        return exposition.Families(self)

    def text(self, accept: str = "", *others: Any) -> tuple[bytes, str]:
        """Make the scrape, with what `others` collect, and its content type, as the Accept header asks."""
        return exposition.scrape(accept, self.families, *others)
