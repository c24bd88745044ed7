"""Runs programs: answers composed requests by requests of an engine core."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator
from concurrent.futures import FIRST_COMPLETED, wait
from typing import TYPE_CHECKING

from quire.engine.api import Queue
from quire.engine.gates import IDLE_WAIT, Gates
from quire.errors import QuireError
from quire.program.beam_requests import beam_search
from quire.program.core import Later, Program, Run
from quire.program.program_requests import Interpreting
from quire.program.selection import select
from quire.program.tasks import Turn
from quire.program.texts import Texts
from quire.types import Delta, EngineStats, FinishReason, Request, Usage, ends, failures

if TYPE_CHECKING:
    from quire.grammar.compiler import GrammarCompiler

log = logging.getLogger("quire.engine")


class Programs:
    """The host of composed requests. A program that raises ends only its own request, with an error."""

    def __init__(
        self, core: Queue, texts: Texts, grammars: Callable[[], GrammarCompiler] | None = None
    ) -> None:
        self._core, self._texts, self._grammars = core, texts, grammars
        self._turn = Turn()
        self._interpret = Interpreting(core, texts, self._turn)
        self._runs: dict[str, tuple[Run, Generator[None, Delta, list[Delta]]]] = {}
        self._owners: dict[str, Run] = {}  # by request of a program
        self._waiting = Gates([texts])
        self._later: list[Later] = []
        self._ready: list[Delta] = []  # the next step returns them

    def _program_of(self, request: Request) -> Program:
        """Return the program that answers `request`."""
        if request.program is not None:
            return self._interpret
        if request.sampling.beam is not None:
            return beam_search
        return select

    @property
    def has_work(self) -> bool:
        return bool(self._ready or self._waiting or self._later)

    def __len__(self) -> int:
        return len(self._runs) + len(self._waiting)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._runs or request_id in self._waiting

    def add(self, request: Request) -> None:
        """Start the program that answers a request."""
        if request.id in self:
            message = (
                f"request id {request.id!r} is in use by a request that has not ended; choose another id"
            )
            self._ready += ends(request, FinishReason.ERROR, message)
        elif not self._waiting.take(request):
            self._start(request)

    def _start(self, request: Request) -> None:
        program = self._program_of(request)
        run = Run(request, self._core, self._owners, self._later, self._grammars)
        steps = program(request, run)
        self._runs[request.id] = run, steps
        self._resume(run, lambda: next(steps))

    def abort(self, request_id: str) -> None:
        """End a program with all its requests."""
        if request_id in self._waiting:
            self._ready += ends(self._waiting.remove(request_id), FinishReason.ABORT)
        else:
            run, _ = self._runs[request_id]
            self._end(run, ends(run.request, FinishReason.ABORT, num_cached=run.num_cached))

    def abort_all(self) -> None:
        """End all programs."""
        for request_id in [*self._runs, *self._waiting.ids]:
            self.abort(request_id)

    def drop(self, request_id: str) -> None:
        """End a program without a delta."""
        if request_id in self._waiting:
            self._waiting.remove(request_id)
        else:
            self._close(request_id)

    def advance(self) -> None:
        """Start programs that waited for the tokenizer, and go on with those whose work in a thread is done."""
        self._turn.begin()
        if self._waiting:
            self._start_waiting()
        if self._later:
            self._take_later()

    def route(self, deltas: list[Delta]) -> list[Delta]:
        """Pass programs' deltas to them; return all others, and the programs' own deltas."""
        if self._owners:
            self._turn.begin()
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
        if not self._core.busy:
            self._waiting.wait()
        for held, error in self._waiting.ready():
            if error is None:
                self._start(held.request)
            else:
                self._ready += failures(held.request, error)

    def _take_later(self) -> None:
        """Let runs go on whose work in a thread is done."""
        if not (self._core.busy or self._ready):
            wait([work for _, work, _ in self._later], IDLE_WAIT, FIRST_COMPLETED)
        done = [one for one in self._later if one[1].done()]
        self._later[:] = [one for one in self._later if not one[1].done()]
        for place, (run, _, take) in enumerate(done):
            if self._turn.over:
                self._later[:0] = done[place:]
                return
            if self._runs.get(run.request.id, (None,))[0] is run:  # it has not ended meanwhile
                self._push(run, Delta(run.request.id, 0, [], Usage(0, 0, 0)), take)

    def _push(self, run: Run, delta: Delta, take: Callable[[], None] | None = None) -> None:
        _, steps = self._runs[run.request.id]

        def go_on() -> None:
            if take is not None:
                take()
            run.took(delta)
            steps.send(delta)

        self._resume(run, go_on)

    def _resume(self, run: Run, go_on: Callable[[], None]) -> None:
        try:
            go_on()
        except StopIteration as end:
            self._end(run, end.value)
        except Exception as error:
            if not isinstance(error, QuireError):
                log.exception("the program of request %s failed", run.request.id)
            self._end(run, failures(run.request, error, run.num_cached))
        else:
            self._report(run)

    def _report(self, run: Run) -> None:
        if run.events:
            events, run.events = run.events, []
            self._ready.append(Delta(run.request.id, 0, [], Usage(0, 0, 0), events=events))

    def _end(self, run: Run, last: list[Delta]) -> None:
        self._close(run.request.id)
        self._report(run)
        self._ready += last

    def _close(self, request_id: str) -> None:
        run, steps = self._runs.pop(request_id)
        try:
            steps.close()
        except Exception:
            log.exception("the program of request %s cannot be closed", request_id)
        run.drop_all()

    def count(self, stats: EngineStats) -> None:
        """Add programs and sessions; sessions whose time is over end here too."""
        sessions = self._interpret.sessions
        sessions.expire()
        stats.num_programs = len(self)
        stats.num_sessions = len(sessions)
