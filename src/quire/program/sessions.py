"""Programs that wait for their next call: their lanes, and the KV that is held for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from quire.engine.api import Queue
from quire.program.lane import Lane
from quire.shares import next_to_go
from quire.types import Request

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
