"""Reads calls whose arguments stand between tags, and writes the arguments as JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol

from quire.text.formats.shapes import NestedCall, ParameterCall
from quire.text.output.literals import MAX_DEPTH, as_json, escaped
from quire.text.output.reader import Reader, Steps, Unreadable, starts_of
from quire.text.output.schemas import admits, kind_of, kind_of_value, property_of, resolved

NAME = re.compile(r"[\w.\-/]+")
_KEY = re.compile(r"[^<>\n]+")
_QUOTED_KEY = re.compile(r'[^"<>\n]+')
DIGITS = re.compile("[0-9]+")
Convert = Callable[[str], str]
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
        self._root: Any = None  # the schema of a nested call's arguments

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
            yield from reader.whole_run(DIGITS)
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
                if (yield from reader.match(body.type_tags[:1])):
                    yield from reader.whole_run(_KEY)
                    yield from reader.expect(body.type_tags[1])
                    yield from reader.skip_space()
                yield from reader.expect(tag)
            convert = yield from self._conversion(body, schema, key.strip())
            sink.argue(f'{opening}"{escaped(key.strip())}": ')
            opening = ", "
            yield from self._parameter(body, convert)
        found = yield from reader.match(tuple(text for text in (body.after, end) if text))
        if found is None:
            raise Unreadable
        if found != body.after:
            reader.at -= len(found)
        sink.argue("{}" if opening == "{" else "}")
        sink.end()

    def _conversion(self, body: ParameterCall, schema: Any, key: str) -> Steps[Convert | None]:
        """Decide how a value becomes JSON; None if it is a text as it stands.

        The schema decides. A mark of the value's type, if the format has such marks, counts where the schema admits
        both a text and what it stands for.
        """
        raw = None
        if body.types:
            found = yield from self._reader.match(tuple(mark.text for mark in body.types))
            marks = [mark for mark in body.types if mark.text == found]
            if not marks:
                raise Unreadable
            raw = marks[0].raw
        part = property_of(schema, key)
        if raw if part is None and raw is not None else (kind_of(schema, key) == "text" and raw is not False):
            return None
        return partial(_json_of, schema=part, root=schema, text_first=bool(raw))

    def _parameter(self, body: ParameterCall, convert: Convert | None) -> Steps[None]:
        """Read a value up to its end tag."""
        reader = self._reader
        if body.pad:
            yield from reader.match((body.pad,))
        markers: tuple[str, ...] = (body.pad + body.value_end, body.value_end)
        if body.cdata and (yield from reader.match((_CDATA[0],))):
            markers = (_CDATA[1] + body.value_end,)
        elif body.pad:  # a value without its end tag
            markers += (body.pad + body.key_begin, body.pad + body.after)
        marker = yield from self._value(markers, convert)
        if not marker.endswith(body.value_end):
            reader.at -= len(marker)

    def _value(self, markers: tuple[str, ...], convert: Convert | None) -> Steps[str]:
        """Read text up to one of `markers`, and emit it as JSON: as a string, or as `convert` makes it."""
        reader, sink = self._reader, self._sink
        collected: list[str] = []

        def write(text: str) -> None:
            reader.mark = None
            if convert is None:
                sink.argue(escaped(text))
            else:
                collected.append(text)

        if convert is None:
            sink.argue('"')
        marker = yield from reader.scan(markers, starts_of(markers), write)
        text = "".join(collected)
        if not marker:
            sink.argue(text)
            raise Unreadable
        sink.argue('"' if convert is None else convert(text))
        return marker

    def nested(self, body: NestedCall) -> Steps[None]:
        """Read a name, then arguments as nested tags."""
        reader, sink = self._reader, self._sink
        name = yield from reader.whole_run(NAME)
        yield from reader.expect(body.name_end)
        sink.start(name)
        self._root = sink.schema(name)
        yield from self._nested_object(body, body.after, self._root, 0)
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
            part = resolved(property_of(schema, key), self._root)
            text = part is None and schema is not None
            yield from self._nested_value(body, f"{body.prefix}</{key}>", part, text, depth)
        sink.argue("{}" if opening == "{" else "}")

    def _nested_list(self, body: NestedCall, end: str, schema: Any, depth: int) -> Steps[None]:
        """Read `<item>value</item>` until `end`, as a list."""
        reader, sink = self._reader, self._sink
        schema = schema if isinstance(schema, Mapping) else {}
        items = resolved(schema.get("items"), self._root)
        # A list where the schema wants a string: its elements are strings.
        text = schema.get("type") == "string"
        opening = "["
        while (yield from self._tag(body, end)):
            yield from reader.expect(f"{body.item}>")
            sink.argue(opening)
            opening = ", "
            yield from self._nested_value(body, f"{body.prefix}</{body.item}>", items, text, depth)
        sink.argue("[]" if opening == "[" else "]")

    def _tag(self, body: NestedCall, end: str) -> Steps[bool]:
        """Read the beginning of the next tag; False if it is `end`."""
        yield from self._reader.skip_space()
        found = yield from self._reader.match((end, f"{body.prefix}<"))
        if found is None:
            raise Unreadable
        return found != end

    def _nested_value(self, body: NestedCall, end: str, schema: Any, text: bool, depth: int) -> Steps[None]:
        """Read one value up to `end`: nested tags, or text, as it is if `text`. The mark is where it starts."""
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
        if text or (isinstance(schema, Mapping) and kind_of_value(schema, self._root) == "text"):
            yield from self._value((end,), None)
        else:
            yield from self._value(
                (end,), partial(_json_of, schema=schema, root=self._root, text_first=False)
            )


def _json_of(text: str, schema: Any, root: Any, text_first: bool) -> str:
    """Convert a value to what the schema admits: the JSON or Python literal that it is, or a string.

    Of two that are admitted the literal counts, unless `text_first` or only Python knows it (02134); so it does if
    neither is.
    """
    stripped, string = text.strip(), f'"{escaped(text)}"'
    for read in (str, as_json):
        try:
            found = read(stripped)
            value = json.loads(found, parse_constant=_refuse_constant)
        except (ValueError, RecursionError, Unreadable):
            continue
        text_first = text_first or (read is as_json and stripped[-1:].isdecimal())
        for exactly in (True, False):
            fits = admits(schema, root, value, exactly)
            if (text_first or not fits) and admits(schema, root, text, exactly):
                return string
            if fits:
                return found
        return found
    return string


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
