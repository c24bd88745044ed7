"""One log line every ten seconds while the engine works: tokens per second, requests, and the cache. vLLM's figures."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from quire.client.metrics import Metrics

log = logging.getLogger("quire.serve")

INTERVAL = 10.0


@dataclass(frozen=True, slots=True)
class Counts:
    """The counters at one moment; `at` is in seconds."""

    at: float
    prompt: int
    generated: int
    queries: int
    hits: int


class Throughput:
    """Compares the counters with their values at its last look."""

    def __init__(self, metrics: Metrics, clock: Callable[[], float] = time.monotonic) -> None:
        self._metrics = metrics
        self._clock = clock
        self._last = self._count()

    async def run(self) -> None:
        """Look every ten seconds; for the life of the server."""
        while True:
            await asyncio.sleep(INTERVAL)
            line = self.line()
            if line is not None:
                log.info("%s", line)

    def line(self) -> str | None:
        """Write the figures since the last call; None if the engine had nothing to do."""
        last, now, stats = self._last, self._count(), self._metrics.stats
        self._last = now
        prompt, generated = now.prompt - last.prompt, now.generated - last.generated
        if not (prompt or generated or stats.num_running or stats.num_waiting):
            return None
        seconds = max(now.at - last.at, 1e-9)
        used = stats.num_used_blocks / stats.num_blocks if stats.num_blocks else 0.0
        queries = now.queries - last.queries
        hits = f"{(now.hits - last.hits) / queries:.1%}" if queries > 0 else "no prompts"
        return (
            f"prompts {prompt / seconds:.1f} tokens/s, generation {generated / seconds:.1f} tokens/s, "
            f"running {stats.num_running}, waiting {stats.num_waiting}, KV cache {used:.1%} used, "
            f"prefix cache hits {hits}"
        )

    def _count(self) -> Counts:
        metrics = self._metrics
        stats = metrics.stats
        return Counts(
            self._clock(),
            metrics.prompt_tokens,
            metrics.generation_tokens,
            stats.prefix_queries,
            stats.prefix_hits,
        )
