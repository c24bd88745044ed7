"""The step loop: schedule, submit, take in results. Only this module sees scheduler and executor. Token ids only."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Protocol

from quire.engine.compiling import CompilingRequests
from quire.grammar.compiler import GrammarCompiler
from quire.sched.scheduler import Scheduler
from quire.types import Delta, EngineStats, FinishReason, Request, ScheduledBatch, StepOutput, ends

IDLE_WAIT = 0.01  # seconds for which an idle step waits for a grammar


class Executor(Protocol):
    """Computes batches in order, in this process or elsewhere."""

    def execute(self, batch: ScheduledBatch) -> StepOutput:
        """Compute a batch now."""

    def submit(self, batch: ScheduledBatch) -> Future[StepOutput]:
        """Compute a batch after earlier submitted ones, without blocking the caller."""


class EngineCore:
    """Adds, aborts and steps requests. Each sample of an added request ends with exactly one finish reason.

    Up to `depth` steps are in flight. With 1, a step is computed before the next is scheduled (the plain loop). With
    more, steps are scheduled and submitted ahead, and an end is seen `depth - 1` steps later; the reported results are
    the same.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        grammars: GrammarCompiler | None = None,
        depth: int = 1,
    ) -> None:
        self.scheduler = scheduler
        self.on_batch: Callable[[ScheduledBatch], None] | None = None  # called before a batch is computed
        self._executor = executor
        self._depth = depth
        self._flight: deque[tuple[ScheduledBatch, Callable[[], StepOutput]]] = deque()
        self._ready: list[Delta] = []  # the next step returns them
        self._compiling = CompilingRequests(grammars)

    @property
    def has_work(self) -> bool:
        return bool(self._ready or self._compiling) or self.scheduler.has_work

    def add(self, request: Request) -> None:
        """Queue a request. If it can never run, the next step returns an error delta.

        A request is queued once its grammar is compiled; others go on meanwhile.
        """
        if request.id in self._compiling:
            message = (
                f"request id {request.id!r} is in use by a request that has not ended; choose another id"
            )
            self._ready += ends(request, FinishReason.ERROR, message)
        elif not self._compiling.take(request):
            self._ready += self.scheduler.add(request)

    def fork(self, request_id: str, index: int, request: Request, output: list[int]) -> None:
        """Queue `request` as a continuation of a live sample: see `Scheduler.fork`."""
        self._ready += self.scheduler.fork(request_id, index, request, output)

    def abort(self, request_id: str, index: int | None = None) -> None:
        """End a request, or one sample of it. Unknown ids (of ended requests) are ignored."""
        if request_id in self._compiling:
            request, error = self._compiling.remove(request_id)
            if index is None or request.sampling.n == 1:
                self._ready += ends(request, FinishReason.ABORT)
                return
            self._admit(request, error())
        self._ready += self.scheduler.abort(request_id, index)

    def drop(self, request_id: str, index: int | None = None) -> None:
        """End a request without deltas, because its reader has gone."""
        if request_id in self._compiling:
            self._compiling.remove(request_id)
        self._ready = [d for d in self._ready if d.request_id != request_id or index not in (None, d.index)]
        self.scheduler.drop(request_id, index)

    def step(self) -> list[Delta]:
        """Fill the flight and take in the oldest result; returns the deltas of all its sequences."""
        if self._compiling:
            self._compiling.wait(0.0 if self._ready or self.scheduler.has_work else IDLE_WAIT)
            for request, error in self._compiling.take_compiled():
                self._admit(request, error)
        deltas, self._ready = self._ready, []
        flight = self._flight
        while len(flight) < self._depth and (batch := self.scheduler.schedule()) is not None:
            if self.on_batch is not None:
                self.on_batch(batch)
            flight.append((batch, self._start(batch)))
        if flight:
            batch, result = flight[0]
            output = result()  # an interrupt leaves the step in flight
            flight.popleft()
            deltas += self.scheduler.update(batch, output)
        return deltas

    def _start(self, batch: ScheduledBatch) -> Callable[[], StepOutput]:
        if self._depth == 1:
            return partial(self._executor.execute, batch)
        return self._executor.submit(batch).result

    def _admit(self, request: Request, error: str | None) -> None:
        if error is None:
            self._ready += self.scheduler.add(request)
        else:
            self._ready += ends(request, FinishReason.ERROR, error)

    def stats(self) -> EngineStats:
        return self.scheduler.stats()

    def reset_prefix_cache(self) -> None:
        """Forget cached prefixes that no running sequence holds."""
        self.scheduler.reset_prefix_cache()
