"""A text that arrives in portions, for readers written as coroutines that cannot see where it was split.

A reader is a generator that yields when it needs more text. Its decisions depend on the text alone: it waits until
a decision cannot change any more. JSON and Python literals are read here too. Knows no format and no events.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator
from typing import TypeVar

from quire.text.events import SPACE

T = TypeVar("T")
Steps = Generator[None, None, T]
Emit = Callable[[str], None]

MAX_NAME = 512
MAX_DEPTH = 64
_SPACES = re.compile(f"[{SPACE}]+")
_NO_STRING = re.compile(r"[ \t\r\n0-9A-Za-z_+\-.,:]+")
_IN_STRING = re.compile(r'[^"\\\x00-\x1f]+')
_WORD = re.compile(r"[0-9A-Za-z_+\-.]+")
_HEX = re.compile(r"[0-9A-Fa-f]")
_NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?")
_PYTHON_NUMBER = re.compile(r"([+-]?)(\d*)(?:(\.)(\d*))?([eE][+-]?\d+)?")
_SIMPLE_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "0": "\0", "a": "\a", "v": "\v"}
_WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
CLOSING = {"{": "}", "[": "]", "(": ")"}


class Unreadable(Exception):
    """The text is not what was expected, or ends before it is whole."""


def escaped(text: str) -> str:
    """`text` as the inside of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


class Reader:
    """Text with a position. What lies before both `at` and `mark` is forgotten."""

    def __init__(self) -> None:
        self.text = ""
        self.at = 0
        self.mark: int | None = None
        self.ended = False

    def add(self, text: str) -> None:
        cut = self.at if self.mark is None else self.mark
        self.text = self.text[cut:] + text
        self.at -= cut
        if self.mark is not None:
            self.mark = 0

    def since_mark(self) -> str:
        """What was read since the mark, which is taken away."""
        text = "" if self.mark is None else self.text[self.mark : self.at]
        self.mark = None
        return text

    def peek(self) -> Steps[str]:
        """The next character; empty at the end."""
        while self.at == len(self.text) and not self.ended:
            yield
        return self.text[self.at : self.at + 1]

    def take(self) -> Steps[str]:
        """The next character, read. Unreadable at the end."""
        c = yield from self.peek()
        if not c:
            raise Unreadable
        self.at += 1
        return c

    def run(self, pattern: re.Pattern[str]) -> Steps[str]:
        """Some of the characters that follow and match; empty where the next one does not, or at the end.

        `pattern` must match any part of what it matches. Call again for the rest of the run.
        """
        yield from self.peek()
        found = pattern.match(self.text, self.at)
        if found is None:
            return ""
        self.at = found.end()
        return found.group()

    def whole_run(self, pattern: re.Pattern[str], limit: int = MAX_NAME) -> Steps[str]:
        """All characters that follow and match. Unreadable where they are more than `limit`."""
        parts = ""
        while part := (yield from self.run(pattern)):
            parts += part
            if len(parts) > limit:
                raise Unreadable
        return parts

    def skip_space(self) -> Steps[None]:
        while (yield from self.run(_SPACES)):
            pass

    def match(self, options: tuple[str, ...]) -> Steps[str | None]:
        """Read the longest of `options` that comes next, or nothing."""
        size = max(map(len, options), default=0)
        while True:
            rest = self.text[self.at : self.at + size]
            if self.ended or not any(len(o) > len(rest) and o.startswith(rest) for o in options):
                found = max((o for o in options if rest.startswith(o)), key=len, default=None)
                self.at += len(found or "")
                return found
            yield

    def expect(self, text: str) -> Steps[None]:
        if (yield from self.match((text,))) is None:
            raise Unreadable

    def scan(self, markers: tuple[str, ...], starts: re.Pattern[str] | None, sink: Emit) -> Steps[str]:
        """Hand text to `sink` until one of `markers` is read; `mark` is where it begins. Empty: the end.

        `starts` finds the first characters of markers; None where there are no markers.
        """
        while (yield from self.peek()):
            found = None if starts is None else starts.search(self.text, self.at)
            to = len(self.text) if found is None else found.start()
            if to > self.at:
                passed, self.at = self.text[self.at : to], to
                sink(passed)
            if found is not None:
                self.mark = self.at
                marker = yield from self.match(markers)
                if marker is not None:
                    return marker
                self.mark = None
                self.at += 1
                sink(self.text[self.at - 1])
        return ""


def starts_of(markers: tuple[str, ...]) -> re.Pattern[str] | None:
    """For `Reader.scan`: what finds the first character of any marker."""
    letters = sorted({marker[0] for marker in markers})
    return re.compile("[" + "".join(map(re.escape, letters)) + "]") if letters else None


# --- JSON -----------------------------------------------------------------------------------------------


def raw_string(reader: Reader, emit: Emit) -> Steps[None]:
    """A JSON string as it is written, with raw control characters and unknown escapes made valid."""
    yield from reader.expect('"')
    emit('"')
    while True:
        if part := (yield from reader.run(_IN_STRING)):
            emit(part)
            continue
        c = yield from reader.take()
        if c == "\\":
            c = yield from reader.take()
            emit("\\" + c if c in '"\\/bfnrtu' else ("'" if c == "'" else "\\\\" + escaped(c)))
        elif c == '"':
            emit('"')
            return
        else:
            emit(escaped(c))


def balanced(reader: Reader, emit: Emit, opened: str) -> Steps[None]:
    """The rest of a JSON object or list as it is written, up to the bracket that closes `opened`.

    Brackets are matched and strings respected; commas and words are not checked.
    """
    stack = [opened]
    while True:
        if part := (yield from reader.run(_NO_STRING)):
            emit(part)
            continue
        c = yield from reader.peek()
        if c == '"':
            yield from raw_string(reader, emit)
            continue
        if c in CLOSING and c != "(":
            stack.append(c)
        elif not c or c != CLOSING[stack.pop()]:
            raise Unreadable
        reader.at += 1
        emit(c)
        if not stack:
            return


def decoded_string(reader: Reader, emit: Emit, quote: str = '"') -> Steps[None]:
    """A string of JSON's or Python's, as the text that it means."""
    yield from reader.expect(quote)
    plain = re.compile(r"[^\\" + quote + "]+")
    while True:
        if part := (yield from reader.run(plain)):
            emit(part)
            continue
        c = yield from reader.take()
        if c == quote:
            return
        c = yield from reader.take()
        if c in "ux":
            code = yield from _code(reader, 4 if c == "u" else 2)
            if 0xD800 <= code < 0xDC00 and (yield from reader.match(("\\u",))):
                low = yield from _code(reader, 4)
                code = 0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00) if low >> 10 == 0x37 else 0xFFFD
            emit("�" if 0xD800 <= code < 0xE000 else chr(code))
        elif c in "\"'\\/":
            emit(c)
        elif c != "\n":  # in Python, a line carried on
            emit(_SIMPLE_ESCAPES.get(c, "\\" + c))


def _code(reader: Reader, size: int) -> Steps[int]:
    digits = ""
    while len(digits) < size:
        c = yield from reader.take()
        if not _HEX.match(c):
            raise Unreadable
        digits += c
    return int(digits, 16)


def short_string(reader: Reader) -> Steps[str]:
    """A JSON string's text. Unreadable beyond `MAX_NAME` characters."""
    parts: list[str] = []

    def emit(part: str) -> None:
        parts.append(part)
        if sum(map(len, parts)) > MAX_NAME:
            raise Unreadable

    yield from decoded_string(reader, emit)
    return "".join(parts)


def skip_value(reader: Reader) -> Steps[None]:
    """Any JSON value."""
    c = yield from reader.peek()
    if c == '"':
        yield from raw_string(reader, _drop)
    elif c in ("{", "["):
        reader.at += 1
        yield from balanced(reader, _drop, c)
    elif not (yield from reader.whole_run(_WORD)):
        raise Unreadable


def _drop(text: str) -> None:
    """Take text and do nothing with it."""


def json_is_whole(text: str) -> bool:
    """Whether `text` is a JSON value."""
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def word(reader: Reader) -> Steps[str]:
    """Letters, digits and signs."""
    found = yield from reader.whole_run(_WORD)
    return found


# --- Python -----------------------------------------------------------------------------------------------


def python_value(reader: Reader, emit: Emit, depth: int = 0) -> Steps[None]:
    """A literal of Python's (or JSON's), as JSON."""
    if depth > MAX_DEPTH:
        raise Unreadable
    c = yield from reader.peek()
    if c in ("'", '"'):
        emit('"')
        yield from decoded_string(reader, lambda text: emit(escaped(text)), c)
        emit('"')
    elif c in CLOSING:
        yield from _python_group(reader, emit, c, depth)
    else:
        emit(as_json((yield from word(reader))))


def _python_group(reader: Reader, emit: Emit, opening: str, depth: int) -> Steps[None]:
    reader.at += 1
    emit("{" if opening == "{" else "[")
    first = True
    while True:
        yield from reader.skip_space()
        if (yield from reader.match((CLOSING[opening],))):
            break
        if not first:
            yield from reader.expect(",")
            yield from reader.skip_space()
            if (yield from reader.match((CLOSING[opening],))):
                break
            emit(", ")
        first = False
        if opening == "{":
            if (yield from reader.peek()) not in ("'", '"'):
                raise Unreadable
            yield from python_value(reader, emit, depth + 1)
            yield from reader.skip_space()
            yield from reader.expect(":")
            emit(": ")
            yield from reader.skip_space()
        yield from python_value(reader, emit, depth + 1)
    emit("}" if opening == "{" else "]")


def as_json(text: str) -> str:
    """A word of Python's or JSON's as JSON. Unreadable where it is neither a number nor a constant."""
    if text in _WORDS:
        return _WORDS[text]
    if _NUMBER.fullmatch(text):
        return text
    found = _PYTHON_NUMBER.fullmatch(text.replace("_", ""))
    if found is None or not (found[2] or found[4]):
        raise Unreadable
    sign, whole, point, part, power = found.groups(default="")
    fraction = f".{part or 0}" if point else ""
    return f"{sign.strip('+')}{whole.lstrip('0') or 0}{fraction}{power}"
