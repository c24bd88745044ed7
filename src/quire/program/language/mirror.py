"""What the engine makes of a program, made again in Python: its interpreter, over the values that it reports."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from quire.errors import ProgramError, RequestError
from quire.program.interpreter import Interpreter
from quire.program.lane import Lane
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
