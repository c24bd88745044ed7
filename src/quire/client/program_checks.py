"""Check a program before it runs: its size, and steps that would fail."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from quire.errors import ConfigError, RequestError
from quire.steps import AnyStep, Fork, Gen, If, Insert, Join, Reasoning, Repeat, Select, inner, walk
from quire.text.formats.registry import reasoning_format

DEFAULT_MAX_TOKENS = 128  # of a gen, as in SGLang
MAX_STEPS = 4096  # that a call runs, repeated ones counted each time
MAX_LANES = 256
MAX_DEPTH = 8
MAX_TOKENS = 1 << 20  # that a call may generate
MAX_CHOICES = 4096  # that a call may score


@dataclass(slots=True)
class _Size:
    """What a list of steps may do at most."""

    steps: int = 0
    lanes: int = 0
    tokens: int = 0
    choices: int = 0

    def add(self, other: _Size, times: int = 1) -> None:
        self.steps += times * other.steps
        self.lanes += times * other.lanes
        self.tokens += times * other.tokens
        self.choices += times * other.choices


def check_size(lanes: Mapping[str, Sequence[AnyStep]], defaults: Gen) -> None:
    """Raise RequestError for a program that may do too much. `defaults` are its gens' defaults."""
    whole = _Size(lanes=len(lanes))
    for steps in lanes.values():
        whole.add(_size(steps, defaults, 0))
    for what, count, most in (
        ("steps", whole.steps, MAX_STEPS),
        ("lanes", whole.lanes, MAX_LANES),
        ("tokens", whole.tokens, MAX_TOKENS),
        ("choices", whole.choices, MAX_CHOICES),
    ):
        if count > most:
            raise RequestError(
                f"the program may run {count} {what}, the most is {most}: make it smaller", "steps"
            )


def _size(steps: Sequence[AnyStep], defaults: Gen, depth: int) -> _Size:
    if depth > MAX_DEPTH:
        raise RequestError(f"steps are nested more than {MAX_DEPTH} deep: make the program flatter", "steps")
    found = _Size(steps=len(steps))
    for step in steps:
        if isinstance(step, Gen):
            most = step.max_tokens or defaults.max_tokens or DEFAULT_MAX_TOKENS
            found.tokens += (step.n or defaults.n or 1) * most
        elif isinstance(step, Select):
            found.choices += len(step.choices)
        elif isinstance(step, Fork):
            found.lanes += len(step.branches)
        for part in inner(step):
            found.add(_size(part, defaults, depth + 1), step.times if isinstance(step, Repeat) else 1)
    return found


@dataclass(slots=True)
class _Known:
    """The variables that a lane may have at a step, and that the branches of its forks may have."""

    variables: set[str] = field(default_factory=set)
    forks: dict[str, set[str]] = field(default_factory=dict)


def check_lane(steps: Sequence[AnyStep], fresh: bool) -> None:
    """Raise RequestError for a step that cannot be done.

    In a `fresh` program, that is also one that needs a variable or a fork that no step before makes.
    """
    _check(steps, _Known(), fresh)


def _check(steps: Sequence[AnyStep], known: _Known, fresh: bool) -> None:
    for step in steps:
        if fresh:
            _check_names(step, known)
        if isinstance(step, (Gen, Select)) and step.name is not None:
            known.variables |= {step.name, f"{step.name}_reasoning_content"}
        elif isinstance(step, Join):
            if step.mode == "branch" and step.branch is None:
                raise RequestError('join: mode "branch" needs branch, a number or a variable', "steps")
            if step.mode != "concate_and_append":
                known.variables |= known.forks.get(step.fork, set())
        elif isinstance(step, Reasoning):
            _check_reasoning(step)
        if isinstance(step, Fork):
            known.forks[step.name] = set()
            for branch in step.branches:
                inside = _Known(set(known.variables))
                _check(branch, inside, fresh)
                known.forks[step.name] |= inside.variables
            continue
        for part in inner(step):
            _check(part, known, fresh)
        if fresh and isinstance(step, Repeat) and step.until is not None:
            _need("repeat", step.until.variable, known)


def _check_names(step: AnyStep, known: _Known) -> None:
    if isinstance(step, Insert) and step.lane is None:
        _need("insert", step.name, known)
    elif isinstance(step, If):
        _need("if", step.condition.variable, known)
    elif isinstance(step, Join):
        if step.fork not in known.forks:
            raise RequestError(f"join: no fork {step.fork!r} before it", "steps")
        if isinstance(step.branch, str):
            _need("join", step.branch, known)


def _need(what: str, variable: str, known: _Known) -> None:
    if variable not in known.variables:
        raise RequestError(f"{what}: no step before assigns variable {variable!r}", "steps")


def _check_reasoning(step: Reasoning) -> None:
    try:
        reasoning_format(step.model_type.replace("-", "_"))
    except ConfigError as error:
        raise RequestError(f"separate_reasoning: {error}", "steps") from error
    for part in walk(step.steps):
        if isinstance(part, Gen) and part.name is None:
            raise RequestError("separate_reasoning: each gen inside needs a name", "steps")
