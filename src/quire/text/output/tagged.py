"""Reads calls whose arguments stand between tags, and writes the arguments as JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Protocol

from quire.text.formats.shapes import NestedCall, ParameterCall
from quire.text.output.literals import MAX_DEPTH, as_json, escaped
from quire.text.output.reader import Reader, Steps, Unreadable, starts_of
from quire.text.output.schemas import kind_of, kind_of_value, property_of

NAME = re.compile(r"[\w.\-/]+")
_KEY = re.compile(r"[^<>\n]+")
_QUOTED_KEY = re.compile(r'[^"<>\n]+')
_DIGITS = re.compile(r"\d+")
_CDATA = ("<![CDATA[", "]]>")


class Sink(Protocol):
    """Takes the parts of a call."""

    def start(self, name: str) -> None: ...
    def argue(self, text: str) -> None: ...
    def end(self) -> None: ...
    def schema(self, name: str) -> Any: ...


class TaggedReader:
    """Reads `ParameterCall` and `NestedCall` bodies."""

    def __init__(self, reader: Reader, sink: Sink) -> None:
        self._reader = reader
        self._sink = sink

    def parameters(self, body: ParameterCall, end: str) -> Steps[None]:
        """Read a name, then one pair of tags per argument."""
        reader, sink = self._reader, self._sink
        if body.before:
            yield from reader.expect(body.before)
        name = yield from reader.whole_run(NAME)
        yield from reader.skip_space()
        if body.name_end:
            yield from reader.expect(body.name_end)
        elif (yield from reader.peek()) != body.key_begin[0]:
            raise Unreadable
        if body.number_end:
            yield from reader.whole_run(_DIGITS)
            yield from reader.expect(body.number_end)
        sink.start(name)
        schema = sink.schema(name)
        opening = "{"
        while True:
            yield from reader.skip_space()
            if not (yield from reader.match((body.key_begin,))):
                break
            key = yield from reader.whole_run(_QUOTED_KEY if body.key_end[0].startswith('"') else _KEY)
            for tag in body.key_end:
                yield from reader.skip_space()
                yield from reader.expect(tag)
            kind = yield from self._kind(body, kind_of(schema, key.strip()))
            sink.argue(f'{opening}"{escaped(key.strip())}": ')
            opening = ", "
            yield from self._parameter(body, kind)
        found = yield from reader.match(tuple(text for text in (body.after, end) if text))
        if found is None:
            raise Unreadable
        if found != body.after:
            reader.at -= len(found)
        sink.argue("{}" if opening == "{" else "}")
        sink.end()

    def _kind(self, body: ParameterCall, kind: str) -> Steps[str]:
        """Read the mark of the value's type, if the format has such marks."""
        if not body.types:
            return kind
        found = yield from self._reader.match(tuple(mark.text for mark in body.types))
        marks = [mark for mark in body.types if mark.text == found]
        if not marks:
            raise Unreadable
        raw = marks[0].raw
        return kind if raw is None else ("string" if raw else "json")

    def _parameter(self, body: ParameterCall, kind: str) -> Steps[None]:
        """Read a value up to its end tag."""
        reader = self._reader
        if body.pad:
            yield from reader.match((body.pad,))
        markers: tuple[str, ...] = (body.pad + body.value_end, body.value_end)
        if body.cdata and (yield from reader.match((_CDATA[0],))):
            markers = (_CDATA[1] + body.value_end,)
        elif body.pad:  # a value without its end tag
            markers += (body.pad + body.key_begin, body.pad + body.after)
        marker = yield from self._value(markers, kind)
        if not marker.endswith(body.value_end):
            reader.at -= len(marker)

    def _value(self, markers: tuple[str, ...], kind: str) -> Steps[str]:
        """Read text up to one of `markers`, and emit it as a value of this kind."""
        reader, sink = self._reader, self._sink
        collected: list[str] = []

        def write(text: str) -> None:
            reader.mark = None
            if kind == "string":
                sink.argue(escaped(text))
            else:
                collected.append(text)

        if kind == "string":
            sink.argue('"')
        marker = yield from reader.scan(markers, starts_of(markers), write)
        text = "".join(collected)
        if not marker:
            sink.argue(text)
            raise Unreadable
        sink.argue('"' if kind == "string" else _json_of(text, kind))
        return marker

    def nested(self, body: NestedCall) -> Steps[None]:
        """Read a name, then arguments as nested tags."""
        reader, sink = self._reader, self._sink
        name = yield from reader.whole_run(NAME)
        yield from reader.expect(body.name_end)
        sink.start(name)
        yield from self._nested_object(body, body.after, sink.schema(name), 0)
        sink.end()

    def _nested_object(self, body: NestedCall, end: str, schema: Any, depth: int) -> Steps[None]:
        """Read `<key>value</key>` until `end`, as an object."""
        reader, sink = self._reader, self._sink
        opening = "{"
        while (yield from self._tag(body, end)):
            key = yield from reader.whole_run(_KEY)
            yield from reader.expect(">")
            sink.argue(f'{opening}"{escaped(key)}": ')
            opening = ", "
            part = property_of(schema, key)
            kind = "string" if part is None and schema is not None else None
            yield from self._nested_value(body, f"{body.prefix}</{key}>", part, kind, depth)
        sink.argue("{}" if opening == "{" else "}")

    def _nested_list(self, body: NestedCall, end: str, schema: Any, depth: int) -> Steps[None]:
        """Read `<item>value</item>` until `end`, as a list."""
        reader, sink = self._reader, self._sink
        schema = schema if isinstance(schema, Mapping) else {}
        items = schema.get("items")
        # A list where the schema wants a string: its elements are strings.
        kind = "string" if schema.get("type") == "string" else None
        opening = "["
        while (yield from self._tag(body, end)):
            yield from reader.expect(f"{body.item}>")
            sink.argue(opening)
            opening = ", "
            yield from self._nested_value(body, f"{body.prefix}</{body.item}>", items, kind, depth)
        sink.argue("[]" if opening == "[" else "]")

    def _tag(self, body: NestedCall, end: str) -> Steps[bool]:
        """Read the beginning of the next tag; False if it is `end`."""
        yield from self._reader.skip_space()
        found = yield from self._reader.match((end, f"{body.prefix}<"))
        if found is None:
            raise Unreadable
        return found != end

    def _nested_value(
        self, body: NestedCall, end: str, schema: Any, kind: str | None, depth: int
    ) -> Steps[None]:
        """Read one value up to `end`: nested tags, or text. The reader's mark is where it starts."""
        reader = self._reader
        if depth > MAX_DEPTH:
            raise Unreadable
        yield from reader.skip_space()
        opening, closing = f"{body.prefix}<", f"{body.prefix}</"
        found = yield from reader.match((opening, closing))
        item = False
        if found == opening:
            item = bool((yield from reader.match((f"{body.item}>",))))
        assert reader.mark is not None
        reader.at = reader.mark
        if found == opening:
            wanted = schema.get("type") if isinstance(schema, Mapping) else None
            read = self._nested_list if item and wanted != "object" else self._nested_object
            yield from read(body, end, schema, depth + 1)
            return
        if kind is None:
            kind = kind_of_value(schema) if isinstance(schema, Mapping) else "json"
        yield from self._value((end,), kind)


def _json_of(text: str, kind: str) -> str:
    """Convert a value that may be more than plain text: JSON and Python literals to JSON, else a string."""
    stripped = text.strip()
    try:
        value = json.loads(stripped, parse_constant=_refuse_constant)
        found = stripped
    except (ValueError, RecursionError):
        try:
            value = found = as_json(stripped)
        except Unreadable:
            return '"' + escaped(text) + '"'
    if kind == "quoted" and not (isinstance(value, str) and found.startswith('"')):
        return '"' + escaped(text) + '"'
    return found


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
