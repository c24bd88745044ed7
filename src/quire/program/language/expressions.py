"""Expressions that a program appends to its state: gens, selects, messages, and sums of these and texts."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from quire.errors import RequestError
from quire.steps import ChoicesMethod, Gen, Select

token_length_normalized: ChoicesMethod = "token_length_normalized"
greedy_token_selection: ChoicesMethod = "greedy_token_selection"
unconditional_likelihood_normalized: ChoicesMethod = "unconditional_likelihood_normalized"

_PATTERNS = {
    "int": r"[-+]?[0-9]+[ \n]*",
    "float": r"[-+]?[0-9]*\.?[0-9]+[ \n]*",
    "bool": r"(True|False)",
    "str": r'"[\w\d\s]*"',
}


class Expression:
    """Anything that can be appended to a state, beside texts. `error` is what is wrong, seen when it would run."""

    error: Exception | None = None

    def __add__(self, other: Any) -> Expression:
        return Sum([*parts_of(self), *parts_of(other)])

    def __radd__(self, other: Any) -> Expression:
        return Sum([*parts_of(other), *parts_of(self)])


class Sum(Expression):
    """Several parts, one after the other."""

    def __init__(self, parts: list[str | Expression]) -> None:
        self.parts = parts


class Call(Expression):
    """A gen or select: the step that the engine runs."""

    def __init__(self, step: Gen | Select, error: Exception | None = None) -> None:
        self.step, self.error = step, error


class RoleMark(Expression):
    """The begin or the end of a message."""

    def __init__(self, role: str, begins: bool) -> None:
        self.role, self.begins = role, begins


class Separated(Expression):
    """An expression whose gens are split into reasoning and answer."""

    def __init__(self, parts: list[str | Expression], model_type: str | None) -> None:
        self.parts, self.model_type = parts, model_type or ""
        self.error = next((part.error for part in parts if isinstance(part, Call) and part.error), None)
        if model_type is None:
            self.error = ValueError("separate_reasoning: give model_type")


def parts_of(value: Any) -> list[str | Expression]:
    """List the parts of a text, an expression, or a list of these. TypeError for anything else."""
    if isinstance(value, Sum):
        return value.parts
    if isinstance(value, (str, Expression)):
        return [value]
    if isinstance(value, (list, tuple)):
        return [part for one in value for part in parts_of(one)]
    raise TypeError(f"a program appends texts and expressions, not {type(value).__name__}")


def values_given(given: Mapping[str, Any]) -> dict[str, Any]:
    """Pick the fields of a gen that are not None: its own, or the defaults of a run."""
    found = {name: given[name] for name in Gen.__struct_fields__ if given.get(name) is not None}
    for name in {"stop", "stop_token_ids"} & set(found):
        found[name] = found[name] if isinstance(found[name], str) else list(found[name])
    return found


def gen(
    name: str | None = None,
    max_tokens: int | None = None,
    min_tokens: int | None = None,
    n: int | None = None,
    stop: str | Sequence[str] | None = None,
    stop_token_ids: Sequence[int] | None = None,
    stop_regex: str | Sequence[str] | None = None,
    temperature: float | None = None,
    top_p: float | None = None,
    top_k: int | None = None,
    min_p: float | None = None,
    frequency_penalty: float | None = None,
    presence_penalty: float | None = None,
    ignore_eos: bool | None = None,
    return_logprob: bool | None = None,
    logprob_start_len: int | None = None,
    top_logprobs_num: int | None = None,
    return_text_in_logprobs: bool | None = None,
    dtype: type | str | None = None,
    choices: Sequence[str] | None = None,
    choices_method: ChoicesMethod | None = None,
    regex: str | None = None,
    json_schema: str | dict[str, Any] | None = None,
) -> Expression:
    """Continue the text and name the result; with `choices` it is `select`. What is None has the run's default.

    `dtype` (int, float, bool, str) constrains the text. `return_text_in_logprobs` has no effect: it is always there.
    """
    given = {**locals()}
    if choices is not None:
        return select(name, choices, 0.0 if temperature is None else temperature, choices_method)
    no_stop_regex(stop_regex)
    if regex is not None:
        re.compile(regex)  # raises re.error, as SGLang's gen does
    if dtype is not None:
        kind = dtype if isinstance(dtype, str) else dtype.__name__
        if kind not in _PATTERNS:
            raise RuntimeError(f"gen: dtype must be int, float, bool or str, got {kind}")
        regex = _PATTERNS[kind]
        if kind in ("int", "float"):
            stop = [*([stop] if isinstance(stop, str) else stop or ()), " ", "\n"]
    return Call(Gen(**values_given({**given, "regex": regex, "stop": stop})))


def no_stop_regex(stop_regex: Any) -> None:
    """Refuse `stop_regex` by name."""
    if stop_regex:
        raise RequestError(
            "stop_regex is not supported: use stop, or regex to constrain the text", "stop_regex"
        )


def gen_int(name: str | None = None, **given: Any) -> Expression:
    """`gen` with dtype int."""
    return gen(name, dtype=int, **given)


def gen_string(name: str | None = None, **given: Any) -> Expression:
    """`gen` with dtype str."""
    return gen(name, dtype=str, **given)


def select(
    name: str | None = None,
    choices: Sequence[str] | None = None,
    temperature: float = 0.0,
    choices_method: ChoicesMethod | None = None,
) -> Expression:
    """Append the likeliest of `choices` and name it. `temperature` must be 0."""
    if choices is None:
        raise ValueError("select: give choices")
    error = AssertionError("select: temperature must be 0") if temperature > 1e-5 else None
    step = Select(name=name, choices=list(choices), choices_method=choices_method or token_length_normalized)
    return Call(step, error)


def separate_reasoning(inner: Expression, model_type: str | None = None) -> Expression:
    """Split what the gens of `inner` give: name has the answer, name_reasoning_content the reasoning."""
    parts = parts_of(inner)
    if any(isinstance(part, Call) and part.step.name is None for part in parts):
        raise ValueError("separate_reasoning: each gen needs a name")
    return Separated(parts, model_type)


def _message(role: str) -> Callable[[Any], Expression]:
    def say(expression: Any = None) -> Expression:
        inside = [] if expression is None else parts_of(expression)
        return Sum([RoleMark(role, True), *inside, RoleMark(role, False)])

    say.__doc__ = f"A message of role {role}."
    say.__name__ = role
    return say


system, user, assistant = _message("system"), _message("user"), _message("assistant")


system_begin, system_end = partial(RoleMark, "system", True), partial(RoleMark, "system", False)
user_begin, user_end = partial(RoleMark, "user", True), partial(RoleMark, "user", False)
assistant_begin, assistant_end = partial(RoleMark, "assistant", True), partial(RoleMark, "assistant", False)


def image(path: str) -> Expression:
    """Refused: no model here reads images."""
    raise RequestError("image is not supported: the models of this engine read text", "image")


def video(path: str, num_frames: int) -> Expression:
    """Refused: no model here reads videos."""
    raise RequestError("video is not supported: the models of this engine read text", "video")
