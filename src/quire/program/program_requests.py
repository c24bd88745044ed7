"""Requests with `Request.program`: the interpreter over requests of the engine core, and sessions between calls."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass

from quire.engine.api import Queue
from quire.program.calls import Calls
from quire.program.core import Run
from quire.program.interpreter import Interpreter
from quire.program.lane import Lane, StepError
from quire.program.tasks import Tasks, Turn
from quire.program.texts import Encoder, Texts
from quire.shares import next_to_go
from quire.steps import EXPIRED, FAILED, Event, gens
from quire.types import Delta, FinishReason, Request, Usage

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
