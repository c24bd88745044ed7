"""Events of a model's output: content, reasoning, tool calls. Knows no format."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

SPACE = " \t\r\n"
MAX_SPACE = 32  # characters of white space beside a marker that may belong to it


@dataclass(frozen=True, slots=True)
class Content:
    """Text of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text of the reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """Call number `index` of function `name` starts. `id` is the model's own id for it, if it wrote one."""

    index: int
    name: str
    id: str = ""


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of a call's arguments, as JSON text."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """A call ends. Its arguments are whole if `complete`, else they were cut off."""

    index: int
    complete: bool


Event = Content | Reasoning | CallStart | CallArguments | CallEnd


@dataclass(slots=True)
class ToolCall:
    """A tool call. `arguments` is JSON text; `id` is the model's own, if it wrote one."""

    name: str
    arguments: str = ""
    complete: bool = False
    id: str = ""


@dataclass(slots=True)
class Parsed:
    """A whole output."""

    content: str = ""
    reasoning: str = ""
    calls: list[ToolCall] = field(default_factory=list)

    def add(self, events: Sequence[Event]) -> None:
        for event in events:
            if isinstance(event, Content):
                self.content += event.text
            elif isinstance(event, Reasoning):
                self.reasoning += event.text
            elif isinstance(event, CallStart):
                self.calls.append(ToolCall(event.name, id=event.id))
            elif isinstance(event, CallArguments):
                self.calls[event.index].arguments += event.text
            else:
                self.calls[event.index].complete = event.complete


class Events:
    """Collects events; consecutive texts of one kind become one event."""

    def __init__(self) -> None:
        self._list: list[Event] = []
        self._kind: Callable[[str], Event] | None = None
        self._parts: list[str] = []
        self.num_calls = 0

    def content(self, text: str) -> None:
        self._add(Content, text)

    def reasoning(self, text: str) -> None:
        self._add(Reasoning, text)

    def argue(self, text: str) -> None:
        """Add to the arguments of the last call."""
        self._add(self._arguments, text)

    def start(self, name: str, call_id: str = "") -> None:
        self._join()
        self._list.append(CallStart(self.num_calls, name, call_id))
        self.num_calls += 1

    def end(self, complete: bool) -> None:
        self._join()
        self._list.append(CallEnd(self.num_calls - 1, complete))

    def take(self) -> list[Event]:
        """Return the events since the last take."""
        self._join()
        events, self._list = self._list, []
        return events

    def _arguments(self, text: str) -> Event:
        return CallArguments(self.num_calls - 1, text)

    def _add(self, kind: Callable[[str], Event], text: str) -> None:
        if text:
            if self._kind != kind:
                self._join()
                self._kind = kind
            self._parts.append(text)

    def _join(self) -> None:
        if self._kind is not None:
            self._list.append(self._kind("".join(self._parts)))
            self._kind, self._parts = None, []


class Trimmed:
    """Emits text of one kind without the white space beside markers.

    With `place`, which says how much of the output has been read, `places` says where each emitted character stood in
    it; -1 for those that the output does not have.
    """

    def __init__(self, emit: Callable[[str], None], place: Callable[[], int] | None = None) -> None:
        self.places: list[int] = []
        self._emit = emit
        self._place = place
        self._space = ""
        self._held: list[int] = []  # the places of the space
        self._break = ""
        self._started = False
        self._touched = False  # a marker came before
        self._beside = False  # nothing but white space since a marker

    def write(self, text: str) -> None:
        """Take text that ends where the output has been read to."""
        if self._place is not None:
            end = self._place()
            self._held += range(end - len(text), end)
        text = self._space + text
        body = text.rstrip(SPACE)
        if len(text) - len(body) > MAX_SPACE and (body or self._started or not self._touched):
            body = text[:-MAX_SPACE]  # so much of it belongs to no marker
        self._space = text[len(body) :]
        if body:
            self._beside = False
            kept = body
            if self._break or (not self._started and self._touched):
                kept = body.lstrip(SPACE)
            if self._place is not None:
                self.places += [-1] * len(self._break) + self._held[len(body) - len(kept) : len(body)]
                self._held = self._held[len(body) :]
            body = self._break + kept
            self._started, self._break = True, ""
            self._emit(body)

    @property
    def decided(self) -> float:
        """Where the white space begins that is neither emitted nor dropped."""
        return self._held[0] if self._held and not self._beside else math.inf

    def touch(self) -> None:
        """Note a marker at this place."""
        self._touched = self._beside = True

    def begin_part(self) -> None:
        """Start another message; its text is joined to earlier text by a newline."""
        self.touch()
        if self._started:
            self._break = "\n"
            self._space, self._held = "", []

    def finish(self) -> None:
        if not self._beside:
            self.places += self._held
            self._emit(self._space)
