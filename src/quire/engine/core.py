"""The step loop: the one place that sees both the scheduler and the executor. Knows token ids only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from quire.sched.scheduler import Scheduler
from quire.types import Delta, EngineStats, Request, ScheduledBatch, StepOutput


class Executor(Protocol):
    """Computes scheduled batches, in order, in this process or elsewhere."""

    def execute(self, batch: ScheduledBatch) -> StepOutput: ...


class EngineCore:
    """Adds, aborts and steps requests. Every request that is added ends with exactly one finish reason a sample."""

    def __init__(self, scheduler: Scheduler, executor: Executor) -> None:
        self.scheduler = scheduler
        self._executor = executor
        self._ready: list[Delta] = []
        # Told of each batch before it is computed.
        self.on_batch: Callable[[ScheduledBatch], None] | None = None

    def add(self, request: Request) -> None:
        """Queue a request. One that can never run is answered with an error Delta by the next step."""
        self._ready += self.scheduler.add(request)

    def abort(self, request_id: str, index: int | None = None) -> None:
        """End a request, or one sample of it; unknown ids (finished already) are ignored."""
        self._ready += self.scheduler.abort(request_id, index)

    @property
    def has_work(self) -> bool:
        return bool(self._ready) or self.scheduler.has_work

    def step(self) -> list[Delta]:
        """Schedule and compute one batch; returns the news of all sequences. Does nothing when idle."""
        deltas, self._ready = self._ready, []
        batch = self.scheduler.schedule()
        if batch is not None:
            if self.on_batch is not None:
                self.on_batch(batch)
            deltas += self.scheduler.update(batch, self._executor.execute(batch))
        return deltas

    def stats(self) -> EngineStats:
        return self.scheduler.stats()

    def reset_prefix_cache(self) -> None:
        """Forget cached prefixes that no running sequence holds."""
        self.scheduler.reset_prefix_cache()
