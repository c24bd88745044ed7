"""The state `s` that the code of a program works on, and groups of forked states. Names are SGLang's."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

from msgspec.structs import replace

from quire.program.language.expressions import Call, Expression, RoleMark, Separated, parts_of
from quire.program.language.root import LIST, OWN, TEXT, Branch, Root
from quire.program.language.symbols import Symbol
from quire.steps import AnyStep, Fork, Gen, Insert, Join, Reasoning, Select, Text

JOIN_MODES = ("gather_variable", "concate_and_append")


class State:
    """Text, variables and messages of a program. What is appended runs when a value is needed, or at the end.

    Then everything that all states of the program have appended runs in one request, forks beside each other.
    """

    def __init__(self, lane: Branch) -> None:
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
        elif isinstance(part, Expression) and part.error is not None:
            lane.fail(part.error)
        elif isinstance(part, Separated):
            inside: list[AnyStep] = [self._step(one) for one in part.parts]
            for one in inside:
                if isinstance(one, (Gen, Select)):
                    lane.assign(f"{one.name}_reasoning_content", TEXT)
            lane.add(Reasoning(steps=inside, model_type=part.model_type))
        elif isinstance(part, Expression) or part:
            lane.add(self._step(part))

    def _step(self, part: str | Expression) -> Text | Insert | Gen | Select:
        if isinstance(part, str):
            return Text(text=part)
        if isinstance(part, Symbol):
            return part.use(self._lane)
        assert isinstance(part, Call)
        step = part.step
        several = isinstance(step, Gen) and (step.n or 1) > 1
        self._lane.assign(step.name, LIST if several else TEXT)
        ends = self._root.backend.role_frames().stop if self._lane.role is not None else ()
        if not ends or isinstance(step, Select):
            return step
        stop = step.stop or self._root.sampling.get("stop") or []  # the chat template ends the message
        return replace(step, stop=[*([stop] if isinstance(stop, str) else stop), *ends])

    def _mark(self, mark: RoleMark) -> None:
        """Begin or end a message."""
        lane, frames, role = self._lane, self._root.backend.role_frames(), mark.role
        if mark.begins == (lane.role is not None):
            lane.fail(AssertionError("roles do not nest: end one message before the next"))
        elif mark.begins:
            first, lane.role, lane.has_message = not lane.has_message, role, True
            default = frames.default_system if first and role != "system" else None
            lane.add(Text(text=frames.begin(role, first)))
            lane.add(lambda live: live.begin_message(default))
        else:
            lane.role = None
            lane.add(lambda live: live.end_message(role))
            lane.add(Text(text=frames.around[role][1]))

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
        self._lane.add(lambda live: live.begin_scope())
        yield
        self._lane.assign(name, OWN)
        self._lane.add(lambda live: live.end_scope(name))

    # --- forks

    def fork(self, size: int = 1, position_ids_offset: list[int] | None = None) -> Group:
        """`size` states that go on from here beside each other. They share what was computed so far."""
        lane = self._lane
        name = self._root.new_name()
        lanes = [Branch(self._root, lane, f"{name}.{number}") for number in range(size)]
        self._root.lanes += lanes
        lane.add(Fork(name=name, branches=[one.steps for one in lanes]))
        return Group(self, name, [State(one) for one in lanes])

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
        return name in self._lane.live.variables

    def get_var(self, name: str) -> Any:
        """Return the value of a variable, once it has one. KeyError if there is none."""
        lane, trace = self._lane, self._root.trace
        if trace is not None:
            kind = lane.kinds.get(name)
            if kind is None:
                raise KeyError(name)
            if kind == OWN:
                trace.give_up()
            return Symbol(trace, lane, name, kind == LIST)
        if (name in lane.assigned or name not in lane.live.variables) and not self._root.finished:
            self._root.send()
        if name not in lane.live.variables:
            raise KeyError(name) from lane.error
        return lane.live.variables[name]

    def set_var(self, name: str, value: Any) -> None:
        """Assign a variable."""
        if isinstance(value, Symbol):
            value.trace.give_up()
        self._lane.assign(name, OWN)
        self._lane.add(lambda live: live.assign(name, value))

    def get_meta_info(self, name: str) -> dict[str, Any] | None:
        """Return the figures of the gen or select that assigned `name`."""
        self._settle()
        found: dict[str, Any] | None = self._lane.live.meta_info.get(name)
        return found

    def text(self) -> str:
        """Return the text so far."""
        self._settle()
        return self._lane.live.text

    def messages(self) -> list[dict[str, Any]]:
        """Return the messages that have ended so far."""
        self._settle()
        return self._lane.live.messages

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
        place, ended = 0, False
        while not ended:
            new, ended = self._pieces(place)
            place += len(new)
            yield from (text for name, text in new if text and var_name in (None, name))

    def _pieces(self, place: int) -> tuple[list[tuple[str | None, str]], bool]:
        """Wait for the texts from the `place`-th on; says whether they are the last."""
        root, lane = self._root, self._lane
        with root.changed:
            root.changed.wait_for(lambda: place < len(lane.live.pieces) or root.finished)
            return lane.live.pieces[place:], root.finished

    async def text_async_iter(
        self, var_name: str | None = None, return_meta_data: bool = False
    ) -> AsyncIterator[Any]:
        """As `text_iter`. With `return_meta_data`, pairs of the text and the figures of `var_name`."""
        texts = self.text_iter(var_name)
        while (text := await asyncio.to_thread(next, texts, None)) is not None:
            if return_meta_data:
                yield text, self._lane.live.meta_info.get(var_name)
            else:
                yield text


class Group:
    """States that were forked from one."""

    def __init__(self, parent: State, name: str, states: list[State]) -> None:
        self._parent, self._name, self._states = parent, name, states

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
        lane = self._parent._lane
        for state in self._states:
            state._lane.closed = True
            for name in state._lane.assigned if mode == "gather_variable" else ():
                if name not in lane.kinds:
                    lane.assign(name, LIST)
        lane.add(Join(fork=self._name, mode=mode))  # type: ignore[arg-type]
