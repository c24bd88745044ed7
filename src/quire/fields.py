"""Fields of requests: an annotation has a field's type, range and meaning; checks, errors and docs follow from it."""

from __future__ import annotations

import math
from collections.abc import Callable
from collections.abc import Sequence as Seq
from functools import cache
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from quire.errors import RequestError

INT32 = (1 << 31) - 1
INT64 = (1 << 63) - 1
MAX_N = 1024
MAX_BEAMS = 256
SHOWN = 80  # characters of a wrong value in its error

Test = Callable[[Any], bool]


def says(sentence: str, **limits: Any) -> Meta:
    """Describe a field in one sentence, with limits by msgspec's names: ge, gt, le, lt, min_length, max_length."""
    return Meta(description=sentence, **limits)


# Fields that SamplingParams shares with the bodies of requests and the steps of programs.
Samples = Annotated[int, says("number of samples", ge=1, le=MAX_N)]
PresencePenalty = Annotated[float, says("subtracted from the logits of tokens in the output", ge=-2, le=2)]
FrequencyPenalty = Annotated[float, says("subtracted once per occurrence in the output", ge=-2, le=2)]
RepetitionPenalty = Annotated[float, says("divides the logits of tokens seen before", ge=1e-6, le=1_000_000)]
Temperature = Annotated[float, says("0 takes the likeliest token", ge=0, le=1_000_000)]
TopP = Annotated[float, says("keep the smallest set of tokens with this probability", ge=1e-9, le=1)]
TopK = Annotated[int, says("keep this many of the likeliest tokens; 0 or -1 keeps all", ge=-1, le=INT64)]
MinP = Annotated[float, says("keep tokens at least this fraction as likely as the best", ge=0, le=1)]
Seed = Annotated[int, says("the same seed gives the same text")]
Stop = Annotated[str | Seq[str], says("texts that end the output")]
TokenId = Annotated[int, Meta(ge=0, le=INT32)]
StopTokenIds = Annotated[Seq[TokenId], says("tokens that end the output")]
IgnoreEos = Annotated[bool, says("go on after the end-of-sequence token")]
MaxTokens = Annotated[int, says("most tokens of output", ge=1, le=INT64)]
MinTokens = Annotated[int, says("no end before this many tokens", ge=0, le=INT64)]
TopLogprobs = Annotated[
    int, says("log-probabilities of this many tokens; -1 of the vocabulary", ge=-1, le=INT64)
]
PromptLogprobs = Annotated[int, says("log-probabilities of the prompt's tokens", ge=-1, le=INT64)]
LogprobTokenIds = Annotated[
    Seq[TokenId], says("with logprobs: those of these tokens instead of the likeliest", min_length=1)
]
SkipSpecialTokens = Annotated[bool, says("leave special tokens out of the text")]
SpacesBetween = Annotated[bool, says("put spaces between special tokens")]
IncludeStop = Annotated[bool, says("keep the stop string")]
StreamInterval = Annotated[int, says("tokens per chunk of a stream", ge=1, le=INT64)]
AllowedTokenIds = Annotated[Seq[TokenId], says("only these tokens")]
BadWords = Annotated[Seq[str], says("words that are never produced")]
ThinkingBudget = Annotated[
    int, says("most tokens of reasoning; then the answer begins; -1 sets no bound", ge=-1, le=INT64)
]
Speculative = Annotated[bool, says("false drafts nothing")]
LengthPenalty = Annotated[float, says("beam search: exponent of the length that scores are divided by")]
EarlyStopping = Annotated[
    bool | Literal["never"],
    says("beam search: true, false or never as in transformers; vLLM's search by default"),
]
BeamGroups = Annotated[
    int, says("beam search: groups that search in turn for different sequences", ge=1, le=MAX_BEAMS)
]
DiversityPenalty = Annotated[
    float, says("beam search: what a token loses for each beam of earlier groups that took it", ge=0)
]
Dimensions = Annotated[int, says("keep the first dimensions, normalized (Matryoshka)", ge=1, le=1 << 20)]
NoRepeatNgram = Annotated[int, says("beam search: runs of this many tokens occur once", ge=0, le=INT64)]


class Field(msgspec.Struct, frozen=True):
    """A field of a struct: its default, its sentence, what it `must` be, and the `test` of a value.

    Without a `test` its type is no number, flag, or choice of words, and its struct checks it by hand.
    """

    name: str
    default: Any
    sentence: str
    must: str
    test: Test | None

    def refusal(self, value: Any, where: str = "") -> RequestError:
        """Make the error for a value that fails the test; `where` begins the field's name."""
        return refusal(where + self.name, value, self.must, self.sentence)


def refusal(name: str, value: Any, must: str, sentence: str = "") -> RequestError:
    """Make the error that names a field, what it must be, and the value that it has."""
    shown = repr(value)
    shown = shown if len(shown) <= SHOWN else f"{shown[:SHOWN]}..."
    meaning = f" ({sentence})" if sentence else ""
    return RequestError(f"{name} must be {must}, got {shown}{meaning}", name)


@cache
def fields_of(struct: type[msgspec.Struct]) -> dict[str, Field]:
    """Read the annotations of a struct. Cached, as they do not change."""
    hints = get_type_hints(struct, include_extras=True)
    infos = {info.name: info for info in msgspec.structs.fields(struct)}
    return {name: _field(name, infos[name].default, hints[name]) for name in infos}


@cache
def _checks(struct: type[msgspec.Struct]) -> tuple[tuple[str, Any, Test, Field], ...]:
    """Return name, default, test and description of the fields that have a test."""
    fields = fields_of(struct).values()
    return tuple((field.name, field.default, field.test, field) for field in fields if field.test)


def check(given: msgspec.Struct, struct: type[msgspec.Struct], where: str = "") -> None:
    """Test the fields of `struct` that differ from their defaults. Raises RequestError naming the field."""
    for name, default, test, field in _checks(struct):
        value = getattr(given, name)
        if value is not default and not test(value):
            raise field.refusal(value, where)


def _field(name: str, default: Any, hint: Any) -> Field:
    kinds, metas = _parts(hint)
    sentence = next((meta.description for meta in reversed(metas) if meta.description), "")
    limits = next((meta for meta in metas if _limits(meta) != _limits(Meta())), Meta())
    optional = type(None) in kinds
    found = [_test(kind, limits) for kind in kinds if kind is not type(None)]
    if not all(test for test, _ in found):
        return Field(name, default, sentence, "", None)
    tests = [test for test, _ in found if test]
    must = " or ".join(text for _, text in found) + (", or None" if optional else "")
    if len(tests) == 1 and not optional:
        return Field(name, default, sentence, must, tests[0])

    def any_of(value: Any) -> bool:
        return (value is None and optional) or any(test(value) for test in tests)

    return Field(name, default, sentence, must, any_of)


def _parts(hint: Any) -> tuple[list[Any], list[Meta]]:
    """Return the alternatives of a type, and all annotations in it."""
    if get_origin(hint) is Annotated:
        kinds, metas = _parts(get_args(hint)[0])
        return kinds, [*metas, *(meta for meta in hint.__metadata__ if isinstance(meta, Meta))]
    if get_origin(hint) in (Union, UnionType):
        parts = [_parts(part) for part in get_args(hint)]
        return [kind for kinds, _ in parts for kind in kinds], [meta for _, metas in parts for meta in metas]
    return [hint], []


def _limits(meta: Meta) -> tuple[Any, ...]:
    return meta.ge, meta.gt, meta.le, meta.lt


def _test(kind: Any, limits: Meta) -> tuple[Test | None, str]:
    """Return the test of one alternative of a type, and what it must be."""
    low = -math.inf if limits.ge is None else limits.ge
    high = math.inf if limits.le is None else limits.le
    over = -math.inf if limits.gt is None else limits.gt

    if kind is float:
        return (
            lambda v: (
                isinstance(v, (int, float))
                and not isinstance(v, bool)
                and low <= v <= high
                and over < v < math.inf
            )
        ), _number(limits)
    if kind is int:
        return lambda v: type(v) is int and low <= v <= high and v > over, _integer(limits)
    if kind is bool:
        return lambda v: isinstance(v, bool), "true or false"
    if get_origin(kind) is Literal:
        words = get_args(kind)
        return lambda v: isinstance(v, str) and v in words, f"one of {', '.join(map(repr, words))}"
    return None, ""


def _number(limits: Meta) -> str:
    low, high = limits.ge if limits.gt is None else limits.gt, limits.le
    if low is None and high is None:
        return "a finite number"
    if high is None:
        return f"a number {'>=' if limits.gt is None else '>'} {low}"
    return f"a number in {'[' if limits.gt is None else '('}{low}, {high}]"


def _integer(limits: Meta) -> str:
    if limits.ge is None:
        return "an integer"
    unbounded = limits.le in (None, INT64)
    return f"an integer >= {limits.ge}" if unbounded else f"an integer from {limits.ge} to {limits.le}"
