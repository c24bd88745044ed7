"""The step loop: schedule, submit, take in results. Only this module sees scheduler and executor. Token ids only."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from time import perf_counter
from typing import Any, Protocol

from quire.engine.adapters import AdapterArena
from quire.engine.compiling import CompilingRequests
from quire.engine.residence import Residence
from quire.engine.trace import StepTrace
from quire.errors import EngineError
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
        # Called before a batch with new sequences is computed, and with the times of each step.
        self.on_batch: Callable[[ScheduledBatch], None] | None = None
        self.on_step: Callable[[float, float], None] | None = None
        self._executor = executor
        self._depth = depth
        # With its start, and its result if it is computed ahead.
        self._flight: deque[tuple[ScheduledBatch, float, Future[StepOutput] | None]] = deque()
        self._ended = 0.0  # when the last step ended
        self._ready: list[Delta] = []  # the next step returns them
        self._compiling = CompilingRequests(grammars)
        self._sleep_level: int | None = None
        self._trace: StepTrace | None = None
        self.residence: Residence[Any] | None = None  # the memory that `sleep` gives back
        self.trace_directory = Path()
        self.adapters: AdapterArena[Any] | None = None
        # Samples that ended, by step: those of a step in flight still use their adapter.
        self._ended_samples: deque[list[tuple[str, int | None]]] = deque()

    @property
    def has_work(self) -> bool:
        if self._sleep_level is not None:
            return bool(self._ready)
        return self.scheduler.has_work or bool(self._ready or self._compiling or self.adapters)

    def add(self, request: Request) -> None:
        """Queue a request. If it can never run, the next step returns an error delta.

        A request is queued once its grammar is compiled; others go on meanwhile.
        """
        if request.id in self._compiling or (self.adapters is not None and request.id in self.adapters):
            message = (
                f"request id {request.id!r} is in use by a request that has not ended; choose another id"
            )
            self._ready += ends(request, FinishReason.ERROR, message)
        elif request.adapter is None or self._has_adapter(request):
            self._enter(request)

    def _enter(self, request: Request) -> None:
        if not self._compiling.take(request):
            self._ready += self.scheduler.add(request)

    def _has_adapter(self, request: Request) -> bool:
        """Whether the adapter of a new request is in memory; if not, the request is held or ends."""
        if self.adapters is None:
            message = "adapters are not enabled: start the engine with --enable-lora"
            self._ready += ends(request, FinishReason.ERROR, message)
            return False
        return self.adapters.take(request)

    def fork(self, request_id: str, index: int, request: Request, output: list[int]) -> None:
        """Queue `request` as a continuation of a live sample: see `Scheduler.fork`."""
        if self.adapters is not None:
            self.adapters.hold(request)
        self._ready += self.scheduler.fork(request_id, index, request, output)

    def keep(self, key: str, request: Request, tokens: list[int]) -> int:
        """Hold a cached prefix: see `Scheduler.keep`."""
        return self.scheduler.keep(key, request, tokens)

    def let_go(self, key: str) -> None:
        """Give up a kept prefix, if it is still there."""
        self.scheduler.let_go(key)

    def abort(self, request_id: str, index: int | None = None) -> None:
        """End a request, or one sample of it. Unknown ids (of ended requests) are ignored."""
        if self.adapters is not None and request_id in self.adapters:
            if index is None or self.adapters.held(request_id).sampling.n == 1:
                self._ready += ends(self.adapters.remove(request_id), FinishReason.ABORT)
            return
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
        if self.adapters is not None:
            self._ended_samples.append([(request_id, index)])
        self._ready = [d for d in self._ready if d.request_id != request_id or index not in (None, d.index)]
        self.scheduler.drop(request_id, index)

    def step(self) -> list[Delta]:
        """Fill the flight and take in the oldest result; returns the deltas of all its sequences."""
        if self._sleep_level is not None:
            return self._take_ready()
        if self.adapters:
            self._take_adapted(self.adapters)
        if self._compiling:
            self._compiling.wait(0.0 if self._ready or self.scheduler.has_work else IDLE_WAIT)
            for request, error in self._compiling.take_compiled():
                self._admit(request, error)
        deltas = self._take_ready()
        flight = self._flight
        while len(flight) < self._depth and (batch := self.scheduler.schedule()) is not None:
            if batch.new and self.on_batch is not None:
                self.on_batch(batch)
            flight.append((batch, perf_counter(), self._executor.submit(batch) if self._depth > 1 else None))
        if flight:
            deltas += self._finish_oldest()
        if self.adapters is not None:
            self._let_go(self.adapters, deltas)
        return deltas

    def _let_go(self, adapters: AdapterArena[Any], deltas: list[Delta]) -> None:
        """Unpin the adapters of samples that have ended and are in no step in flight."""
        ended = self._ended_samples
        ended.append([(d.request_id, d.index) for d in deltas if d.finish_reason is not None])
        while ended and (len(ended) >= self._depth or not self._flight):
            for request_id, index in ended.popleft():
                adapters.release(request_id, index)

    def _take_adapted(self, adapters: AdapterArena[Any]) -> None:
        """Queue the requests whose adapter is in memory now."""
        busy = self._ready or self._compiling or self.scheduler.has_work
        adapters.wait(0.0 if busy else IDLE_WAIT)
        for request, error in adapters.take_loaded():
            if error is None:
                self._enter(request)
            else:
                self._ready += ends(request, FinishReason.ERROR, error)

    def _take_ready(self) -> list[Delta]:
        deltas, self._ready = self._ready, []
        if self._sleep_level is not None and self.adapters is not None:
            self._let_go(self.adapters, deltas)
        return deltas

    def _finish_oldest(self) -> list[Delta]:
        """Take in the result of the oldest step in flight."""
        batch, started, result = self._flight[0]
        # An interrupt leaves the step in flight.
        output = self._executor.execute(batch) if result is None else result.result()
        self._flight.popleft()
        began, self._ended = max(started, self._ended), perf_counter()
        if self._trace is not None:
            self._trace.record(began, self._ended, batch)
        deltas = self.scheduler.update(batch, output, self._ended - began)
        if self.on_step is not None:
            self.on_step(self._ended - began, self.scheduler.prompt_seconds)
        return deltas

    @property
    def is_sleeping(self) -> bool:
        return self._sleep_level is not None

    def sleep(self, level: int = 1, mode: str = "abort") -> None:
        """Compute nothing until `wake_up`. Level 1 gives the KV cache back, level 2 the weights too, level 0 nothing.

        `mode` says what happens to running requests: "abort" ends them, "wait" lets them finish first, "keep" goes on
        with them afterwards, computing their tokens again. Raises EngineError for another level or mode.
        """
        if level not in (0, 1, 2):
            raise EngineError(f"sleep: level must be 0, 1 or 2, got {level!r}")
        if mode not in ("abort", "wait", "keep"):
            raise EngineError(f"sleep: mode must be abort, wait or keep, got {mode!r}")
        if self.is_sleeping:
            return
        while mode == "wait" and (self._compiling or self.adapters or self.scheduler.has_work):
            self._ready = self.step()
        while self._flight:
            self._ready += self._finish_oldest()
        if mode == "abort":
            held = [] if self.adapters is None else self.adapters.held_ids
            for request_id in [*held, *self._compiling.ids, *self.scheduler.request_ids]:
                self.abort(request_id)
        if level:
            self.scheduler.preempt_all()
            self.scheduler.reset_prefix_cache()
            if self.residence is not None:
                self.residence.release(("kv_cache",) if level == 1 else ("weights", "kv_cache"))
        self._sleep_level = level

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Take memory again and go on. `tags` ("weights", "kv_cache") takes only these; the engine sleeps until both
        are there.
        """
        residence = self.residence
        if residence is not None:
            residence.restore(
                ("weights", "kv_cache") if tags is None else [t for t in tags if t != "scheduling"]
            )
        if residence is None or residence.complete:
            if self._sleep_level and self.adapters is not None:
                self.adapters.reload()
            self._sleep_level = None

    def load_adapter(self, path: str, pin: bool = False) -> Future[str]:
        """See AdapterArena.load. EngineError if adapters are not enabled."""
        if self.adapters is None:
            raise EngineError("adapters are not enabled: start the engine with --enable-lora")
        return self.adapters.load(path, pin)

    def unload_adapter(self, digest: str) -> None:
        """Let go of an adapter once no request uses it."""
        if self.adapters is not None:
            self.adapters.unload(digest)

    def start_profile(self, prefix: str | None = None, delay: int = 0, most: int = 0) -> None:
        """Trace steps until `stop_profile`."""
        self._trace = StepTrace(self.trace_directory, prefix, delay, most)

    def stop_profile(self) -> str | None:
        """Write the trace; returns its path, None if none was started."""
        trace, self._trace = self._trace, None
        return None if trace is None else str(trace.write())

    def _admit(self, request: Request, error: str | None) -> None:
        if error is None:
            self._ready += self.scheduler.add(request)
        else:
            self._ready += ends(request, FinishReason.ERROR, error)

    def stats(self) -> EngineStats:
        return self.scheduler.stats()

    def reset_prefix_cache(self, reset_running: bool = False) -> bool:
        """Forget cached prefixes, except those that running sequences hold. Returns True: it always does.

        With `reset_running`, running sequences give up theirs too and compute their tokens again.
        """
        if reset_running and self.scheduler.running_ids:
            while self._flight:
                self._ready += self._finish_oldest()
            self.scheduler.preempt_all()
        self.scheduler.reset_prefix_cache()
        return True
