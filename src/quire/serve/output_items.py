"""Split an output into items: reasoning, texts and calls, in order. Independent of any API's shapes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from quire.serve.ids import derived
from quire.serve.tools import OutputReader, Reading
from quire.text.output.events import CallArguments, CallStart, Content, Event, Reasoning

Kind = Literal["reasoning", "text", "call"]


@dataclass(slots=True)
class Item:
    """One item. The `text` of a call is its arguments; the result of the call will refer to its `call_id`."""

    kind: Kind
    index: int
    name: str = ""
    call_id: str = ""
    text: str = ""
    id: str = ""


class Change(NamedTuple):
    """An item opens, grows by `text`, or closes."""

    what: Literal["open", "grow", "close"]
    item: Item
    text: str = ""


class Items:
    """Splits output text into items. Without a reading, all of it is one text item that exists from the start.

    Their ids are made of `source`. `located`: the `reader` knows where texts stood in the output.
    """

    def __init__(self, reading: Reading | None, source: str, located: bool = False) -> None:
        self._source = source
        self._reading = reading
        self.reader: OutputReader | None = None if reading is None else reading.parser(located)
        self._open: Item | None = None
        self.all: list[Item] = []

    def whole(self, text: str) -> list[Item]:
        """Return all items of a complete output, by the same parser that reads streams."""
        self.feed(text)
        self.finish()
        return self.all

    def begin(self) -> list[Change]:
        return self._switch("text") if self._reading is None and not self.all else []

    def feed(self, text: str) -> list[Change]:
        """Take the next piece of text; return the changes that it makes."""
        if self.reader is None:
            return self.begin() + self._grow(text)
        return self._apply(self.reader.feed(text))

    def finish(self) -> list[Change]:
        """Return the last changes. Afterwards there is at least one item."""
        changes = [] if self.reader is None else self._apply(self.reader.finish())
        if not self.all:
            changes += self._switch("text")
        return changes + self._close()

    def _apply(self, events: Sequence[Event]) -> list[Change]:
        changes: list[Change] = []
        for event in events:
            if isinstance(event, CallStart):
                assert self._reading is not None
                call_id = self._reading.call_id(event.name, event.index, event.id)
                changes += self._switch("call", event.name, call_id)
            elif isinstance(event, CallArguments):
                changes += self._grow(event.text)
            elif isinstance(event, Content | Reasoning):
                kind: Kind = "text" if isinstance(event, Content) else "reasoning"
                if self._open is None or self._open.kind != kind:
                    changes += self._switch(kind)
                changes += self._grow(event.text)
            else:
                changes += self._close()
        return changes

    def _switch(self, kind: Kind, name: str = "", call_id: str = "") -> list[Change]:
        changes = self._close()
        index = len(self.all)
        self._open = Item(kind, index, name, call_id, id=derived(self._source, index))
        self.all.append(self._open)
        return [*changes, Change("open", self._open)]

    def _grow(self, text: str) -> list[Change]:
        if self._open is None or not text:
            return []
        self._open.text += text
        return [Change("grow", self._open, text)]

    def _close(self) -> list[Change]:
        item, self._open = self._open, None
        return [] if item is None else [Change("close", item)]
