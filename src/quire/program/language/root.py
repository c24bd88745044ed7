"""One run of a program: what it has to send, and the engine that it is sent to."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any, Protocol

from quire.errors import QuireError, SessionExpiredError
from quire.program.frames import Frames
from quire.program.language.operations import Value
from quire.program.language.pending import PendingLane
from quire.program.language.symbols import Trace


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


class Root:
    """Sends operations when a value is needed, and at the end. With `trace`, values are only known at the end."""

    def __init__(
        self, backend: Backend, sampling: Mapping[str, Any], stream: bool, trace: Trace | None
    ) -> None:
        self.backend, self.sampling, self.stream, self.trace = backend, sampling, stream, trace
        self.changed = threading.Condition(threading.RLock())
        self.error: Exception | None = None
        self.finished = False
        self.lanes: list[PendingLane] = []
        self.first = self.new_lane(None, "")
        self._names = itertools.count()
        self._session: str | None = None
        self._sending = threading.RLock()
        self._complete = False

    def new_lane(self, parent: PendingLane | None, place: str) -> PendingLane:
        """Make the first lane, or a branch of `parent`; `place` is the name of the fork and the branch's number."""
        lane = PendingLane(self, parent, place)
        self.lanes.append(lane)
        return lane

    def lane_at(self, path: str) -> PendingLane:
        return next(lane for lane in self.lanes if lane.path == path)

    def traced(self) -> None:
        """Note that the trace is complete: all operations are known, and the next request is the last."""
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
            if self.error is None:
                self._send(last)
            elif last:
                self._end_session()
            for lane in self.lanes:
                if self.error is not None:
                    lane.take_steps()
                lane.apply()
            with self.changed:
                self.finished = last
                self.changed.notify_all()

    def _send(self, last: bool) -> None:
        lanes = {lane.path: lane.take_steps() for lane in self.lanes if lane.is_sent}
        lanes = {path: steps for path, steps in lanes.items() if steps}
        if not lanes:
            if last:
                self._end_session()
            return
        body = {"steps": lanes.pop("", []), "lanes": lanes, "keep": not last}
        if self._session is not None:
            body["session"] = self._session
        try:
            self._attempt(body)
        except SessionExpiredError:
            try:
                self._attempt(self._anew(body))
            except SessionExpiredError as error:
                self.error = error

    def _attempt(self, body: Mapping[str, Any]) -> None:
        """Run a request and take in its events."""
        values = {(lane.path, i): value for lane in self.lanes for i, value in enumerate(lane.values())}
        whole = {**body, "sampling": self.sampling, "stream": self.stream}
        try:
            for event in self.backend.run_program(whole):
                self._take(event, values)
        except SessionExpiredError:
            raise
        except QuireError as error:
            self.error = error

    def _end_session(self) -> None:
        """Let the engine forget the state that it keeps; after an error it may have done so."""
        session, self._session = self._session, None
        if session is not None:
            with suppress(QuireError):
                self.backend.end_session(session)

    def _take(self, event: dict[str, Any], values: Mapping[tuple[str, int], Value]) -> None:
        if event["event"] == "done":
            self._session = event["session"]
            return
        value = values[event["lane"], event["step"]]
        with self.changed:
            if event["event"] == "text" and event["index"] == 0:
                value.chunks.append(event["text"])
            elif event["event"] == "end":
                value.result = event
            self.changed.notify_all()

    def _anew(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Make the same request for an engine that has forgotten the session: every lane begins with its whole text."""
        steps = {"": body["steps"], **body["lanes"]}
        name, branches = self.new_name(), []
        paths = [(lane, lane.path) for lane in self.lanes if lane.was_sent]  # before any of them moves
        for lane, path in paths:
            if lane.closed and path not in steps:
                continue
            rest = [step for step in steps.get(path, []) if step["type"] != "join" or not _old(step, steps)]
            branches.append([{"type": "text", "text": lane.text}, *rest])
            lane.moved_to = f"{name}.{len(branches) - 1}"
        return {"steps": [{"type": "fork", "name": name, "branches": branches}], "keep": body["keep"]}

    def fail(self, error: Exception) -> None:
        """End the program: everything that waits is dropped."""
        with self.changed:
            self.error = self.error or error
            self.changed.notify_all()


def _old(join: dict[str, Any], steps: Mapping[str, list[dict[str, Any]]]) -> bool:
    """Tell whether a join is of lanes from an earlier request, which are lanes of their own now.

    Raises SessionExpiredError if it would append their texts.
    """
    made = any(
        step["type"] == "fork" and step["name"] == join["fork"] for lane in steps.values() for step in lane
    )
    if not made and join["mode"] == "concate_and_append":
        raise SessionExpiredError("the program waited too long before it joined its branches", "session")
    return not made
