"""Lanes of a running program in Python: operations that wait, and what the engine answered."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from quire.program.lane import Lane
from quire.program.language.operations import (
    Fail,
    ForkLanes,
    JoinLanes,
    Operation,
    Separate,
    SetVariable,
    Value,
)

if TYPE_CHECKING:
    from quire.program.language.root import Root

LIST, TEXT, OWN = (
    "list",
    "text",
    "own",
)  # what a variable will hold: several texts, one, or a value of the program


class PendingLane(Lane):
    """`pending` operations were not sent yet. Text, variables and messages are those after the sent ones."""

    def __init__(self, root: Root, parent: PendingLane | None = None, place: str = "") -> None:
        super().__init__()
        self.root, self._parent, self._place = root, parent, place
        self.moved_to: str | None = None
        self.pending: list[Operation] = []
        self.history: list[Operation] = []  # all of them, for readers of a stream
        self.meta_info: dict[str | None, Any] = {}
        self.messages: list[dict[str, Any]] = []
        self.role_start = 0
        self.scopes: list[int] = []
        self.error: Exception | None = None
        self.closed = False  # joined
        self.is_sent = parent is None  # whether the engine knows the lane, or will by the request under way
        self.was_sent = parent is None  # before that request
        # What the operations will make, known before they run:
        self.kinds: dict[str | None, str] = {} if parent is None else dict(parent.kinds)
        self._first_kinds = frozenset(self.kinds)
        self.assigned: dict[str | None, int] = {}  # how often, by operations that were not applied
        self.role: str | None = None if parent is None else parent.role
        self.has_message: bool = parent is not None and parent.has_message
        self._sent: list[Operation] = []

    @property
    def path(self) -> str:
        """Name the lane as the engine does: its fork and branch, after its parent's path."""
        if self.moved_to is not None or self._parent is None:
            return self.moved_to or ""
        above = self._parent.path
        return f"{above}/{self._place}" if above else self._place

    def add(self, operation: Operation) -> None:
        """Do `operation` when the program is sent."""
        with self.root.changed:
            self.pending.append(operation)
            self.history.append(operation)
            self._note(operation)
            self.root.changed.notify_all()

    def _note(self, operation: Operation) -> None:
        if isinstance(operation, Value):
            self._assign(operation.name, LIST if (operation.step.get("n") or 1) > 1 else TEXT)
        elif isinstance(operation, Separate):
            for one in operation.inner:
                if isinstance(one, Value):
                    self._assign(one.name, TEXT)
                    self._assign(f"{one.name}_reasoning_content", TEXT)
        elif isinstance(operation, SetVariable):
            self._assign(operation.name, OWN)
        elif isinstance(operation, JoinLanes) and operation.mode == "gather_variable":
            for child in operation.fork.lanes:
                for name in child.assigned:
                    if name not in self.kinds:
                        self._assign(name, LIST)

    def _assign(self, name: str | None, kind: str) -> None:
        self.kinds[name] = kind
        self.assigned[name] = self.assigned.get(name, 0) + 1

    def assigns_once(self, name: str | None) -> bool:
        """Tell whether a variable has one value in this lane."""
        return self.assigned.get(name, 0) + (name in self._first_kinds) == 1

    def fork_from(self, parent: Lane) -> None:
        """Begin with what `parent` has at this point, its messages included."""
        super().fork_from(parent)
        assert isinstance(parent, PendingLane)
        self.messages, self.role_start = list(parent.messages), parent.role_start

    def take_steps(self) -> list[dict[str, Any]]:
        """Take the steps of the operations that wait, up to one that cannot be done; they count as sent."""
        steps: list[dict[str, Any]] = []
        self.is_sent = True
        for number, operation in enumerate(self.pending):
            if isinstance(operation, Fail):
                del self.pending[number + 1 :]
                break
            steps += operation.steps()
        self._sent, self.pending = self._sent + self.pending, []
        return steps

    def values(self) -> list[Value]:
        """List the gens and selects that were sent and not applied, in order."""
        found: list[Value] = []
        for operation in self._sent:
            if isinstance(operation, Value):
                found.append(operation)
            elif isinstance(operation, Separate):
                found += [one for one in operation.inner if isinstance(one, Value)]
        return found

    def apply(self) -> None:
        """Take in what was sent. After an error the rest is dropped."""
        sent, self._sent = self._sent, []
        self.was_sent, self.assigned = self.is_sent, {}
        for operation in sent:
            if self.error is not None:
                if isinstance(operation, ForkLanes):
                    for child in operation.lanes:
                        child.error = child.error or self.error
                continue
            try:
                operation.apply(self)
            except Exception as error:
                self.error = error
