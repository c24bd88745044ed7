"""One run of a program: what it has to send, and the engine that it is sent to."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol

from quire.errors import QuireError, SessionExpiredError
from quire.program.frames import Frames
from quire.program.language.mirror import Local, Mirror, MirrorLane, sendable
from quire.program.language.symbols import Trace
from quire.steps import AnyStep

# What a variable will hold: several texts, one, or a value of the program.
LIST, TEXT, OWN = "list", "text", "own"


class Backend(Protocol):
    """What runs programs: an LLM, or a server behind a RuntimeEndpoint."""

    def run_program(self, program: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Run a program as POST /v1/programs takes it, and yield its events."""
        ...

    def end_session(self, session: str) -> None:
        """Forget the state that was kept of a program."""
        ...

    def role_frames(self) -> Frames:
        """Return the texts by which the model's chat template frames messages."""
        ...


class Branch:
    """A lane while Python code runs: `steps` were not sent yet, and `live` has what became of those that were."""

    def __init__(self, root: Root, parent: Branch | None = None, place: str = "") -> None:
        self.root, self._parent, self._place = root, parent, place
        self.live = MirrorLane()
        self.begun = parent is None  # whether the engine knows the lane
        self.steps: list[Any] = [] if parent is None else [self._begin]
        self.closed = False  # joined
        self.failed = False  # with the last of its steps
        # What the steps will make, known before they run:
        self.kinds: dict[str | None, str] = {} if parent is None else dict(parent.kinds)
        self._first_kinds = frozenset(self.kinds)
        self.assigned: dict[str | None, int] = {}  # how often, by steps that were not sent
        self.role: str | None = None if parent is None else parent.role
        self.has_message: bool = parent is not None and parent.has_message

    def _begin(self, live: MirrorLane) -> None:
        self.live, self.begun = live, True

    @property
    def path(self) -> str:
        """Name the lane as the engine does: its fork and branch, after its parent's path."""
        if self.begun or self._parent is None:
            return self.live.path
        above = self._parent.path
        return f"{above}/{self._place}" if above else self._place

    @property
    def error(self) -> Exception | None:
        """Return what ended the lane early: its own error, or its parent's if it never began."""
        return self.live.error if self.begun or self._parent is None else self._parent.error

    def add(self, step: AnyStep | Local) -> None:
        """Run `step` when the program is sent, unless one before it cannot be done."""
        with self.root.changed:
            if not self.failed:
                self.steps.append(step)

    def fail(self, error: Exception) -> None:
        """Fail when the steps so far have run."""
        self.add(lambda live: live.fail(error))
        self.failed = True

    def assign(self, name: str | None, kind: str) -> None:
        """Note that the next step assigns a variable."""
        self.kinds[name] = kind
        self.assigned[name] = self.assigned.get(name, 0) + 1

    def assigns_once(self, name: str | None) -> bool:
        """Tell whether a variable has one value in this lane."""
        return self.assigned.get(name, 0) + (name in self._first_kinds) == 1


class Root:
    """Sends steps when a value is needed, and at the end. With `trace`, values are only known at the end."""

    def __init__(
        self, backend: Backend, sampling: Mapping[str, Any], stream: bool, trace: Trace | None
    ) -> None:
        self.backend, self.sampling, self.stream, self.trace = backend, sampling, stream, trace
        self.changed = threading.Condition(threading.RLock())
        self.error: Exception | None = None
        self.finished = False
        self.first = Branch(self)
        self.lanes = [self.first]
        self._mirror = Mirror(self.first.live)
        self._names = itertools.count()
        self._session: str | None = None
        self._sending = threading.RLock()
        self._complete = False

    def traced(self) -> None:
        """Note that the trace is complete: all steps are known, and the next request is the last."""
        self.trace, self._complete = None, True

    def new_name(self) -> str:
        """Make a name for a fork."""
        return f"f{next(self._names)}"

    def send(self, last: bool = False) -> None:
        """Run everything that waits, in one request. Errors stay in `error` and in the lanes.

        The engine keeps the program's state unless this is the `last` request.
        """
        last = last or self._complete
        with self._sending:
            if self.finished:
                return
            with self.changed:
                taken = [(lane, lane.steps) for lane in self.lanes if lane.begun]
                for lane in self.lanes:
                    lane.steps = []
            self._run(taken, last)
            with self.changed:
                self._mirror.begin((lane.live, steps) for lane, steps in taken)
                self._mirror.end(self.error)
                for lane in self.lanes:
                    lane.assigned = {}
                self.finished = last
                self.changed.notify_all()

    def _run(self, taken: Sequence[tuple[Branch, Sequence[Any]]], last: bool) -> None:
        """Send the steps that the engine has to run."""
        try:
            lanes = {lane.path: found for lane, steps in taken if (found := sendable(steps))}
            if lanes and self.error is None:
                try:
                    self._request(lanes, taken, last)
                except SessionExpiredError:
                    self._request({"": self._anew(lanes)}, taken, last)
                return
        except QuireError as error:
            self.error = error
        if last and self._session is not None:  # after an error the engine may have forgotten it
            session, self._session = self._session, None
            with suppress(QuireError):
                self.backend.end_session(session)

    def _request(
        self, lanes: Mapping[str, Any], taken: Sequence[tuple[Branch, Sequence[Any]]], last: bool
    ) -> None:
        """Make a request and take in its events."""
        rest = {path: steps for path, steps in lanes.items() if path}
        program = {"steps": lanes.get("", []), "lanes": rest, "keep": not last, "sampling": self.sampling}
        if self._session is not None:
            program["session"] = self._session
        for event in self.backend.run_program({**program, "stream": self.stream}):
            with self.changed:
                self._mirror.begin((lane.live, steps) for lane, steps in taken)
                if event["event"] == "done":
                    self._session = event["session"]
                else:
                    self._mirror.take(event)
                self.changed.notify_all()

    def _anew(self, lanes: Mapping[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
        """Make the same steps for an engine that has forgotten the session: every lane begins with its whole text."""
        self._session = None
        name, branches = self.new_name(), []
        kept = [lane for lane in self.lanes if lane.begun and (not lane.closed or lane.path in lanes)]
        for lane in kept:
            steps = lanes.get(lane.path, [])
            rest = [step for step in steps if step["type"] != "join" or not _old(step, lanes)]
            branches.append([{"type": "text", "text": lane.live.text}, *rest])
        for number, lane in enumerate(kept):
            lane.live.path = f"{name}.{number}"
        self._mirror.lanes = {lane.path: lane.live for lane in kept}
        return [{"type": "fork", "name": name, "branches": branches}]

    def fail(self, error: Exception) -> None:
        """End the program: everything that waits is dropped."""
        with self.changed:
            self.error = self.error or error
            self.changed.notify_all()


def _old(join: dict[str, Any], lanes: Mapping[str, list[dict[str, Any]]]) -> bool:
    """Tell whether a join is of lanes from an earlier request, which are lanes of their own now.

    Raises SessionExpiredError if it would append their texts.
    """
    made = any(step["type"] == "fork" and step["name"] == join["fork"] for s in lanes.values() for step in s)
    if not made and join.get("mode") == "concate_and_append":
        raise SessionExpiredError("the program waited too long before it joined its branches", "session")
    return not made
