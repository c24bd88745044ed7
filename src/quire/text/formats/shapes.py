"""Records of a format: markers around calls and reasoning, and the syntax of a call. Data only."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

Place = Literal["start", "reasoning", "answer"]


def thinking(on: bool) -> dict[str, Any]:
    """Make the variables by which chat templates turn reasoning on or off, under the names that models have for it.

    The usual name, DeepSeek's and Granite's, Command's, and Seed-OSS's, whose default is to think without a bound.
    """
    return dict.fromkeys(("enable_thinking", "thinking", "reasoning"), on) | (
        {} if on else {"thinking_budget": 0}
    )


@dataclass(frozen=True, slots=True)
class JsonCall:
    """`{"name": NAME, "arguments": {...}}`.

    Constraints write a list of such objects if `listed`, and start each with a number under `id_key` if given.
    Readers accept a list or a single object, and `arguments` or `parameters`.
    """

    key: str = "arguments"
    name_key: str = "name"
    id_key: str = ""
    listed: bool = False


@dataclass(frozen=True, slots=True)
class KeyedCall:
    """`[{NAME: {...}}, ...]`."""


@dataclass(frozen=True, slots=True)
class NamedCall:
    """`before` NAME `aside` ID `between` JSON `after`.

    `before`, `after` and `aside` ID are optional. `between` lists alternatives; constraints write the first.
    With `numbered`, NAME carries `prefix` and ends in a colon and a number; that text is the call's id.
    """

    between: tuple[str, ...]
    before: str = ""
    after: str = ""
    aside: str = ""
    prefix: str = ""
    numbered: bool = False
    pad: str = ""


@dataclass(frozen=True, slots=True)
class PythonCall:
    """`NAME(key=value, ...)` with Python literals: a list in brackets, or one call per line."""

    bracketed: bool = True


@dataclass(frozen=True, slots=True)
class TypeMark:
    """Text after a parameter's name that says how its value is written.

    `type` is the JSON Schema type it stands for, "" for any. `raw`: the value is plain text, else it is JSON; None
    leaves that to the function's schema.
    """

    text: str
    type: str = ""
    raw: bool | None = None


@dataclass(frozen=True, slots=True)
class ParameterCall:
    """One pair of tags per argument. Strings are written as they are, other values as JSON.

    `before` NAME `name_end`, for each argument `key_begin` KEY, every text of `key_end`, VALUE, `value_end`; then
    `after`. `pad` surrounds each value. With `number_end`, a number and that text follow `name_end`. `types` follow
    `key_end` where the format marks types. Type names between `type_tags` may precede a value: the function's schema
    decides. `cdata`: values may be CDATA sections.
    """

    key_begin: str
    key_end: tuple[str, ...]
    value_end: str
    before: str = ""
    name_end: str = ""
    number_end: str = ""
    after: str = ""
    pad: str = ""
    gap: str = "\n"
    types: tuple[TypeMark, ...] = ()
    type_tags: tuple[str, ...] = ()
    cdata: bool = False


@dataclass(frozen=True, slots=True)
class LiteralCall:
    """`before` NAME `{key:value,...}`: unquoted keys, strings between two `quote`."""

    quote: str
    before: str = "call:"


@dataclass(frozen=True, slots=True)
class NestedCall:
    """Arguments as nested tags, each behind `prefix`: `<key>value</key>`, with `<item>` for elements of a list."""

    prefix: str
    name_end: str
    after: str
    item: str = "item"


Body = JsonCall | KeyedCall | NamedCall | PythonCall | ParameterCall | LiteralCall | NestedCall


@dataclass(frozen=True, slots=True)
class Channels:
    """Messages with headers (OpenAI's harmony format).

    `start` ROLE `channel` NAME [to=RECIPIENT] `message` TEXT and one of `ends`. The prompt ends after the role.
    Messages to one of `people` are shown to the user.
    """

    start: str = "<|start|>"
    channel: str = "<|channel|>"
    message: str = "<|message|>"
    ends: tuple[str, ...] = ("<|end|>", "<|return|>", "<|call|>")
    reasoning: str = "analysis"
    answer: str = "final"
    calls: str = "functions."
    people: tuple[str, ...] = ("assistant", "user", "all")


@dataclass(frozen=True, slots=True)
class Recipients:
    """Messages that name their recipient: `marker` RECIPIENT newline TEXT.

    The recipient is `answer` or a function. The prompt ends with `marker`.
    """

    marker: str
    answer: str


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """Format of a model's tool calls.

    A call is one of `begin`, a body, `end`. It may also start without a marker at one of `bare`; constraints write
    it so unless `marked`. Calls may be enclosed in `section` (begin, end). `separators` are characters allowed
    between calls. Constraints write the first of `bodies`, with `pad` beside the markers, `section_pad` beside the
    section's markers and `joint` between calls. `call_id` is a template over {hex}, {hex9}, {name} and {index}.
    `hints` recognise a format of an operator's file: a chat template that contains all texts of one of them uses it.
    The hints of Quire's own formats are in the registry.
    """

    name: str
    bodies: tuple[Body, ...]
    begin: tuple[str, ...] = ()
    end: str = ""
    section: tuple[str, str] | None = None
    section_pad: str = ""
    bare: tuple[str, ...] = ()
    marked: bool = True
    separators: str = ""
    pad: str = ""
    joint: str = ""
    channels: Channels | None = None
    recipients: Recipients | None = None
    call_id: str = "call_{hex}"
    hints: tuple[tuple[str, ...], ...] = ()

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that may be special tokens of the model."""
        found = [*self.begin, self.end, *(self.section or ())]
        if self.channels is not None:
            found += [self.channels.start, self.channels.channel, self.channels.message, *self.channels.ends]
        for body in self.bodies:
            if isinstance(body, NamedCall):
                found += [*body.between, body.aside]
            elif isinstance(body, LiteralCall):
                found.append(body.quote)
        return tuple(marker for marker in found if marker)


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """Format of a model's reasoning: one of `begin`, text, one of `end`, before the answer.

    `opened`: output starts inside the reasoning if the prompt does not tell. `anywhere`: reasoning may also follow
    other text, and an end without a begin is dropped. `answer_begin` and `answer_end` may enclose the answer.
    `in_content`: reasoning stays in the content with its markers; a begin that the prompt has written is added.
    """

    name: str
    begin: tuple[str, ...] = ()
    end: tuple[str, ...] = ()
    opened: bool = False
    anywhere: bool = False
    in_content: bool = False
    answer_begin: tuple[str, ...] = ()
    answer_end: tuple[str, ...] = ()
    channels: Channels | None = None
    recipients: Recipients | None = None
    hints: tuple[tuple[str, ...], ...] = ()

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that may be special tokens of the model."""
        return (*self.begin, *self.end, *self.answer_begin, *self.answer_end)

    def place(self, turn: str, continued: bool = False) -> Place:
        """Find where output starts after `turn`, the part of the prompt that belongs to the answer.

        `continued`: `turn` ends with text of the assistant that the output continues.
        """
        if self.channels is not None:
            return _place_in_channels(self.channels, turn)
        if self.recipients is not None:
            said = turn.rpartition(self.recipients.marker)[2]
            return "answer" if continued and said else "start"
        begun = max((turn.rfind(text) for text in self.begin), default=-1)
        ended = max((turn.rfind(text) for text in (*self.end, *self.answer_begin)), default=-1)
        if max(begun, ended) >= 0:
            return "reasoning" if begun > ended else "answer"
        if continued and turn.strip():
            return "answer"
        return "reasoning" if self.opened else "start"

    def of_text(self, text: str) -> tuple[ReasoningFormat, Place]:
        """Return the format of what continues a plain text, and where it starts."""
        form = replace(self, opened=False)  # a text without markers has no reasoning
        place = form.place(text)
        if place == "answer" and form.channels is None:
            place = "start"  # what the text closes may be of an earlier answer
        return form, place


def _place_in_channels(form: Channels, turn: str) -> Place:
    """Find where output starts: inside the message that `turn` leaves open, or before any."""
    header, message, text = turn.rpartition(form.message)
    if not message or any(end in text for end in (*form.ends, form.start)):
        return "start"
    channel = header.rpartition(form.channel)[2].strip()
    return "reasoning" if channel.startswith(form.reasoning) else "answer"
