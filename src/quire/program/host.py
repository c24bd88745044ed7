"""Runs programs: answers composed requests by requests of an engine core."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import FIRST_COMPLETED, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quire.engine.api import Queue
from quire.engine.gates import IDLE_WAIT, Gates
from quire.errors import QuireError
from quire.program.beam_requests import beam_search
from quire.program.calls import Calls
from quire.program.core import Later, Program, Run
from quire.program.interpreter import Interpreter
from quire.program.lane import Lane, StepError
from quire.program.selection import select
from quire.program.tasks import Tasks, Turn
from quire.program.texts import Encoder, Texts
from quire.shares import next_to_go
from quire.steps import EXPIRED, FAILED, Event, gens
from quire.types import Delta, EngineStats, FinishReason, Request, Usage, ends, failures

MAX_SESSIONS = 256
MAX_CHARACTERS = 1 << 25  # of the texts of all sessions
SECONDS = 300.0


@dataclass(frozen=True, slots=True)
class Session:
    """The lanes of a program between two calls, their size in characters, and whose they are."""

    lanes: dict[str, Lane]
    expires: float  # seconds of the clock
    owner: str
    size: int


def _size(lanes: Iterable[Lane]) -> int:
    """Count the characters of texts and variables."""
    return sum(len(lane.text) + sum(len(str(v)) for v in lane.variables.values()) for lane in lanes)


class Sessions:
    """Keeps at most `MAX_SESSIONS` sessions for `seconds` each. The oldest of the owner with most make room.

    The prefix cache keeps their KV (`Queue.keep`), which is given up before any running sequence is preempted. Then the
    next call computes the text again.
    """

    def __init__(self, core: Queue, clock: Callable[[], float], seconds: float = SECONDS) -> None:
        self._core, self._clock, self._seconds = core, clock, seconds
        self._sessions: dict[str, Session] = {}  # oldest first
        self._size = 0
        self._paths: dict[str, set[str]] = {}  # lanes whose KV is held

    def __len__(self) -> int:
        return len(self._sessions)

    def take(self, name: str) -> dict[str, Lane] | None:
        """Take the lanes of a session; None if it has expired. Call `put` or `release` afterwards."""
        self.expire()
        return self._pop(name).lanes if name in self._sessions else None

    def put(self, name: str, lanes: dict[str, Lane], request: Request, tokens: dict[str, list[int]]) -> None:
        """Keep lanes for the next call, and the KV of those whose `tokens` were computed."""
        session = Session(lanes, self._clock() + self._seconds, request.owner, _size(lanes.values()))
        self._sessions[name] = session
        self._size += session.size
        before, self._paths[name] = self._paths.get(name, set()), set(lanes)
        for path in before - set(lanes):
            self._core.let_go(f"{name}:{path}")
        for path, known in tokens.items():
            self._core.keep(f"{name}:{path}", request, known)
        while len(self._sessions) > MAX_SESSIONS or (self._size > MAX_CHARACTERS and len(self._sessions) > 1):
            self._make_room()

    def _make_room(self) -> None:
        large, sessions = self._size > MAX_CHARACTERS, self._sessions
        self.close(next_to_go((name, one.owner, one.size if large else 1) for name, one in sessions.items()))

    def close(self, name: str) -> None:
        """Forget a session, if it is still there."""
        if name in self._sessions:
            self._pop(name)
            self.release(name)

    def release(self, name: str) -> None:
        """Give up the KV of a session that is over."""
        for path in self._paths.pop(name, ()):
            self._core.let_go(f"{name}:{path}")

    def expire(self) -> None:
        """Forget sessions whose time is over."""
        now = self._clock()
        while self._sessions:
            name, session = next(iter(self._sessions.items()))
            if session.expires > now:
                return
            self.close(name)

    def _pop(self, name: str) -> Session:
        session = self._sessions.pop(name)
        self._size -= session.size
        return session


CHARACTERS_PER_TOKEN = 16  # the longest text of a lane, for each token of the model's length


class Interpreting:
    """Runs programs one call at a time; what they keep between calls is in `sessions`."""

    def __init__(
        self, core: Queue, texts: Texts, turn: Turn, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.texts, self._turn = texts, turn
        self.sessions = Sessions(core, clock)

    def __call__(self, request: Request, run: Run) -> Generator[None, Delta, list[Delta]]:
        """Run one call. Its events go to `run`; the last delta has the counts of all its requests."""
        program, texts = request.program, self.texts
        assert program is not None
        lanes = self.sessions.take(program.session) if program.resume else None
        if program.resume and lanes is None:
            run.report(Event("done", finish_reason=EXPIRED))
            return [_last(request, (0, 0, 0), None)]
        tasks, kept = Tasks(self._turn), False
        encoder = Encoder(texts.cuts)
        requests = dict(zip(map(id, gens(program)), request.gens, strict=True))
        calls = Calls(run, tasks, encoder, texts, requests)
        interpreter = Interpreter(CHARACTERS_PER_TOKEN * texts.max_model_len, lanes)

        async def whole() -> dict[str, list[int]]:
            await interpreter.run(program, tasks, calls, run.report)
            lanes = interpreter.live_lanes() if program.keep else {}
            return {path: await calls.tokens(lane.text) for path, lane in lanes.items() if lane.known}

        try:
            done = tasks.start(whole())
            tasks.run()
            while not done.is_set:
                if tasks.ready:
                    run.go_on()
                elif not run.waits:
                    raise StepError("the steps wait for each other's variables: nothing can go on")
                calls.take((yield))
                tasks.run()
            if program.keep:
                self.sessions.put(program.session, interpreter.live_lanes(), request, done.value)
                kept = True
        except StepError as error:
            run.report(Event("done", finish_reason=FAILED))
            return [_last(request, calls.counts, str(error))]
        finally:
            tasks.close()
            if not kept:
                self.sessions.release(program.session)
        return [_last(request, calls.counts, None)]


def _last(request: Request, counts: tuple[int, int, int], error: str | None) -> Delta:
    reason = FinishReason.STOP if error is None else FinishReason.ERROR
    return Delta(request.id, 0, [], Usage(*counts), finish_reason=reason, error=error)


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
