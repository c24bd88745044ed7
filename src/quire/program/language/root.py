"""One run of a program: what it has to send, and the engine that it is sent to."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from quire.errors import ProgramError, QuireError, RequestError, SessionExpiredError
from quire.program.frames import Frames
from quire.program.interpreter import Interpreter
from quire.program.lane import Lane
from quire.program.language.symbols import Trace
from quire.program.tasks import Signal, Tasks
from quire.steps import AnyStep, Fork, Gen, Reasoning, Select, Step

Local = Callable[["MirrorLane"], None]
"""An effect that the engine does not need to know."""


@dataclass(eq=False)
class MirrorLane(Lane):
    """A lane in Python. `pieces` are its texts as they come, with the name of the gen or select that made them."""

    pieces: list[tuple[str | None, str]] = field(default_factory=list)
    meta_info: dict[str | None, Any] = field(default_factory=dict)
    messages: list[dict[str, Any]] = field(default_factory=list)
    message_start: int = 0
    scopes: list[int] = field(default_factory=list)
    error: Exception | None = None

    def fork(self, path: str) -> MirrorLane:
        """Make a lane that begins with what this one has, its messages included."""
        child = super().fork(path)
        child.messages, child.message_start = list(self.messages), self.message_start
        return child

    def begin_message(self, default: str | None) -> None:
        """Begin a message here; `default` is a system message that the template put before it."""
        if default is not None:
            self.messages.append({"role": "system", "content": default})
        self.message_start = len(self.text)

    def end_message(self, role: str) -> None:
        self.messages.append({"role": role, "content": self.text[self.message_start :].lstrip()})

    def begin_scope(self) -> None:
        self.scopes.append(len(self.text))

    def end_scope(self, name: str) -> None:
        """Assign the text since the begin to a variable."""
        self.assign(name, self.text[self.scopes.pop() :])

    def fail(self, error: Exception) -> None:
        raise error


class Mirror(Interpreter):
    """Runs steps and local effects as `take` brings the events of a call; a lane that fails keeps its error."""

    def __init__(self, first: MirrorLane) -> None:
        super().__init__(first.longest, {"": first})
        self._tasks = Tasks()
        self._open: dict[tuple[str, int], tuple[MirrorLane, str | None, Signal[Mapping[str, Any]]]] = {}
        self._streamed: set[tuple[str, int]] = set()
        self._runs = False

    def begin(self, lanes: Iterable[tuple[MirrorLane, Sequence[Any]]]) -> None:
        """Start the steps of a call, unless it has begun."""
        if not self._runs:
            self._runs, self._ends = True, {}
            for lane, steps in lanes:
                lane.num_begun = 0
                self._start(lane, steps)
            self._tasks.run()

    def take(self, event: Mapping[str, Any]) -> None:
        """Take an event of a gen or select. One that failed has no value: `end` says why."""
        key = event["lane"], event["step"]
        lane, name, done = self._open.get(key, (None, None, None))
        if lane is None or done is None:
            return  # the lane has failed here
        if event["event"] == "text" and event["index"] == 0 and lane.reasoning is None:
            self._streamed.add(key)
            lane.pieces.append((name, event["text"]))
        elif event["event"] == "end" and event["value"] is not None:
            done.set(event)
            self._tasks.run()

    def end(self, error: Exception | None) -> None:
        """End the call; `error` is why lanes have not come to their end."""
        self._tasks.close()
        for lane in self.lanes.values():
            if lane.running and isinstance(lane, MirrorLane):
                lane.running, lane.waited = False, {}
                lane.error = lane.error or error or ProgramError("the program ended before this step")
        self._open, self._streamed, self._runs = {}, set(), False

    async def _step(self, lane: Lane, step: AnyStep | Local) -> None:
        assert isinstance(lane, MirrorLane)
        if lane.error is not None:
            return
        before = len(lane.text)
        try:
            if isinstance(step, Step):
                await super()._step(lane, step)
            else:
                step(lane)
        except Exception as error:
            lane.error = error
        if not isinstance(step, (Gen, Select, Reasoning)):
            lane.pieces.append((None, lane.text[before:]))

    async def _call(self, lane: Lane, step: Gen | Select) -> None:
        assert isinstance(lane, MirrorLane)
        key, lane.num_begun = (lane.path, lane.num_begun), lane.num_begun + 1
        done: Signal[Mapping[str, Any]] = Signal(self._tasks)
        self._open[key] = lane, step.name, done
        end, before = await done, len(lane.text)
        lane.take(step.name, end["value"], end.get("reasoning"))
        if step.name is None:  # as in SGLang, None names the last value without a name
            lane.variables[None] = end["value"]
        lane.meta_info[step.name] = end["meta_info"]
        if key not in self._streamed:
            lane.pieces.append((step.name, lane.text[before:]))

    async def _compute(self, lane: Lane) -> None:
        lane.known = len(lane.text)


def sendable(steps: Iterable[Any]) -> list[dict[str, Any]]:
    """Return the steps for the engine as JSON, without local effects. RequestError: a value is no JSON."""
    found: list[dict[str, Any]] = []
    for step in steps:
        if isinstance(step, Fork):
            branches = [sendable(branch) for branch in step.branches]
            found.append({"type": "fork", "name": step.name, "branches": branches})
        elif isinstance(step, Step):
            try:
                found.append(msgspec.to_builtins(step))
            except TypeError as error:
                raise RequestError(f"the program is malformed: {error}", "steps") from error
    return found


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
