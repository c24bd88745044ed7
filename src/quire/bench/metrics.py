"""Turns outcomes of requests into vLLM's result keys. Knows no HTTP and no datasets.

Definitions follow `vllm bench serve`: TTFT is the time from sending to the first piece, ITL between pieces, TPOT
(latency - TTFT) / (tokens - 1) per request, E2EL from sending to the last piece.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from quire.bench.client import Outcome
from quire.bench.datasets import Sample
from quire.errors import ConfigError

METRICS = {
    "ttft": "Time to first token",
    "tpot": "Time per later token",
    "itl": "Inter-token latency",
    "itl_prefill": "Inter-token latency while another request waits for its first token",
    "e2el": "End-to-end latency",
    "client_queue_time": "Wait for --max-concurrency",
    "e2el_including_client_queue": "End-to-end, wait included",
}
OBJECTIVES = ("ttft", "tpot", "e2el")


def parse_goodput(pairs: Sequence[str]) -> dict[str, float]:
    """Parse `["ttft:200 tpot:50"]` (spaces, commas or several) into milliseconds by metric."""
    objectives: dict[str, float] = {}
    for pair in " ".join(pairs).replace(",", " ").split():
        name, _, value = pair.partition(":")
        try:
            limit = float(value)
        except ValueError:
            limit = -1.0
        if name not in OBJECTIVES or not limit >= 0:
            raise ConfigError(f"--goodput takes {', '.join(f'{n}:MS' for n in OBJECTIVES)}, got {pair!r}")
        objectives[name] = limit
    return objectives


def parse_percentiles(text: str) -> list[float]:
    """Parse `"50,99,99.9"`."""
    try:
        found = [float(p) for p in text.split(",") if p.strip()]
    except ValueError as error:
        raise ConfigError(f"--metric-percentiles must be numbers, got {text!r}") from error
    if not all(0 <= p <= 100 for p in found):
        raise ConfigError(f"--metric-percentiles must be from 0 to 100, got {text!r}")
    return found


def parse_metrics(text: str) -> list[str]:
    """Parse `"ttft,itl"`."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in METRICS:
            raise ConfigError(f"--percentile-metrics takes {', '.join(METRICS)}, got {name!r}")
    return names


@dataclass(frozen=True, slots=True)
class Summary:
    """What to summarize: names from METRICS, percentiles, and objectives in milliseconds."""

    metrics: list[str]
    percentiles: list[float]
    objectives: dict[str, float]

    def result(
        self,
        samples: Sequence[Sample],
        outcomes: Sequence[Outcome],
        output_lens: Sequence[int],
        duration: float,
    ) -> dict[str, Any]:
        """vLLM's result keys. `output_lens` has the tokens of each outcome; `duration` is in seconds."""
        good = [i for i, outcome in enumerate(outcomes) if outcome.ok]
        input_lens = [
            s.prompt_len if o.prompt_tokens is None else o.prompt_tokens
            for s, o in zip(samples, outcomes, strict=True)
        ]
        done = [(outcomes[i], output_lens[i]) for i in good]
        total_in, total_out = sum(input_lens[i] for i in good), sum(output_lens[i] for i in good)
        peak_tokens, peak_requests = peaks(done)
        result: dict[str, Any] = {
            "duration": duration,
            "completed": len(good),
            "failed": len(outcomes) - len(good),
            "total_input_tokens": total_in,
            "total_output_tokens": total_out,
            "request_throughput": len(good) / duration,
            "request_goodput": self._goodput(done) / duration if self.objectives else None,
            "output_throughput": total_out / duration,
            "total_token_throughput": (total_in + total_out) / duration,
            "input_lens": input_lens,
            "output_lens": list(output_lens),
            "ttfts": [o.ttft for o in outcomes],
            "itls": [o.itls for o in outcomes],
            "latencies": [o.latency for o in outcomes],
            "start_times": [o.start for o in outcomes],
            "queue_times": [o.queue_time for o in outcomes],
            "generated_texts": [o.text for o in outcomes],
            "errors": [o.error for o in outcomes],
            "max_output_tokens_per_s": max(peak_tokens, total_out / duration),  # for runs below a second
            "max_concurrent_requests": peak_requests,
        }
        values = observed(done)
        for name in self.metrics:
            result.update(self._spread(name, values[name]))
        return result

    def _spread(self, name: str, seconds: Sequence[float]) -> dict[str, float]:
        ms = np.array(seconds if len(seconds) else [0.0]) * 1000
        found = {
            f"mean_{name}_ms": float(np.mean(ms)),
            f"median_{name}_ms": float(np.median(ms)),
            f"std_{name}_ms": float(np.std(ms)),
        }
        for p in self.percentiles:
            found[f"p{_short(p)}_{name}_ms"] = float(np.percentile(ms, p))
        return found

    def _goodput(self, done: Sequence[tuple[Outcome, int]]) -> int:
        """Number of requests that meet every objective. A single token has no TPOT and meets any (DistServe)."""
        limits = self.objectives
        return sum(
            all(
                value * 1000 <= limits.get(name, np.inf)
                for name, value in (("ttft", o.ttft), ("tpot", tpot(o, n)), ("e2el", o.latency))
            )
            for o, n in done
        )


def tpot(outcome: Outcome, output_len: int) -> float:
    """Compute the seconds per output token after the first; 0 for a single token."""
    return (outcome.latency - outcome.ttft) / (output_len - 1) if output_len > 1 else 0.0


def observed(done: Sequence[tuple[Outcome, int]]) -> dict[str, list[float]]:
    """Collect the seconds of each metric over completed requests."""
    return {
        "ttft": [o.ttft for o, _ in done],
        "tpot": [tpot(o, n) for o, n in done if n > 1],
        "itl": [gap for o, _ in done for gap in o.itls],
        "itl_prefill": _gaps_beside_prompts([o for o, _ in done]),
        "e2el": [o.latency for o, _ in done],
        "client_queue_time": [o.queue_time for o, _ in done],
        "e2el_including_client_queue": [o.latency + o.queue_time for o, _ in done],
    }


def _gaps_beside_prompts(outcomes: Sequence[Outcome]) -> list[float]:
    """Collect the times between tokens during which another request waits for its first token, in seconds.

    A request's own wait is over before its first gap, so it never counts.
    """
    waits = sorted((o.start, o.start + o.ttft) for o in outcomes)
    starts = np.array([start for start, _ in waits])
    last_ends = np.maximum.accumulate(np.array([end for _, end in waits]))
    found: list[float] = []
    for outcome in outcomes:
        ends = outcome.start + outcome.ttft + np.cumsum(outcome.itls)
        before = np.searchsorted(starts, ends)  # waits that began before a gap ended
        begins = ends - np.array(outcome.itls)
        found += [
            gap
            for gap, begin, count in zip(outcome.itls, begins, before, strict=True)
            if count and last_ends[count - 1] > begin + 1e-9
        ]
    return found


def tokens_by_second(
    starts: Sequence[float], ttfts: Sequence[float], itls: Sequence[list[float]], output_lens: Sequence[int]
) -> Any:
    """Count output tokens in each second from the first start on. A piece of several tokens counts as several."""
    if not starts:
        return np.zeros(1)
    times = [s + t + np.cumsum([0.0, *gaps]) for s, t, gaps in zip(starts, ttfts, itls, strict=True)]
    weights = [np.full(len(t), n / len(t)) for t, n in zip(times, output_lens, strict=True)]
    return np.bincount((np.concatenate(times) - min(starts)).astype(int), np.concatenate(weights))


def peaks(done: Sequence[tuple[Outcome, int]]) -> tuple[float, int]:
    """Find the most output tokens in one second, and the most requests in flight at one moment."""
    outcomes = [o for o, _ in done]
    seconds = tokens_by_second(
        [o.start for o in outcomes],
        [o.ttft for o in outcomes],
        [o.itls for o in outcomes],
        [n for _, n in done],
    )
    edges = sorted([(o.start, 1) for o, _ in done] + [(o.start + o.latency, -1) for o, _ in done])
    running = highest = 0
    for _, change in edges:
        running += change
        highest = max(highest, running)
    return float(seconds.max()), highest


def _short(percentile: float) -> str:
    return str(int(percentile)) if percentile == int(percentile) else str(percentile)


# --- the server's own counters ------------------------------------------------------------------------------

_SPEC_COUNTERS = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")


def spec_counters(scrape: str) -> dict[str, float]:
    """Read the counters of speculative decoding from a Prometheus scrape, with any prefix."""
    found: dict[str, float] = {}
    for line in scrape.splitlines():
        name = line.partition("{")[0].partition(" ")[0]
        for counter in _SPEC_COUNTERS:
            if name.endswith(f":spec_decode_{counter}_total"):
                found[counter] = found.get(counter, 0.0) + float(line.rsplit(" ", 1)[1])
    return found


def spec_result(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    """Make vLLM's spec_decode_* keys for the time between two scrapes; empty if nothing was drafted."""
    drafts, tokens, accepted = (after.get(name, 0.0) - before.get(name, 0.0) for name in _SPEC_COUNTERS)
    if drafts <= 0 or tokens <= 0:
        return {}
    return {
        "spec_decode_acceptance_rate": 100 * accepted / tokens,
        "spec_decode_acceptance_length": 1 + accepted / drafts,
        "spec_decode_num_drafts": int(drafts),
        "spec_decode_draft_tokens": int(tokens),
        "spec_decode_accepted_tokens": int(accepted),
    }
