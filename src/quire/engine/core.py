"""The step loop: schedule, submit, take in results. Only this module sees scheduler and executor. Token ids only."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from time import perf_counter
from typing import Any, Protocol

from quire.engine.adapters import AdapterArena
from quire.engine.gates import Gate, Gates, Keeper
from quire.engine.residence import Residence
from quire.engine.trace import StepTrace
from quire.errors import EngineError, QuireError, message_of
from quire.sched.scheduler import Scheduler
from quire.types import Delta, EngineStats, FinishReason, Request, ScheduledBatch, StepOutput, ends

log = logging.getLogger("quire.engine")


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
        self, scheduler: Scheduler, executor: Executor, gates: Sequence[Gate] = (), depth: int = 1
    ) -> None:
        self.scheduler = scheduler
        # Called before a batch with new sequences is computed, and with the times of each step.
        self.on_batch: Callable[[ScheduledBatch], None] | None = None
        self.on_step: Callable[[float, float], None] | None = None
        self.gates = gates
        self._executor = executor
        self._depth = depth
        # With its start, and its result if it is computed ahead.
        self._flight: deque[tuple[ScheduledBatch, float, Future[StepOutput] | None]] = deque()
        self._ended = 0.0  # when the last step ended
        self._ready: list[Delta] = []  # the next step returns them
        self._waiting = Gates(gates)
        self._keepers = [gate for gate in gates if isinstance(gate, Keeper)]
        # Samples that ended, by step: those of a step in flight still use what keepers keep for them.
        self._ended_samples: deque[list[tuple[str, int | None]]] = deque()
        self._sleep_level: int | None = None
        self._trace: StepTrace | None = None
        self.residence: Residence[Any] | None = None  # the memory that `sleep` gives back
        self.trace_directory = Path()

    @property
    def has_work(self) -> bool:
        if self._sleep_level is not None:
            return bool(self._ready)
        return self.scheduler.has_work or bool(self._ready or self._waiting)

    def add(self, request: Request) -> None:
        """Queue a request once it has passed the gates. If it can never run, the next step returns an error delta."""
        try:
            if request.id in self._waiting:
                raise EngineError(
                    f"request id {request.id!r} is in use by a request that has not ended; choose another id"
                )
            if request.adapter is not None and not self._keepers:
                raise EngineError("adapters are not enabled: start the engine with --enable-lora")
            if not self._waiting.take(request):
                self._ready += self.scheduler.add(request)
        except Exception as error:
            if not isinstance(error, QuireError):
                log.exception("request %s cannot be queued", request.id)
            self._ready += ends(request, FinishReason.ERROR, message_of(error))

    def fork(self, request_id: str, index: int, request: Request, output: list[int]) -> None:
        """Queue `request` as a continuation of a live sample: see `Scheduler.fork`."""
        for keeper in self._keepers:
            keeper.keep(request)
        self._ready += self.scheduler.fork(request_id, index, request, output)

    def keep(self, key: str, request: Request, tokens: list[int]) -> int:
        """Hold a cached prefix: see `Scheduler.keep`."""
        return self.scheduler.keep(key, request, tokens)

    def let_go(self, key: str) -> None:
        """Give up a kept prefix, if it is still there."""
        self.scheduler.let_go(key)

    def abort(self, request_id: str, index: int | None = None) -> None:
        """End a request, or one sample of it. Unknown ids (of ended requests) are ignored."""
        if request_id not in self._waiting:
            self._ready += self.scheduler.abort(request_id, index)
        elif (request := self._waiting.abort(request_id, index)) is not None:
            self._ready += ends(request, FinishReason.ABORT)

    def drop(self, request_id: str, index: int | None = None) -> None:
        """End a request without deltas, because its reader has gone."""
        if request_id in self._waiting:
            self._waiting.remove(request_id)
        if self._keepers:
            self._ended_samples.append([(request_id, index)])
        self._ready = [d for d in self._ready if d.request_id != request_id or index not in (None, d.index)]
        self.scheduler.drop(request_id, index)

    def step(self) -> list[Delta]:
        """Fill the flight and take in the oldest result; returns the deltas of all its sequences."""
        if self._sleep_level is not None:
            return self._take_ready()
        if self._waiting:
            self._pass_gates()
        deltas = self._take_ready()
        flight = self._flight
        while len(flight) < self._depth and (batch := self.scheduler.schedule()) is not None:
            if batch.new and self.on_batch is not None:
                self.on_batch(batch)
            flight.append((batch, perf_counter(), self._executor.submit(batch) if self._depth > 1 else None))
        if flight:
            deltas += self._finish_oldest()
        if self._keepers:
            self._release(deltas)
        return deltas

    def _pass_gates(self) -> None:
        """Queue the requests that have passed all gates."""
        if not (self._ready or self.scheduler.has_work):
            self._waiting.wait()
        for held, error in self._waiting.ready():
            if error is not None:
                self._ready += ends(held.request, FinishReason.ERROR, error)
                continue
            self._ready += self.scheduler.add(held.request)
            for index in held.aborted:
                self._ready += self.scheduler.abort(held.request.id, index)

    def _release(self, deltas: list[Delta]) -> None:
        """Tell keepers of samples that have ended and are in no step in flight."""
        ended = self._ended_samples
        ended.append([(d.request_id, d.index) for d in deltas if d.finish_reason is not None])
        while ended and (len(ended) >= self._depth or not self._flight):
            for request_id, index in ended.popleft():
                for keeper in self._keepers:
                    keeper.release(request_id, index)

    def _take_ready(self) -> list[Delta]:
        deltas, self._ready = self._ready, []
        if self._sleep_level is not None and self._keepers:
            self._release(deltas)
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
        while mode == "wait" and (self._waiting or self.scheduler.has_work):
            self._ready = self.step()
        while self._flight:
            self._ready += self._finish_oldest()
        if mode == "abort":
            for request_id in [*self._waiting.ids, *self.scheduler.request_ids]:
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
            self._sleep_level = None

    def load_adapter(self, path: str, pin: bool = False) -> Future[str]:
        """See AdapterArena.load. EngineError if adapters are not enabled."""
        return self._arena().load(path, pin)

    def unload_adapter(self, digest: str) -> None:
        """Let go of an adapter once no request uses it."""
        self._arena().unload(digest)

    def _arena(self) -> AdapterArena[Any]:
        for gate in self.gates:
            if isinstance(gate, AdapterArena):
                return gate
        raise EngineError("adapters are not enabled: start the engine with --enable-lora")

    def start_profile(self, prefix: str | None = None, delay: int = 0, most: int = 0) -> None:
        """Trace steps until `stop_profile`."""
        self._trace = StepTrace(self.trace_directory, prefix, delay, most)

    def stop_profile(self) -> str | None:
        """Write the trace; returns its path, None if none was started."""
        trace, self._trace = self._trace, None
        return None if trace is None else str(trace.write())

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
