"""The step loop: schedule, submit, take in results. Only this module sees scheduler and executor. Token ids only."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Protocol

from quire.engine.gates import Gate, Gates, Keeper
from quire.engine.verbs import Handler, Ping, ResetPrefixCache, Result, Verb
from quire.errors import DeviceMemoryError, EngineError, FailedStepError, QuireError
from quire.runtime.watch import FORWARD_PASS, GATES, PROGRAMS, RESULTS, SCHEDULE, Watch
from quire.sched.scheduler import Scheduler
from quire.types import Delta, EngineStats, FinishReason, Request, ScheduledBatch, StepOutput, ends, failures

if TYPE_CHECKING:
    from quire.devices.sampling import Pending
    from quire.engine.api import Host

log = logging.getLogger("quire.engine")


class Executor(Protocol):
    """Computes batches in order, in this process or elsewhere."""

    watch: Watch  # told of slots, forward passes and results

    def execute(self, batch: ScheduledBatch) -> StepOutput:
        """Compute a batch now."""

    def submit(self, batch: ScheduledBatch) -> Pending[StepOutput]:
        """Compute a batch after earlier submitted ones, without blocking the caller."""

    def settle(self) -> None:
        """Let no submitted batch be unfinished; results that nobody has asked for are lost."""


@dataclass(slots=True)
class Flying:
    """A step in flight: when it began, and its result if it is computed ahead."""

    batch: ScheduledBatch
    started: float
    result: Pending[StepOutput] | None = None


class EngineCore:
    """Adds, aborts and steps requests. Each sample of an added request ends with exactly one finish reason.

    Up to `depth` steps are in flight. With 1, a step is computed before the next is scheduled (the plain loop). With
    more, steps are scheduled and submitted ahead, and an end is seen `depth - 1` steps later; the reported results are
    the same.
    """

    def __init__(self, scheduler: Scheduler, executor: Executor, depth: int = 1) -> None:
        self.scheduler = scheduler
        self.gates: list[Gate] = []
        self.host: Host | None = None  # of composed requests
        # Called before a batch with new sequences is computed, with the times of each step, and with the begin, the
        # end (seconds of time.perf_counter) and the batch of each.
        self.on_batch: Callable[[ScheduledBatch], None] | None = None
        self.on_step: Callable[[float, float], None] | None = None
        self.on_computed: Callable[[float, float, ScheduledBatch], None] | None = None
        self.on_idle: Callable[[], bool] = bool  # see Core
        self.asleep = False  # compute nothing
        self.handlers: dict[type, Handler] = {Ping: lambda _: None, ResetPrefixCache: self._reset}
        self._executor = executor
        self._depth = depth
        self._watch = Watch()
        self._flight: deque[Flying] = deque()
        self._ended = 0.0  # when the last step ended
        self._ready: list[Delta] = []  # the next step returns them
        self._waiting = Gates(self.gates)
        self._keepers: list[Keeper] = []
        # Samples that ended, by step: samples of a step in flight still use what keepers keep for them.
        self._ended_samples: deque[list[tuple[str, int | None]]] = deque()

    @property
    def watch(self) -> Watch:
        """Watch what the loop does; with one step at a time the executor's part too."""
        return self._watch

    @watch.setter
    def watch(self, watch: Watch) -> None:
        self._watch = watch
        if self._depth == 1:
            self._executor.watch = watch

    def add_gate(self, gate: Gate) -> None:
        """Let requests pass a further gate, after the others."""
        self.gates.append(gate)
        if isinstance(gate, Keeper):
            self._keepers.append(gate)

    @property
    def has_work(self) -> bool:
        """Return whether `step` has something to do."""
        if self.host is not None and self.host.has_work:
            return True
        return bool(self._ready) if self.asleep else self.busy

    @property
    def busy(self) -> bool:
        """Return whether requests wait or run."""
        return self.scheduler.has_work or bool(self._ready or self._waiting)

    def add(self, request: Request) -> None:
        """Begin a request once it has passed the gates. The next step returns the error of a refused one."""
        try:
            if request.id in self._waiting:
                raise EngineError(
                    f"request id {request.id!r} is in use by a request that has not ended; choose another id"
                )
            if not self._waiting.take(request):
                self._begin(request)
        except Exception as error:
            self._refuse(request, error)

    def _begin(self, request: Request) -> None:
        """Queue a request, or hand a composed one to its host."""
        if not request.is_composed:
            self._ready += self.scheduler.add(request)
        elif self.host is not None:
            self.host.add(request)
        else:
            raise EngineError("this engine runs no programs")

    def _refuse(self, request: Request, error: Exception) -> None:
        if not isinstance(error, QuireError):
            log.error("request %s cannot be queued", request.id, exc_info=error)
        self._ready += failures(request, error)

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
        """End a request, or one sample of it. Ignore unknown ids: the request has ended."""
        if self.host is not None and request_id in self.host:
            self.host.abort(request_id)
        elif request_id not in self._waiting:
            self._ready += self.scheduler.abort(request_id, index)
        elif (request := self._waiting.abort(request_id, index)) is not None:
            self._ready += ends(request, FinishReason.ABORT)

    def drop(self, request_id: str, index: int | None = None) -> None:
        """End a request without deltas, because its reader has gone."""
        if self.host is not None and request_id in self.host:
            self.host.drop(request_id)
            return
        if request_id in self._waiting:
            self._waiting.remove(request_id)
        if self._keepers:
            self._ended_samples.append([(request_id, index)])
        self._ready = [d for d in self._ready if d.request_id != request_id or index not in (None, d.index)]
        self.scheduler.abort(request_id, index)

    def do(self, verb: Verb) -> Result | Future[str]:
        """Obey an operator, now or (a Future) beside the steps. EngineError if the verb's feature is off."""
        handler = self.handlers.get(type(verb))
        if handler is None:
            raise EngineError(f"{type(verb).__name__}: the engine was started without this feature")
        return handler(verb)

    def end(self) -> None:
        """Let go what refers back to this object: its memory is freed now, not when the collector comes by."""
        self.handlers.clear()
        self.gates.clear()
        self.host = None

    def step(self) -> list[Delta]:
        """Fill the flight and take in the oldest result; returns the deltas of all its sequences."""
        enter = self._watch.enter
        if self.host is not None:
            enter(PROGRAMS)
            self.host.advance()
        deltas = self._take_ready() if self.asleep else self._compute()
        if self.host is None:
            return deltas
        enter(PROGRAMS)
        return self.host.route(deltas)

    def _compute(self) -> list[Delta]:
        enter = self._watch.enter
        if self._waiting:
            enter(GATES)
            self._pass_gates()
        enter(SCHEDULE)
        deltas = self._take_ready()
        flight = self._flight
        while len(flight) < self._depth and (batch := self.scheduler.schedule()) is not None:
            if batch.new and self.on_batch is not None:
                self.on_batch(batch)
            flight.append(flying := Flying(batch, perf_counter()))
            if self._depth > 1:
                flying.result = self._executor.submit(batch)
        if flight:
            deltas += self._finish_oldest()
        if self._keepers:
            self._release(deltas)
        return deltas

    def _pass_gates(self) -> None:
        """Begin the requests that have passed all gates."""
        if not (self._ready or self.scheduler.has_work):
            self._waiting.wait()
        for held, error in self._waiting.ready():
            try:
                if error is not None:
                    raise error
                self._begin(held.request)
            except Exception as failure:
                self._refuse(held.request, failure)
            for index in held.aborted:
                self.abort(held.request.id, index)

    def _release(self, deltas: list[Delta]) -> None:
        """Tell keepers of samples that have ended and are in no step in flight."""
        ended = self._ended_samples
        ended.append([(d.request_id, d.index) for d in deltas if d.finish_reason is not None])
        while ended and (len(ended) >= self._depth or not self._flight):
            for request_id, index in ended.popleft():
                for keeper in self._keepers:
                    try:
                        keeper.release(request_id, index)
                    except Exception:
                        log.exception("request %s: %s.release failed", request_id, type(keeper).__name__)

    def _take_ready(self) -> list[Delta]:
        deltas, self._ready = self._ready, []
        if self.asleep and self._keepers:
            self._release(deltas)
        return deltas

    def _finish_oldest(self) -> list[Delta]:
        """Take in the result of the oldest step in flight."""
        flying = self._flight[0]
        batch, result = flying.batch, flying.result
        if result is not None:  # else the executor says what it does
            self._watch.enter(FORWARD_PASS)
        # An interrupt leaves the step in flight.
        try:
            output = self._executor.execute(batch) if result is None else result.result()
        except FailedStepError as error:
            exhausted = isinstance(error, DeviceMemoryError)
            if exhausted:
                log.warning("%s; smaller steps compute the same again", error)
            else:
                log.exception("a step failed: its sequences compute again, one by one")
            self._executor.settle()
            self._flight.clear()
            return self.scheduler.undo(str(error), exhausted)
        if result is not None:
            self._watch.enter(RESULTS)
        self._flight.popleft()
        began, self._ended = max(flying.started, self._ended), perf_counter()
        if self.on_computed is not None:
            self.on_computed(began, self._ended, batch)
        deltas = self.scheduler.update(batch, output, self._ended - began)
        if self.on_step is not None:
            self.on_step(self._ended - began, self.scheduler.prompt_seconds)
        return deltas

    def settle(self, mode: str) -> None:
        """End all requests ("abort"), finish them ("wait"), or only finish programs ("keep"); empty the flight."""
        host = self.host
        if host is not None and mode == "abort":
            host.abort_all()
        wait = mode == "wait"
        while (host is not None and len(host)) or (wait and (self._waiting or self.scheduler.has_work)):
            self._ready = self.step()
        self._empty_flight()
        if mode == "abort":
            for request_id in [*self._waiting.ids, *self.scheduler.request_ids]:
                self.abort(request_id)

    def _empty_flight(self) -> None:
        while self._flight:
            self._ready += self._finish_oldest()

    def stats(self) -> EngineStats:
        """Return counters and gauges."""
        stats = self.scheduler.stats()
        stats.longest_stays = self._executor.watch.longest | self._watch.longest
        if self.host is not None:
            self.host.count(stats)
        return stats

    def _reset(self, verb: ResetPrefixCache) -> bool:
        if verb.reset_running and self.scheduler.running_ids:
            self._empty_flight()
            self.scheduler.preempt_all()
        self.scheduler.reset_prefix_cache()
        return True
