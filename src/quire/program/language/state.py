"""The state `s` that the code of a program works on, and groups of forked states. Names are SGLang's."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

from quire.program.language.expressions import Call, Expression, RoleMark, Separated, parts_of
from quire.program.language.operations import (
    AddSymbol,
    AddText,
    BeginMessage,
    BeginScope,
    EndMessage,
    EndScope,
    Fail,
    ForkLanes,
    JoinLanes,
    Operation,
    Separate,
    SetVariable,
    Value,
)
from quire.program.language.pending import LIST, OWN, PendingLane
from quire.program.language.root import Root
from quire.program.language.symbols import Symbol

JOIN_MODES = ("gather_variable", "concate_and_append")


class State:
    """Text, variables and messages of a program. What is appended runs when a value is needed, or at the end.

    Then everything that all states of the program have appended runs in one request, forks beside each other.
    """

    def __init__(self, lane: PendingLane) -> None:
        self._lane = lane
        self.ret_value: Any = None

    @property
    def _root(self) -> Root:
        return self._lane.root

    # --- what a program appends

    def __iadd__(self, other: Any) -> State:
        if other is None:
            raise ValueError("Tried to append None to state.")
        for part in parts_of(other):
            self._append(part)
        return self

    def _append(self, part: str | Expression) -> None:
        lane = self._lane
        if isinstance(part, RoleMark):
            self._mark(part)
        elif isinstance(part, Symbol):
            source = self._root.lane_at(part.lane)
            part.use(None if source is lane else source)
            lane.add(AddSymbol(part, source))
        else:
            lane.add(self._operation(part))

    def _operation(self, part: str | Expression) -> Operation:
        if isinstance(part, str):
            return AddText(part)
        if isinstance(part, Separated):
            if part.model_type is None:
                return Fail(ValueError("separate_reasoning: give model_type"))
            return Separate([self._operation(one) for one in parts_of(part.inner)], part.model_type)
        assert isinstance(part, Call)
        return Value(self._in_role(part.step)) if part.error is None else Fail(part.error)

    def _in_role(self, step: dict[str, Any]) -> dict[str, Any]:
        """Add to a gen in a message the stop where the chat template ends it."""
        ends = self._root.backend.role_frames().stop if self._lane.role is not None else ()
        if step["type"] != "gen" or not ends:
            return step
        stop = step.get("stop", self._root.sampling.get("stop")) or []
        return {**step, "stop": [*([stop] if isinstance(stop, str) else stop), *ends]}

    def _mark(self, mark: RoleMark) -> None:
        """Begin or end a message."""
        lane, frames = self._lane, self._root.backend.role_frames()
        if mark.begins == (lane.role is not None):
            lane.add(Fail(AssertionError("roles do not nest: end one message before the next")))
            return
        if mark.begins:
            first, lane.role = not lane.has_message, mark.role
            default = frames.default_system if first and mark.role != "system" else None
            lane.add(AddText(frames.begin(mark.role, first)))
            lane.add(BeginMessage(mark.role, default))
            lane.has_message = True
        else:
            lane.role = None
            lane.add(EndMessage(mark.role))
            lane.add(AddText(frames.around[mark.role][1]))

    def system(self, expression: Any = None) -> Any:
        """Append a message; without an expression, `with s.system():` frames what is appended inside."""
        return self._role("system", expression)

    def user(self, expression: Any = None) -> Any:
        """As `system`."""
        return self._role("user", expression)

    def assistant(self, expression: Any = None) -> Any:
        """As `system`."""
        return self._role("assistant", expression)

    def _role(self, role: str, expression: Any) -> Any:
        if expression is None:
            return self._inside(RoleMark(role, True), RoleMark(role, False))
        for part in (RoleMark(role, True), *parts_of(expression), RoleMark(role, False)):
            self._append(part)
        return None

    @contextmanager
    def _inside(self, begin: RoleMark, end: RoleMark) -> Iterator[None]:
        self._append(begin)
        yield
        self._append(end)

    @contextmanager
    def var_scope(self, name: str) -> Iterator[None]:
        """Make the text that is appended inside the variable `name`."""
        self._lane.add(BeginScope())
        yield
        self._lane.add(EndScope(name))
        self._lane.kinds[name] = OWN

    # --- forks

    def fork(self, size: int = 1, position_ids_offset: list[int] | None = None) -> Group:
        """`size` states that go on from here beside each other. They share what was computed so far."""
        lane = self._lane
        name = self._root.new_name()
        lanes = [self._root.new_lane(lane, f"{name}.{number}") for number in range(size)]
        fork = ForkLanes(name, lanes)
        lane.add(fork)
        return Group(self, fork, [State(one) for one in lanes])

    @contextmanager
    def copy(self, position_ids_offset: list[int] | None = None) -> Iterator[State]:
        """Fork one state, and join it at the end of the block."""
        group = self.fork(1)
        yield group[0]
        group.join()

    # --- what a program reads

    def __getitem__(self, name: str) -> Any:
        return self.get_var(name)

    def __setitem__(self, name: str, value: Any) -> None:
        self.set_var(name, value)

    def __contains__(self, name: str) -> bool:
        self._settle()
        return name in self._lane.variables

    def get_var(self, name: str) -> Any:
        """Return the value of a variable, once it has one. KeyError if there is none."""
        lane, trace = self._lane, self._root.trace
        if trace is not None:
            kind = lane.kinds.get(name)
            if kind is None:
                raise KeyError(name)
            if kind == OWN:
                trace.give_up()
            return Symbol(trace, lane.path, name, kind == LIST)
        if (name in lane.assigned or name not in lane.variables) and not self._root.finished:
            self._root.send()
        if name not in lane.variables:
            raise KeyError(name) from lane.error
        return lane.variables[name]

    def set_var(self, name: str, value: Any) -> None:
        """Assign a variable."""
        if isinstance(value, Symbol):
            value.trace.give_up()
        self._lane.add(SetVariable(name, value))

    def get_meta_info(self, name: str) -> dict[str, Any] | None:
        """Return the figures of the gen or select that assigned `name`."""
        self._settle()
        found: dict[str, Any] | None = self._lane.meta_info.get(name)
        return found

    def text(self) -> str:
        """Return the text so far."""
        self._settle()
        return self._lane.text

    def messages(self) -> list[dict[str, Any]]:
        """Return the messages that have ended so far."""
        self._settle()
        return self._lane.messages

    def sync(self) -> None:
        """Wait for everything that was appended."""
        self._settle()

    def error(self) -> Exception | None:
        """Return the error that ended the program early, if any."""
        self._settle()
        lane, root = self._lane, self._root
        return lane.error or (root.error if lane is root.first else None)

    def _settle(self) -> None:
        if self._root.trace is not None:
            self._root.trace.give_up()
        if not self._root.finished:
            self._root.send()

    # --- streams

    def text_iter(self, var_name: str | None = None) -> Iterator[str]:
        """New text as it comes, of the whole state or of one variable. Without stream=True it comes at once."""
        place = 0
        while (operation := self._next_operation(place)) is not None:
            place += 1
            if isinstance(operation, Separate):
                yield from self._separated(operation, var_name)
            elif isinstance(operation, Value) and var_name in (None, operation.name):
                yield from self._chunks(operation)
            elif isinstance(operation, AddText) and var_name is None and operation.text:
                yield operation.text
            elif isinstance(operation, AddSymbol) and var_name is None:
                yield self._symbol_text(operation)

    async def text_async_iter(
        self, var_name: str | None = None, return_meta_data: bool = False
    ) -> AsyncIterator[Any]:
        """As `text_iter`. With `return_meta_data`, pairs of the text and the figures of `var_name`."""
        texts = self.text_iter(var_name)
        while (text := await asyncio.to_thread(next, texts, None)) is not None:
            if return_meta_data:
                yield text, self._lane.meta_info.get(var_name)
            else:
                yield text

    def _next_operation(self, place: int) -> Operation | None:
        """Return the operation at `place`, once there is one; None at the end."""
        root, history = self._root, self._lane.history
        with root.changed:
            root.changed.wait_for(lambda: place < len(history) or root.finished)
            return history[place] if place < len(history) else None

    def _chunks(self, value: Value) -> Iterator[str]:
        root, shown, ended = self._root, 0, False
        while not ended:
            with root.changed:
                while not (len(value.chunks) > shown or value.result is not None or root.finished):
                    root.changed.wait()
                new, shown = value.chunks[shown:], len(value.chunks)
                ended = value.result is not None or root.finished
            yield from new
        if not shown and (whole := self._whole(value)):  # not streamed
            yield whole

    def _symbol_text(self, operation: AddSymbol) -> str:
        """Return the text of a symbol, once it has come; one of a list is known at the end."""
        root, symbol = self._root, operation.symbol
        values = [
            one for one in operation.source.history if isinstance(one, Value) and one.name == symbol.name
        ]
        if symbol.index is None and values:
            return self._whole(values[-1])
        with root.changed:
            root.changed.wait_for(lambda: root.finished)
        value = operation.source.variables.get(symbol.name, "")
        return str(value if symbol.index is None else value[symbol.index])

    def _separated(self, operation: Separate, var_name: str | None) -> Iterator[str]:
        """Yield texts, and answers of values that are split at their end."""
        for one in operation.inner:
            if isinstance(one, Value) and var_name in (None, one.name):
                yield self._whole(one)
            elif isinstance(one, AddText) and var_name is None:
                yield one.text

    def _whole(self, value: Value) -> str:
        """Return the first text of a value, once it has come."""
        root = self._root
        with root.changed:
            root.changed.wait_for(lambda: value.result is not None or root.finished)
        found = "" if value.result is None else value.result["value"] or ""
        return str(found[0] if isinstance(found, list) else found)


class Group:
    """States that were forked from one."""

    def __init__(self, parent: State, fork: ForkLanes, states: list[State]) -> None:
        self._parent, self._fork, self._states = parent, fork, states

    def __getitem__(self, number: int) -> State:
        return self._states[number]

    def __setitem__(self, number: int, state: State) -> None:
        """For `group[i] += ...`, which assigns the same state again."""
        assert self._states[number] is state

    def __iter__(self) -> Iterator[State]:
        return iter(self._states)

    def __iadd__(self, other: Any) -> Group:
        """Append to each state: the same expression, one of a list, or what a function of its number returns."""
        if callable(other):
            parts: list[Any] = [other(number) for number in range(len(self._states))]
        elif isinstance(other, Expression):
            parts = [other] * len(self._states)
        elif isinstance(other, (list, tuple)):
            parts = list(other)
        else:
            raise ValueError(f"Invalid value: {other}")
        for state, part in zip(self._states, parts, strict=True):
            state += part
        return self

    def join(self, mode: str = "gather_variable") -> None:
        """Wait for the states, which end. Their new variables become lists of the parent, or their texts its text."""
        if mode not in JOIN_MODES:
            raise ValueError(f"Invalid join mode: {mode}")
        for state in self._states:
            state._lane.closed = True
        self._parent._lane.add(JoinLanes(self._fork, mode))
