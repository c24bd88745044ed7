"""What a model's output is found to be, piece by piece: text, reasoning, tool calls. Knows no format."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

SPACE = " \t\r\n"


@dataclass(frozen=True, slots=True)
class Content:
    """Text of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text of the reasoning before it."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """Call number `index` is of the function `name`."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """The next part of a call's arguments, as JSON text."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """The call's arguments are all there, or with `complete` False will never be."""

    index: int
    complete: bool


Event = Content | Reasoning | CallStart | CallArguments | CallEnd


@dataclass(slots=True)
class Call:
    """A tool call; `arguments` is JSON text."""

    name: str
    arguments: str = ""
    complete: bool = False


@dataclass(slots=True)
class Parsed:
    """All of an output."""

    content: str = ""
    reasoning: str = ""
    calls: list[Call] = field(default_factory=list)

    def add(self, events: Sequence[Event]) -> None:
        for event in events:
            if isinstance(event, Content):
                self.content += event.text
            elif isinstance(event, Reasoning):
                self.reasoning += event.text
            elif isinstance(event, CallStart):
                self.calls.append(Call(event.name))
            elif isinstance(event, CallArguments):
                self.calls[event.index].arguments += event.text
            else:
                self.calls[event.index].complete = event.complete


class Events:
    """Events on their way out; texts of a kind that follow each other are joined."""

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
        self._add(self._arguments, text)

    def start(self, name: str) -> None:
        self._join()
        self._list.append(CallStart(self.num_calls, name))
        self.num_calls += 1

    def end(self, complete: bool) -> None:
        self._join()
        self._list.append(CallEnd(self.num_calls - 1, complete))

    def take(self) -> list[Event]:
        """Those since they were last taken."""
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
    """Text of one kind on its way out: white space at its ends is dropped where it lies beside a marker."""

    def __init__(self, emit: Callable[[str], None]) -> None:
        self._emit = emit
        self._space = ""
        self._started = False
        self._touched = False  # a marker came before
        self._beside = False  # nothing but white space came since a marker

    def write(self, text: str) -> None:
        text = self._space + text
        body = text.rstrip(SPACE)
        self._space = text[len(body) :]
        if body:
            self._beside = False
            if not self._started and self._touched:
                body = body.lstrip(SPACE)
            self._started = True
            self._emit(body)

    def touch(self) -> None:
        """A marker is here."""
        self._touched = self._beside = True

    def finish(self) -> None:
        if not self._beside:
            self._emit(self._space)
