"""Runs the steps of a program. What a model does is behind `Caller`, so any engine can stand in for it.

Each step means what it means in SGLang's interpreter (0.5.23): each gen continues the whole text so far.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from quire.program.lane import Lane, StepError
from quire.program.selection import Decision
from quire.program.tasks import Signal, Tasks
from quire.steps import (
    AnyStep,
    Compute,
    Event,
    Fork,
    Gen,
    If,
    InRole,
    Insert,
    Join,
    Program,
    Reasoning,
    Repeat,
    Select,
    Text,
)
from quire.text.formats.registry import reasoning_format
from quire.text.output.parser import parse

Counts = tuple[int, int, int]  # tokens of the prompt, those found in the cache, generated ones


@dataclass(slots=True)
class Result:
    """The texts of a gen's samples, why the first ended, and its figures."""

    values: list[str]
    finish_reason: str
    counts: Counts
    meta_info: dict[str, Any] | None = None


class Caller(Protocol):
    """The model as steps use it. Each method raises StepError if it fails."""

    async def generate(self, text: str, gen: Gen, show: Callable[[int, str], None]) -> Result:
        """Continue `text`; `show` takes new text of a sample as it comes."""
        ...

    async def choose(self, text: str, select: Select, alone: bool) -> tuple[Decision, Counts]:
        """Choose the likeliest choice after `text`. `alone`: much text is new, so one choice goes before others."""
        ...

    async def compute(self, text: str) -> None:
        """Make `text` a cached prefix."""
        ...


class Interpreter:
    """Runs calls on the lanes of one program. `longest` bounds the text of a lane, in characters."""

    def __init__(self, longest: int, lanes: dict[str, Lane] | None = None) -> None:
        self.lanes = {"": Lane(longest=longest)} if lanes is None else lanes
        self._ends: dict[str, Signal[None]] = {}  # of lanes that run

    async def run(
        self, program: Program, tasks: Tasks, caller: Caller, report: Callable[[Event], None]
    ) -> None:
        """Run the steps of a call to their end. Raises StepError."""
        self._tasks, self._caller, self._report, self._stream = tasks, caller, report, program.stream
        self._ends = {}
        for path in program.lanes:
            if path not in self.lanes or self.lanes[path].joined:
                raise StepError(f"there is no lane {path!r}: its fork was not made, or was joined")
        for path, steps in program.lanes.items():
            self.lanes[path].num_begun = 0
            self._start(self.lanes[path], steps)
        while self._ends:
            await next(iter(self._ends.values()))
        first = self.lanes[""]
        self._report(Event("done", text=first.text, value=dict(first.variables)))

    def live_lanes(self) -> dict[str, Lane]:
        """Return the lanes that later calls may go on with."""
        return {path: lane for path, lane in self.lanes.items() if not lane.joined}

    def _start(self, lane: Lane, steps: Sequence[AnyStep]) -> None:
        lane.running = True
        self._ends[lane.path] = self._tasks.start(self._whole(lane, steps))

    async def _whole(self, lane: Lane, steps: Sequence[AnyStep]) -> None:
        await self._steps(lane, steps)
        lane.running = False
        for signal in lane.waited.values():
            signal.set(None)
        lane.waited = {}
        del self._ends[lane.path]

    async def _steps(self, lane: Lane, steps: Sequence[AnyStep]) -> None:
        for step in steps:
            await self._tasks
            await self._step(lane, step)

    async def _step(self, lane: Lane, step: AnyStep) -> None:
        if isinstance(step, Text):
            lane.append(step.text)
        elif isinstance(step, (Gen, Select)):
            await self._call(lane, step)
        elif isinstance(step, Insert):
            lane.append(await self._value(lane, step))
        elif isinstance(step, Compute):
            await self._compute(lane)
        elif isinstance(step, Fork):
            await self._fork(lane, step)
        elif isinstance(step, Join):
            await self._join(lane, step)
        elif isinstance(step, Repeat):
            for _ in range(step.times):
                await self._steps(lane, step.steps)
                if step.until is not None and step.until.holds(self._text_of(lane, step.until.variable)):
                    break
        elif isinstance(step, If):
            holds = step.condition.holds(self._text_of(lane, step.condition.variable))
            await self._steps(lane, step.then if holds else step.otherwise)
        elif isinstance(step, Reasoning):
            await self._reason(lane, step)
        else:
            assert isinstance(step, InRole)
            raise StepError("a role was not replaced by its text")

    # --- what makes text

    async def _call(self, lane: Lane, step: Gen | Select) -> None:
        """Let the model continue the text, or choose."""
        number, lane.num_begun = lane.num_begun, lane.num_begun + 1
        end = Event("end", lane.path, number, step.name)
        if self._stream:
            self._report(Event("start", lane.path, number, step.name))
        if isinstance(step, Select):
            decision, end.usage = await self._caller.choose(lane.text, step, lane.has_much_new)
            end.value, end.finish_reason = step.choices[decision.index], "stop"
            end.meta_info = decision.meta_info
        else:
            await self._generate(lane, step, end)
        lane.known = len(lane.text)
        lane.take(end.name, end.value, end.reasoning)
        self._report(end)

    async def _generate(self, lane: Lane, gen: Gen, end: Event) -> None:
        def show(index: int, text: str) -> None:
            if self._stream:
                self._report(Event("text", lane.path, end.step, gen.name, index, text))

        result = await self._caller.generate(lane.text, gen, show)
        end.finish_reason, end.usage, end.meta_info = result.finish_reason, result.counts, result.meta_info
        values = result.values
        if lane.reasoning is not None:
            parts = [parse(value, None, lane.reasoning) for value in values]
            values = [part.content.strip() for part in parts]
            end.reasoning = parts[0].reasoning.strip()
        end.value = values if (gen.n or 1) > 1 else values[0]

    async def _reason(self, lane: Lane, step: Reasoning) -> None:
        lane.reasoning = reasoning_format(step.model_type.replace("-", "_"))
        await self._steps(lane, step.steps)
        lane.reasoning = None

    # --- variables

    async def _value(self, lane: Lane, step: Insert) -> str:
        source = lane if step.lane is None else self.lanes.get(step.lane)
        if source is None:
            raise StepError(f"there is no lane {step.lane!r}")
        if step.name not in source.variables and source is not lane and source.running:
            await source.waited.setdefault(step.name, Signal(self._tasks))
        value = self._variable(source, step.name)
        if step.index is not None:
            if isinstance(value, str) or step.index >= len(value):
                raise StepError(f"variable {step.name!r} has no item {step.index}")
            value = value[step.index]
        if not isinstance(value, str):
            raise StepError(f"variable {step.name!r} is a list: give the index of the item")
        return value

    def _variable(self, lane: Lane, name: str) -> Any:
        if name not in lane.variables:
            raise StepError(f"variable {name!r} has no value in lane {lane.path!r}")
        return lane.variables[name]

    def _text_of(self, lane: Lane, name: str) -> str:
        value = self._variable(lane, name)
        return str(value if isinstance(value, str) else value[0])

    # --- lanes

    async def _compute(self, lane: Lane) -> None:
        if lane.text and lane.known < len(lane.text):
            await self._caller.compute(lane.text)
            lane.known = len(lane.text)

    async def _fork(self, lane: Lane, step: Fork) -> None:
        """Start the branches. If much of the text is new, it is computed before, once, so that they share it."""
        if any(not one.joined for one in lane.forks.get(step.name, ())):
            raise StepError(f"fork {step.name!r} was not joined: join it first, or name this one otherwise")
        if len(step.branches) > 1 and lane.has_much_new:
            await self._compute(lane)
        prefix = f"{lane.path}/{step.name}" if lane.path else step.name
        children = [lane.fork(f"{prefix}.{number}") for number in range(len(step.branches))]
        lane.forks[step.name] = children
        for child, steps in zip(children, step.branches, strict=True):
            self.lanes[child.path] = child
            self._start(child, steps)

    async def _join(self, lane: Lane, step: Join) -> None:
        children = lane.forks.get(step.fork)
        if not children or children[0].joined:
            raise StepError(f"there is no fork {step.fork!r} to join")
        for child in children:
            while child.path in self._ends:
                await self._ends[child.path]
            child.joined = True
        if step.mode == "concate_and_append":
            lane.join_texts(children)
        elif step.mode == "branch":
            chosen = children[self._number(lane, step, len(children))]
            lane.text, lane.known = chosen.text, chosen.known
            for name, value in chosen.variables.items():
                lane.assign(name, value)
        else:
            lane.join_variables(children)

    def _number(self, lane: Lane, step: Join, count: int) -> int:
        given: Any = step.branch
        if isinstance(given, str):
            text = self._text_of(lane, given).strip()
            given = int(text) if text.isdecimal() and len(text) < 5 else -1
        if given is None or not 0 <= given < count:
            raise StepError(f"join: branch must be from 0 to {count - 1}, got {step.branch!r}")
        return int(given)
