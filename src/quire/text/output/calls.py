"""Reads one call, or a list of calls, in each syntax that formats consist of. Knows no place to look for calls."""

from __future__ import annotations

import re
from collections.abc import Mapping

from quire.text.formats.shapes import (
    Body,
    JsonCall,
    KeyedCall,
    LiteralCall,
    NamedCall,
    NestedCall,
    ParameterCall,
    PythonCall,
    ToolFormat,
)
from quire.text.output.events import Events
from quire.text.output.literals import (
    balanced,
    decoded_string,
    escaped,
    literal_object,
    python_value,
    short_string,
    skip_value,
    word,
)
from quire.text.output.reader import Emit, Reader, Steps, Unreadable
from quire.text.output.schemas import Functions
from quire.text.output.tagged import DIGITS, NAME, TaggedReader

_FENCES = ("```json", "```python", "```")
_NUMBERED_NAME = re.compile(r"[\w.\-/:]+")
_NAME_KEYS = ("name", "tool_name")
_ARGUMENT_KEYS = ("arguments", "parameters")
_OTHER_KEYS = ("id", "type", "index", "tool_call_id")


class Found(Exception):
    """A call would start here."""


class CallReader:
    """Reads calls and emits events.

    The reader's mark is where text starts that no event covers: what to release when `Unreadable` is raised.
    `only_offered`: functions that are not offered cannot be called. `only_looking`: raise `Found` instead of starting
    a call. `calling`: a call has started and not ended.
    """

    def __init__(self, reader: Reader, events: Events, functions: Functions | None) -> None:
        self._reader = reader
        self._events = events
        self._functions = functions
        self._tagged = TaggedReader(reader, self)
        self.calling = False
        self.only_offered = False
        self.only_looking = False

    @property
    def num_calls(self) -> int:
        """The number of calls started so far."""
        return self._events.num_calls

    def start(self, name: str, call_id: str = "") -> None:
        self._check_name(name)
        if self.only_looking:
            raise Found
        self._events.start(name, call_id)
        self.calling = True
        self._reader.mark = self._reader.at

    def _check_name(self, name: str) -> None:
        offered = self._functions is None or name in self._functions
        if not name or (self.only_offered and not offered):
            raise Unreadable

    def schema(self, name: str) -> object:
        """Return the parameters of a function; None if its schema is unknown."""
        return None if self._functions is None else self._functions.get(name)

    def argue(self, text: str) -> None:
        self._reader.mark = self._reader.at
        self._events.argue(text)

    def end(self) -> None:
        self._events.end(True)
        self.calling = False
        self._reader.mark = self._reader.at

    def break_off(self) -> None:
        """End a call that has started as incomplete."""
        if self.calling:
            self._events.end(False)
            self.calling = False

    def read(self, form: ToolFormat, bare: bool) -> Steps[None]:
        """Read one call, or a list of them."""
        reader = self._reader
        yield from reader.skip_space()
        if not bare and (yield from reader.match(_FENCES)):
            yield from reader.skip_space()
        c = yield from reader.peek()
        body = _choose(form.bodies, c)
        if isinstance(body, NamedCall):
            yield from self.named(body)
        elif isinstance(body, ParameterCall):
            yield from self._tagged.parameters(body, form.end)
        elif isinstance(body, NestedCall):
            yield from self._tagged.nested(body)
        elif isinstance(body, LiteralCall):
            yield from self._literal(body, form.end)
        elif isinstance(body, PythonCall) and not body.bracketed:
            yield from self._python_lines()
        elif c == "[":
            yield from self._list(form.bodies, bare)
        elif isinstance(body, JsonCall):
            yield from self._object(bare)
        else:
            raise Unreadable

    def _list(self, bodies: tuple[Body, ...], bare: bool) -> Steps[None]:
        """Read calls in brackets."""
        reader = self._reader
        reader.at += 1
        while True:
            yield from reader.skip_space()
            c = yield from reader.peek()
            if c == "{" and any(isinstance(body, KeyedCall) for body in bodies):
                yield from self._keyed()
            elif any(isinstance(body, JsonCall if c == "{" else PythonCall) for body in bodies):
                yield from self._object(bare) if c == "{" else self._python()
            else:
                raise Unreadable
            yield from reader.skip_space()
            if not (yield from reader.match((",",))):
                break
        if (yield from reader.match(("]",))):
            reader.mark = reader.at

    def _object(self, bare: bool) -> Steps[None]:
        """Read `{"name": ..., "arguments": ...}` in any order; both are required if `bare`."""
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
            if key in _NAME_KEYS and name is None:
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
            elif key == "function" and not done and (yield from reader.peek()) == "{":
                yield from self._object(bare)
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

    def _keyed(self) -> Steps[None]:
        """Read `{NAME: {...}}`."""
        reader = self._reader
        yield from reader.expect("{")
        yield from reader.skip_space()
        name = yield from short_string(reader)
        yield from reader.skip_space()
        yield from reader.expect(":")
        yield from reader.skip_space()
        yield from self._arguments(name, self.argue)
        self.end()
        yield from reader.skip_space()
        if (yield from reader.match(("}",))):
            reader.mark = reader.at

    def _whole_call(self, name: str, arguments: str) -> None:
        self.start(name)
        self.argue(arguments)
        self.end()

    def _arguments(self, name: str | None, emit: Emit, call_id: str = "") -> Steps[None]:
        """Read an object, a string that holds one, or null. The call of `name` starts with the arguments."""
        reader = self._reader
        c = yield from reader.peek()
        if c == "{":
            reader.at += 1
            yield from reader.skip_space()
            head = yield from reader.peek()
            if head not in ('"', "'", "}") or not head:
                raise Unreadable
        elif c not in ('"', "'") and (yield from word(reader)) not in ("null", "None"):
            raise Unreadable
        if name is not None:
            self.start(name, call_id)
        if c == "{":
            emit("{")
            yield from balanced(reader, emit, "{")
        elif c in ('"', "'"):
            size = 0

            def count(text: str) -> None:
                nonlocal size
                size += len(text)
                emit(text)

            yield from decoded_string(reader, count, c)
            if not size:
                emit("{}")
        else:
            emit("{}")

    def named(self, body: NamedCall) -> Steps[None]:
        """Read a name, a marker, JSON arguments."""
        reader = self._reader
        if body.before:
            yield from reader.match((body.before,))
        name = yield from reader.whole_run(_NUMBERED_NAME if body.numbered else NAME)
        call_id = ""
        if body.numbered and DIGITS.fullmatch(name.rpartition(":")[2]):
            call_id, name = name, name.rpartition(":")[0]
        name = name.removeprefix(body.prefix)
        if "\n" not in body.between:
            yield from reader.skip_space()
        if body.aside and (yield from reader.match((body.aside,))):
            call_id = yield from reader.whole_run(NAME)
            yield from reader.skip_space()
        if (yield from reader.match(body.between)) is None:
            raise Unreadable
        yield from reader.skip_space()
        yield from self._arguments(name, self.argue, call_id)
        self.end()
        yield from reader.skip_space()
        if body.after and (yield from reader.match((body.after,))):
            reader.mark = reader.at

    def _python_lines(self) -> Steps[None]:
        """Read `NAME(key=value, ...)` once or more, one per line."""
        reader = self._reader
        while True:
            yield from self._python()
            yield from reader.skip_space()
            if not NAME.match((yield from reader.peek())):
                break

    def _python(self) -> Steps[None]:
        """Read `NAME(key=value, ...)`. The call is known when it is whole, or when the text ends in it."""
        reader = self._reader
        name = yield from reader.whole_run(NAME)
        yield from reader.expect("(")
        self._check_name(name)
        parts: list[str] = []
        try:
            yield from self._python_arguments(name, parts)
        except Unreadable:
            if reader.ended and parts:
                self.start(name)
                self.argue("".join(parts))
            raise
        self._whole_call(name, "".join(parts))

    def _python_arguments(self, name: str, parts: list[str]) -> Steps[None]:
        """Read arguments up to the closing bracket; those without a key have the names of the schema, in order."""
        reader = self._reader
        properties = (self._functions or {}).get(name, {}).get("properties")
        keys = list(properties) if isinstance(properties, Mapping) else []
        opening = "{"
        while True:
            yield from reader.skip_space()
            if (yield from reader.match((")",))):
                parts.append("{}" if opening == "{" else "}")
                return
            assert reader.mark is not None
            here = reader.at - reader.mark
            key = yield from reader.whole_run(NAME)
            yield from reader.skip_space()
            if not key or not (yield from reader.match(("=",))):
                reader.at = reader.mark + here
                key = keys[0] if keys else ""
            if not key:
                raise Unreadable
            if self.only_looking:
                self.start(name)
            keys = [one for one in keys if one != key]
            parts.append(f'{opening}"{escaped(key)}": ')
            opening = ", "
            yield from reader.skip_space()
            yield from python_value(reader, parts.append)
            yield from reader.skip_space()
            found = yield from reader.match((",", ")"))
            if found is None:
                raise Unreadable
            if found == ")":
                parts.append("}")
                return

    def _literal(self, body: LiteralCall, end: str) -> Steps[None]:
        """Read `call:NAME{key:value,...}`, of which models leave out the beginning."""
        reader = self._reader
        yield from reader.match((body.before, ":"))
        yield from reader.skip_space()
        name = yield from reader.whole_run(NAME)
        yield from reader.skip_space()
        yield from reader.expect("{")
        self.start(name)
        yield from literal_object(reader, self.argue, body.quote, end)
        self.end()


def _choose(bodies: tuple[Body, ...], c: str) -> Body:
    """Choose the syntax of a call that begins with `c`."""
    for body in bodies:
        if isinstance(body, JsonCall):
            fits = c in ("{", "[")
        elif isinstance(body, (PythonCall, KeyedCall)):
            fits = c == "[" or (isinstance(body, PythonCall) and not body.bracketed)
        elif isinstance(body, (NamedCall, ParameterCall)):
            fits = c not in ("{", "[")
        else:
            fits = True
        if fits:
            return body
    raise Unreadable
