"""Runs programs over an engine core behind the core's own interface; other requests pass through."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Generic, TypeVar

from quire.engine.api import Core
from quire.engine.gates import IDLE_WAIT, Gates
from quire.errors import message_of
from quire.grammar.compiler import GrammarCompiler
from quire.program.beam import beam_search
from quire.program.core import Later, Program, Run
from quire.program.interpret import Interpreting
from quire.program.selection import select
from quire.program.texts import Texts
from quire.types import Delta, EngineStats, FinishReason, Request, ScheduledBatch, Usage, ends

log = logging.getLogger("quire.engine")

C = TypeVar("C", bound=Core)


class Programs(Generic[C]):
    """A core whose requests may be programs. A program that raises ends only its own request, with an error."""

    def __init__(self, core: C, texts: Texts | None = None, grammars: GrammarCompiler | None = None) -> None:
        self.core, self._grammars = core, grammars
        self.texts = texts or Texts(None, 0, False)
        self._interpret = Interpreting(core, self.texts)
        self._runs: dict[str, tuple[Run, Generator[None, Delta, list[Delta]]]] = {}
        self._owners: dict[str, Run] = {}  # by request of a program
        self._waiting = Gates([self.texts])
        self._later: list[Later] = []
        self._ready: list[Delta] = []  # the next step returns them

    def _program_of(self, request: Request) -> Program | None:
        """The program that answers `request`; None if the core answers it directly."""
        if request.program is not None:
            return self._interpret
        if request.sampling.beam is not None:
            return beam_search
        return select if request.choices else None

    @property
    def on_batch(self) -> Callable[[ScheduledBatch], None] | None:
        return self.core.on_batch

    @on_batch.setter
    def on_batch(self, watch: Callable[[ScheduledBatch], None] | None) -> None:
        self.core.on_batch = watch

    @property
    def on_step(self) -> Callable[[float, float], None] | None:
        return self.core.on_step

    @on_step.setter
    def on_step(self, watch: Callable[[float, float], None] | None) -> None:
        self.core.on_step = watch

    @property
    def has_work(self) -> bool:
        return self.core.has_work or bool(self._ready or self._waiting or self._later)

    def add(self, request: Request) -> None:
        """Queue a request, or start the program that answers it."""
        program = self._program_of(request)
        if request.id in self._runs or request.id in self._waiting:
            message = (
                f"request id {request.id!r} is in use by a request that has not ended; choose another id"
            )
            self._ready += ends(request, FinishReason.ERROR, message)
        elif program is None:
            self.core.add(request)
        elif not self._waiting.take(request):
            self._start(request, program)

    def _start(self, request: Request, program: Program) -> None:
        run = Run(request, self.core, self._owners, self._later, self._grammars)
        steps = program(request, run)
        self._runs[request.id] = run, steps
        self._resume(run, lambda: next(steps))

    def fork(self, request_id: str, index: int, request: Request, output: list[int]) -> None:
        self.core.fork(request_id, index, request, output)

    def keep(self, key: str, request: Request, tokens: list[int]) -> int:
        return self.core.keep(key, request, tokens)

    def let_go(self, key: str) -> None:
        self.core.let_go(key)

    def abort(self, request_id: str, index: int | None = None) -> None:
        """End a request, or one sample of it; a program ends with all its requests."""
        if request_id in self._waiting:
            self._ready += ends(self._waiting.remove(request_id), FinishReason.ABORT)
        elif request_id in self._runs:
            run, steps = self._runs[request_id]
            steps.close()
            self._end(run, _last(run, FinishReason.ABORT, None))
        else:
            self.core.abort(request_id, index)

    def drop(self, request_id: str, index: int | None = None) -> None:
        """End a request without a delta."""
        if request_id in self._waiting:
            self._waiting.remove(request_id)
        elif request_id in self._runs:
            run, steps = self._runs.pop(request_id)
            steps.close()
            run.drop_all()
        else:
            self.core.drop(request_id, index)

    def step(self) -> list[Delta]:
        """Step the core and pass programs' deltas to them; returns all others."""
        if self._waiting:
            self._start_waiting()
        if self._later:
            self._take_later()
        deltas = self.core.step()
        if self._owners:
            passed = []
            owners = [self._owners.get(delta.request_id) for delta in deltas]
            for delta, owner in zip(deltas, owners, strict=True):
                if owner is None:
                    passed.append(delta)
                elif delta.request_id in owner.live:  # else the program has dropped it in this step
                    self._push(owner, delta)
            deltas = passed
        if self._ready:
            deltas = self._ready + deltas
            self._ready = []
        return deltas

    def _start_waiting(self) -> None:
        if not self.core.has_work:
            self._waiting.wait()
        for held, error in self._waiting.ready():
            if error is None:
                self._start(held.request, self._interpret)
            else:
                self._ready += ends(held.request, FinishReason.ERROR, error)

    def _take_later(self) -> None:
        """Let runs go on whose work in a thread is done."""
        if not (self.core.has_work or self._ready):
            wait([work for _, work, _ in self._later], IDLE_WAIT, FIRST_COMPLETED)
        done = [one for one in self._later if one[1].done()]
        self._later[:] = [one for one in self._later if not one[1].done()]
        for run, work, take in done:
            if self._runs.get(run.request.id, (None,))[0] is run:  # it has not ended meanwhile
                error = work.exception()
                if error is not None:
                    self._runs[run.request.id][1].close()
                    self._end(run, _last(run, FinishReason.ERROR, message_of(error)))
                    continue
                take(work.result())
                self._push(run, Delta(run.request.id, 0, [], Usage(0, 0, 0)))

    def _push(self, run: Run, delta: Delta) -> None:
        _, steps = self._runs[run.request.id]
        run.took(delta)
        self._resume(run, lambda: steps.send(delta))

    def _resume(self, run: Run, go_on: Callable[[], None]) -> None:
        try:
            go_on()
        except StopIteration as end:
            self._end(run, end.value)
        except Exception as error:
            log.exception("the program of request %s failed", run.request.id)
            self._end(run, _last(run, FinishReason.ERROR, message_of(error)))
        else:
            self._report(run)

    def _report(self, run: Run) -> None:
        if run.events:
            events, run.events = run.events, []
            self._ready.append(Delta(run.request.id, 0, [], Usage(0, 0, 0), events=events))

    def _end(self, run: Run, last: list[Delta]) -> None:
        del self._runs[run.request.id]
        run.drop_all()
        self._report(run)
        self._ready += last

    def stats(self) -> EngineStats:
        """The core's, with programs; sessions whose time is over end here too."""
        sessions = self._interpret.sessions
        sessions.expire()
        stats = self.core.stats()
        stats.num_programs = len(self._runs) + len(self._waiting)
        stats.num_sessions = len(sessions)
        return stats

    def reset_prefix_cache(self, reset_running: bool = False) -> bool:
        return self.core.reset_prefix_cache(reset_running)

    @property
    def is_sleeping(self) -> bool:
        return self.core.is_sleeping

    def sleep(self, level: int = 1, mode: str = "abort") -> None:
        """As the core does; programs end under "abort" and are finished first otherwise."""
        for request_id in [*self._runs, *self._waiting.ids] if mode == "abort" else ():
            self.abort(request_id)
        while (self._runs or self._waiting) and mode != "abort":
            self._ready = self.step()
        self.core.sleep(level, mode)

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        self.core.wake_up(tags)

    def load_adapter(self, path: str, pin: bool = False) -> Future[str]:
        return self.core.load_adapter(path, pin)

    def unload_adapter(self, digest: str) -> None:
        self.core.unload_adapter(digest)

    def start_profile(self, prefix: str | None = None, delay: int = 0, most: int = 0) -> None:
        self.core.start_profile(prefix, delay, most)

    def stop_profile(self) -> str | None:
        return self.core.stop_profile()


def _last(run: Run, reason: FinishReason, error: str | None) -> list[Delta]:
    usage = Usage(len(run.request.tokens), run.num_cached, 0)
    samples = range(run.request.sampling.n)
    return [Delta(run.request.id, index, [], usage, finish_reason=reason, error=error) for index in samples]
