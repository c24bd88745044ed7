"""Follows the requests of an `LLM`: their times, and counts of all of them."""

from __future__ import annotations

import time

from quire.client.metrics import Metrics, RequestTimes
from quire.types import Delta, Request, ScheduledBatch

PREFIX = "vllm"


class LocalObserver:
    """Follows the requests of one engine of this process. All methods but `begin` are for the engine thread."""

    def __init__(self, counts: Metrics) -> None:
        self.counts = counts
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
                self.counts.scheduled(self._live[new.request.id][0], now)

    def stepped(self, deltas: list[Delta]) -> None:
        now = time.monotonic()
        known = [
            (self._live[delta.request_id][0], delta) for delta in deltas if delta.request_id in self._live
        ]
        self.counts.step(known, now)
        for times, delta in known:
            if delta.finish_reason is not None:
                samples = self._live[delta.request_id][1]
                samples.discard(delta.index)
                if not samples:
                    del self._live[delta.request_id]
                    self.counts.end(times, delta.finish_reason, now)

    def dropped(self, request_id: str) -> None:
        self._live.pop(request_id, None)
