"""Operations of a state, in order: each has steps for the engine, and repeats its effect on the state's lane."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from quire.errors import ProgramError
from quire.program.language.symbols import Symbol

if TYPE_CHECKING:
    from quire.program.language.pending import PendingLane


class Operation:
    """One operation; most have no step."""

    def steps(self) -> list[dict[str, Any]]:
        """Return the steps for the engine."""
        return []

    def apply(self, lane: PendingLane) -> None:
        """Repeat the effect on the lane, once the engine has run the steps. Raises what went wrong."""


class AddText(Operation):
    def __init__(self, text: str) -> None:
        self.text = text

    def steps(self) -> list[dict[str, Any]]:
        return [{"type": "text", "text": self.text}] if self.text else []

    def apply(self, lane: PendingLane) -> None:
        lane.append(self.text)


class Value(Operation):
    """A gen or select. `chunks` grow while it streams; `result` is its "end" event."""

    def __init__(self, step: dict[str, Any]) -> None:
        self.step = step
        self.name: str | None = step.get("name")
        self.chunks: list[str] = []
        self.result: dict[str, Any] | None = None

    def steps(self) -> list[dict[str, Any]]:
        return [self.step]

    def apply(self, lane: PendingLane) -> None:
        if self.result is None or self.result["value"] is None:
            raise lane.root.error or ProgramError("the program ended before this step")
        lane.take(self.name, self.result["value"], self.result.get("reasoning"))
        if self.name is None:  # as in SGLang, None names the last value without a name
            lane.variables[None] = self.result["value"]
        lane.meta_info[self.name] = self.result["meta_info"]


class Separate(Operation):
    """Values that are split into reasoning and answer."""

    def __init__(self, inner: list[Operation], model_type: str | None) -> None:
        self.inner, self.model_type = inner, model_type

    def steps(self) -> list[dict[str, Any]]:
        inside = [step for one in self.inner for step in one.steps()]
        return [{"type": "separate_reasoning", "model_type": self.model_type, "steps": inside}]

    def apply(self, lane: PendingLane) -> None:
        for one in self.inner:
            one.apply(lane)


class AddSymbol(Operation):
    """A value that only the engine knows when the program is sent."""

    def __init__(self, symbol: Symbol, lane: PendingLane) -> None:
        self.symbol, self.source = symbol, lane

    def steps(self) -> list[dict[str, Any]]:
        symbol = self.symbol
        step: dict[str, Any] = {"type": "insert", "name": symbol.name, "lane": symbol.lane}
        return [step if symbol.index is None else {**step, "index": symbol.index}]

    def apply(self, lane: PendingLane) -> None:
        value = self.source.variables[self.symbol.name]
        lane.append(value if self.symbol.index is None else value[self.symbol.index])


class SetVariable(Operation):
    """A value that the program itself assigns."""

    def __init__(self, name: str, value: Any) -> None:
        self.name, self.value = name, value

    def apply(self, lane: PendingLane) -> None:
        lane.assign(self.name, self.value)


class BeginMessage(Operation):
    def __init__(self, role: str, default: str | None) -> None:
        self.role, self.default = role, default

    def apply(self, lane: PendingLane) -> None:
        if self.default is not None:
            lane.messages.append({"role": "system", "content": self.default})
        lane.role_start = len(lane.text)


class EndMessage(Operation):
    def __init__(self, role: str) -> None:
        self.role = role

    def apply(self, lane: PendingLane) -> None:
        lane.messages.append({"role": self.role, "content": lane.text[lane.role_start :].lstrip()})


class BeginScope(Operation):
    def apply(self, lane: PendingLane) -> None:
        lane.scopes.append(len(lane.text))


class EndScope(Operation):
    """The text since the begin becomes a variable."""

    def __init__(self, name: str) -> None:
        self.name = name

    def apply(self, lane: PendingLane) -> None:
        lane.assign(self.name, lane.text[lane.scopes.pop() :])


class ForkLanes(Operation):
    def __init__(self, name: str, lanes: list[PendingLane]) -> None:
        self.name, self.lanes = name, lanes

    def steps(self) -> list[dict[str, Any]]:
        branches = [lane.take_steps() for lane in self.lanes]
        return [{"type": "fork", "name": self.name, "branches": branches}]

    def apply(self, lane: PendingLane) -> None:
        for child in self.lanes:
            child.fork_from(lane)
            child.apply()


class JoinLanes(Operation):
    def __init__(self, fork: ForkLanes, mode: str) -> None:
        self.fork, self.mode = fork, mode

    def steps(self) -> list[dict[str, Any]]:
        return [{"type": "join", "fork": self.fork.name, "mode": self.mode}]

    def apply(self, lane: PendingLane) -> None:
        children = self.fork.lanes
        for child in children:
            child.apply()
        failed = [child.error for child in children if child.error is not None]
        if failed and lane.root.error is not None:
            raise failed[0]
        if self.mode == "concate_and_append":
            lane.join_texts(children)
        else:
            lane.join_variables(children)


class Fail(Operation):
    """An operation that cannot be done; it is seen when it would run."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def apply(self, lane: PendingLane) -> None:
        raise self.error
