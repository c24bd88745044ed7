"""Programs as data: steps that an engine runs on its own, and the events that it reports. Names are SGLang's.

A program runs on *lanes*. A lane has a text and variables; the first one is "". A fork named f makes the lanes "f.0",
"f.1", ... of "", and a fork g of lane "f.0" makes "f.0/g.0". All lanes run at the same time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

ChoicesMethod = Literal[
    "token_length_normalized", "greedy_token_selection", "unconditional_likelihood_normalized"
]
EXPIRED = "expired"
"""EXPIRED is the finish reason of the "done" event if the session is not there."""
FAILED = "failed"
"""FAILED is the finish reason of the "done" event if a step cannot be done."""
Role = Literal["system", "user", "assistant"]
Words = Annotated[str, Meta(max_length=1 << 20)]
Name = Annotated[str, Meta(min_length=1, max_length=64)]
Small = Annotated[int, Meta(ge=0, le=4096)]


class Step(msgspec.Struct, kw_only=True, tag_field="type", omit_defaults=True, forbid_unknown_fields=True):
    """One step of a lane."""


class Text(Step, tag="text"):
    """Append `text`."""

    text: Words


class Insert(Step, tag="insert"):
    """Append the value of a variable: of this lane, or of `lane`, once that has assigned it.

    `index` takes one of a list: a sample of n, or a branch of a joined fork.
    """

    name: Name
    lane: Annotated[str, Meta(max_length=1024)] | None = None
    index: Small | None = None


class Gen(Step, tag="gen"):
    """Continue the text, append the result and assign it to `name`. Fields left out have the program's defaults.

    With n > 1 the variable is a list, and the text goes on with its first item.
    """

    name: Name | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    n: Annotated[int, Meta(ge=1, le=64)] | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    ignore_eos: bool | None = None
    seed: int | None = None
    regex: str | None = None
    json_schema: str | dict[str, Any] | None = None
    return_logprob: bool | None = None
    logprob_start_len: int | None = None
    top_logprobs_num: int | None = None


class Select(Step, tag="select"):
    """Append the likeliest of `choices` and assign it to `name`."""

    choices: Annotated[Sequence[Annotated[str, Meta(min_length=1)]], Meta(min_length=1, max_length=256)]
    name: Name | None = None
    choices_method: ChoicesMethod = "token_length_normalized"


class Compute(Step, tag="compute"):
    """Compute the KV of the text so far, so that later steps and other programs find it in the prefix cache."""


class Fork(Step, tag="fork"):
    """Make one lane per list of steps, each with a copy of text and variables. This lane goes on meanwhile."""

    branches: Annotated[list[list[AnyStep]], Meta(min_length=1, max_length=64)]
    name: Name = "fork"


class Join(Step, tag="join"):
    """Wait for the lanes of a fork, which end.

    "gather_variable" makes each variable that is new in a branch a list of the branches' values.
    "concate_and_append" appends the branches' new texts in order. "branch" goes on from one of them: `branch` is its
    number, or a variable that holds it.
    """

    fork: Name = "fork"
    mode: Literal["gather_variable", "concate_and_append", "branch"] = "gather_variable"
    branch: Small | Name | None = None


class Condition(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """A test of a variable: all tests that are given must hold. Texts are compared without spaces around them.

    `less_than` and `greater_than` hold for numbers only.
    """

    variable: Name
    equals: str | None = None
    one_of: Annotated[Sequence[str], Meta(max_length=256)] | None = None
    contains: str | None = None
    less_than: float | None = None
    greater_than: float | None = None
    negate: bool = False

    def holds(self, value: str) -> bool:
        """Tell whether `value` passes."""
        text = value.strip()
        found = (
            (self.equals is None or text == self.equals.strip())
            and (self.one_of is None or text in [one.strip() for one in self.one_of])
            and (self.contains is None or self.contains in value)
            and (self.less_than is None or _number(text, self.less_than + 1) < self.less_than)
            and (self.greater_than is None or _number(text, self.greater_than - 1) > self.greater_than)
        )
        return found != self.negate


def _number(text: str, otherwise: float) -> float:
    try:
        return float(text)
    except ValueError:
        return otherwise


class Repeat(Step, tag="repeat"):
    """Run `steps` at most `times`; stop after a round in which `until` holds."""

    steps: list[AnyStep]
    times: Annotated[int, Meta(ge=1, le=1024)]
    until: Condition | None = None


class If(Step, tag="if"):
    """Run `then` if the condition holds, else `otherwise`."""

    condition: Condition
    then: list[AnyStep]
    otherwise: list[AnyStep] = []


class InRole(Step, tag="role"):
    """Run `steps` as a message of a role, framed by the model's chat template. Roles do not nest."""

    role: Role
    steps: list[AnyStep]


class Reasoning(Step, tag="separate_reasoning"):
    """Run steps and split what their gens give: `name` keeps the answer, `name`_reasoning_content gets the reasoning.

    The text keeps the answers alone. `model_type` is the name of a reasoning format.
    """

    steps: list[AnyStep]
    model_type: Name


AnyStep = Text | Insert | Gen | Select | Compute | Fork | Join | Repeat | If | InRole | Reasoning


class Program(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """The steps of a call by lane. Crosses the process border.

    `session` names state that the engine keeps: with `resume` the call goes on from it, with `keep` it stays after the
    call.
    """

    lanes: dict[str, list[AnyStep]]
    session: str = ""
    resume: bool = False
    keep: bool = False
    stream: bool = False

    @property
    def weight(self) -> int:
        """Estimate the tokens of its own texts."""
        steps = (step for lane in self.lanes.values() for step in walk(lane))
        return 1 + sum(len(step.text) // 4 for step in steps if isinstance(step, Text))


class Event(msgspec.Struct, array_like=True, omit_defaults=True):
    """What a program reports. `step` counts the gens and selects that its lane has begun, from 0.

    "start" and "text" (new text of sample `index`) come if the call streams, "end" for each gen and select with its
    value, its reason and its counts, and "done" with the text and variables of the first lane.
    """

    kind: Literal["start", "text", "end", "done"]
    lane: str = ""
    step: int = 0
    name: str | None = None
    index: int = 0
    text: str = ""
    value: Any = None
    finish_reason: str | None = None
    usage: tuple[int, int, int] = (0, 0, 0)  # tokens of the prompt, those found in the cache, generated ones
    reasoning: str | None = None
    meta_info: dict[str, Any] | None = None


def inner(step: AnyStep) -> tuple[list[AnyStep], ...]:
    """List the lists of steps inside a step."""
    if isinstance(step, Fork):
        return tuple(step.branches)
    if isinstance(step, If):
        return step.then, step.otherwise
    return (step.steps,) if isinstance(step, (Repeat, InRole, Reasoning)) else ()


def walk(steps: Iterable[AnyStep]) -> Iterator[AnyStep]:
    """Walk every step and the steps inside it, in order."""
    for step in steps:
        yield step
        for part in inner(step):
            yield from walk(part)


def gens(program: Program) -> Iterator[Gen]:
    """Walk every gen of a program, in a fixed order."""
    for steps in program.lanes.values():
        for step in walk(steps):
            if isinstance(step, Gen):
                yield step
