"""Reads tool calls in each syntax that formats are made of. Knows where a call is, not where to look for one."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from quire.text.events import Events
from quire.text.formats import Body, JsonCall, NamedCall, ParameterCall, PythonCall, ToolFormat
from quire.text.reader import (
    Emit,
    Reader,
    Steps,
    Unreadable,
    as_json,
    balanced,
    decoded_string,
    escaped,
    python_value,
    short_string,
    skip_value,
    starts_of,
    word,
)

Functions = Mapping[str, Mapping[str, Any]]

_NAME = re.compile(r"[\w.\-/]+")
_NUMBERED_NAME = re.compile(r"[\w.\-/:]+")
_KEY = re.compile(r"[^<>\n]+")
_ARGUMENT_KEYS = ("arguments", "parameters")
# What a schema says for people.
_NOTES = {"title", "description", "default", "examples", "deprecated", "$comment"}
_OTHER_KEYS = ("id", "type", "index")


class CallReader:
    """Reads calls and says them as events.

    The reader's mark is where text begins that is no part of what was said: what to release when `Unreadable` is
    raised. `only_offered`: calls of other functions than `functions` are none.
    """

    def __init__(self, reader: Reader, events: Events, functions: Functions | None) -> None:
        self._reader = reader
        self._events = events
        self._functions = functions
        self._calling = False
        self.only_offered = False

    def start(self, name: str) -> None:
        self._check_name(name)
        self._events.start(name)
        self._calling = True
        self._reader.mark = self._reader.at

    def _check_name(self, name: str) -> None:
        offered = self._functions is None or name in self._functions
        if not name or (self.only_offered and not offered):
            raise Unreadable

    def argue(self, text: str) -> None:
        self._reader.mark = self._reader.at
        self._events.argue(text)

    def end(self) -> None:
        self._events.end(True)
        self._calling = False
        self._reader.mark = self._reader.at

    def break_off(self) -> None:
        """A call that has begun ends unfinished."""
        if self._calling:
            self._events.end(False)
            self._calling = False

    def read(self, form: ToolFormat, bare: bool) -> Steps[None]:
        """One call, or a list of them."""
        reader = self._reader
        yield from reader.skip_space()
        c = yield from reader.peek()
        body = _choose(form.bodies, c)
        if isinstance(body, NamedCall):
            yield from self._named(body)
        elif isinstance(body, ParameterCall):
            yield from self._tagged(body, form.end)
        elif c == "[":
            reader.at += 1
            while True:
                yield from reader.skip_space()
                yield from self._python() if isinstance(body, PythonCall) else self._object(bare)
                yield from reader.skip_space()
                if not (yield from reader.match((",",))):
                    break
            if (yield from reader.match(("]",))):
                reader.mark = reader.at
        elif isinstance(body, JsonCall):
            yield from self._object(bare)
        else:
            raise Unreadable

    def _object(self, bare: bool) -> Steps[None]:
        """`{"name": ..., "arguments": ...}` in any order; both must be there where `bare`."""
        reader = self._reader
        yield from reader.expect("{")
        name: str | None = None
        held: list[str] | None = None
        done = False
        while True:
            yield from reader.skip_space()
            key = yield from short_string(reader)
            yield from reader.skip_space()
            yield from reader.expect(":")
            yield from reader.skip_space()
            if key == "name" and name is None:
                name = yield from short_string(reader)
                self._check_name(name)
                if held is not None:
                    self._whole_call(name, "".join(held))
                    done = True
            elif key in _ARGUMENT_KEYS and not done and held is None:
                if name is None:
                    held = []
                    yield from self._arguments(None, held.append)
                else:
                    yield from self._arguments(name, self.argue)
                    self.end()
                    done = True
            elif key in _OTHER_KEYS:
                yield from skip_value(reader)
            else:
                raise Unreadable
            yield from reader.skip_space()
            if not (yield from reader.match((",",))):
                break
        closed = yield from reader.match(("}",))
        if not done:
            if name is None or bare or not closed:
                raise Unreadable
            self._whole_call(name, "{}")
        elif closed:
            reader.mark = reader.at

    def _whole_call(self, name: str, arguments: str) -> None:
        self.start(name)
        self.argue(arguments)
        self.end()

    def _arguments(self, name: str | None, emit: Emit) -> Steps[None]:
        """JSON arguments: an object, a string that holds one, or null. The call of `name` starts where they do."""
        reader = self._reader
        c = yield from reader.peek()
        head = ""
        if c == "{":
            reader.at += 1
            yield from reader.skip_space()
            head = yield from reader.peek()
            if head not in ('"', "}") or not head:
                raise Unreadable
        elif c != '"' and (yield from word(reader)) != "null":
            raise Unreadable
        if name is not None:
            self.start(name)
        if c == "{":
            emit("{")
            yield from balanced(reader, emit, "{")
        elif c == '"':
            size = 0

            def count(text: str) -> None:
                nonlocal size
                size += len(text)
                emit(text)

            yield from decoded_string(reader, count)
            if not size:
                emit("{}")
        else:
            emit("{}")

    def _named(self, body: NamedCall) -> Steps[None]:
        """A name, a marker, JSON arguments."""
        reader = self._reader
        if body.before:
            yield from reader.match((body.before,))
        name = yield from reader.whole_run(_NUMBERED_NAME if body.numbered else _NAME)
        name = name.removeprefix(body.prefix)
        if body.numbered and name.rpartition(":")[2].isdecimal():
            name = name.rpartition(":")[0]
        yield from reader.skip_space()
        if body.aside and (yield from reader.match((body.aside,))):
            yield from reader.whole_run(_NAME)
            yield from reader.skip_space()
        if (yield from reader.match(body.between)) is None:
            raise Unreadable
        yield from reader.skip_space()
        yield from self._arguments(name, self.argue)
        self.end()
        yield from reader.skip_space()
        if body.after and (yield from reader.match((body.after,))):
            reader.mark = reader.at

    def _python(self) -> Steps[None]:
        """`NAME(key=value, ...)`."""
        reader = self._reader
        name = yield from reader.whole_run(_NAME)
        yield from reader.expect("(")
        yield from reader.skip_space()
        if (yield from reader.match((")",))):
            self._whole_call(name, "{}")
            return
        first = True
        while True:
            key = yield from reader.whole_run(_NAME)
            yield from reader.skip_space()
            yield from reader.expect("=")
            if not key:
                raise Unreadable
            if first:
                self.start(name)
            self.argue(("{" if first else ", ") + f'"{escaped(key)}": ')
            first = False
            yield from reader.skip_space()
            yield from python_value(reader, self.argue)
            yield from reader.skip_space()
            comma = yield from reader.match((",",))
            yield from reader.skip_space()
            if (yield from reader.match((")",))):
                break
            if comma is None:
                raise Unreadable
        self.argue("}")
        self.end()

    def _tagged(self, body: ParameterCall, end: str) -> Steps[None]:
        """A name, then arguments between tags."""
        reader = self._reader
        if body.before:
            yield from reader.expect(body.before)
        name = yield from reader.whole_run(_NAME)
        yield from reader.skip_space()
        if body.name_end:
            yield from reader.expect(body.name_end)
        elif (yield from reader.peek()) != body.key_begin[0]:
            raise Unreadable
        self.start(name)
        opening = "{"
        while True:
            yield from reader.skip_space()
            if not (yield from reader.match((body.key_begin,))):
                break
            key = yield from reader.whole_run(_KEY)
            for tag in body.key_end:
                yield from reader.skip_space()
                yield from reader.expect(tag)
            self.argue(f'{opening}"{escaped(key.strip())}": ')
            opening = ", "
            yield from self._value(body, kind_of((self._functions or {}).get(name), key.strip()))
        found = yield from reader.match(tuple(text for text in (body.after, end) if text))
        if found is None:
            raise Unreadable
        if found != body.after:
            reader.at -= len(found)
        self.argue("{}" if opening == "{" else "}")
        self.end()

    def _value(self, body: ParameterCall, kind: str) -> Steps[None]:
        """One argument's value up to its tag: a text as it is, or whatever JSON it may be."""
        reader = self._reader
        if body.pad:
            yield from reader.match((body.pad,))
        markers: tuple[str, ...] = (body.pad + body.value_end, body.value_end)
        if body.pad:  # a value whose end tag was forgotten
            markers += (body.pad + body.key_begin, body.pad + body.after)
        collected: list[str] = []

        def write(text: str) -> None:
            reader.mark = None
            if kind == "string":
                self.argue(escaped(text))
            else:
                collected.append(text)

        if kind == "string":
            self.argue('"')
        marker = yield from reader.scan(markers, starts_of(markers), write)
        text = "".join(collected)
        if not marker:
            self.argue(text)
            raise Unreadable
        if not marker.endswith(body.value_end):
            reader.at -= len(marker)
        self.argue('"' if kind == "string" else _json_of(text, kind))


def _choose(bodies: tuple[Body, ...], c: str) -> Body:
    """The syntax that a call beginning with `c` is in."""
    for body in bodies:
        if isinstance(body, JsonCall) and c in ("{", "["):
            return body
        if isinstance(body, NamedCall) and c not in ("{", "["):
            return body
        if isinstance(body, PythonCall) and c == "[":
            return body
        if isinstance(body, ParameterCall):
            return body
    raise Unreadable


def kind_of(parameters: Mapping[str, Any] | None, key: str) -> str:
    """How an argument between tags is written.

    "string": a text as it is. "quoted": a text as it is or as a JSON string. "json": anything, as JSON.
    """
    properties = (parameters or {}).get("properties")
    schema = properties.get(key) if isinstance(properties, Mapping) else None
    if not isinstance(schema, Mapping):
        return "json" if parameters is None or schema is not None else "string"
    kind = schema.get("type")
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(values, list) and values and kind in (None, "string", ["string"]):
        texts = all(isinstance(value, str) and value for value in values)
        return "string" if texts and set(schema) <= _NOTES | {"type", "enum", "const"} else "json"
    if kind not in ("string", ["string"]):
        return "json"
    plain = set(schema) - _NOTES <= {"type", "minLength", "maxLength"}
    return "string" if plain else "quoted"


def _json_of(text: str, kind: str) -> str:
    """A value that is no plain text, as JSON: what it is in JSON or Python, else a text."""
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
