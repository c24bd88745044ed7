"""Reads JSON, Python and Gemma literals from a `Reader` and writes them as JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from quire.text.output.reader import MAX_NAME, Emit, Reader, Steps, Unreadable, starts_of

MAX_DEPTH = 64
CLOSING = {"{": "}", "[": "]", "(": ")"}
_IN_JSON = {"(": "[", ")": "]"}
_NO_STRING = re.compile(r"[ \t\r\n0-9_+\-.,:]+")
_LETTERS = re.compile("[A-Za-z]+")
_IN_STRING = re.compile(r'[^"\\\x00-\x1f]+')
_WORD = re.compile(r"[0-9A-Za-z_+\-.]+")
_BARE_KEY = re.compile(r"[^\s:{}\[\],]+")
_BARE_VALUE = re.compile(r"[^,}\]]+")
_HEX = re.compile(r"[0-9A-Fa-f]")
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_PYTHON_NUMBER = re.compile(r"([+-]?)([0-9]*)(?:(\.)([0-9]*))?([eE][+-]?[0-9]+)?")
_SIMPLE_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "0": "\0", "a": "\a", "v": "\v"}
_WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}


def escaped(text: str) -> str:
    """Escape `text` for the inside of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def raw_string(reader: Reader, emit: Emit) -> Steps[None]:
    """Read a JSON string and emit it as written; raw control characters and unknown escapes are made valid."""
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
    """Read the rest of a JSON object or list and emit it as written, up to the bracket that closes `opened`.

    Brackets are matched, and missing ones added; Python's words, texts and tuples become JSON's. Commas and words are
    not checked. The reader's mark must be before the object.
    """
    stack = [opened]
    while True:
        if part := (yield from reader.run(_NO_STRING)):
            emit(part)
            continue
        if letters := (yield from reader.whole_run(_LETTERS)):
            emit(_WORDS.get(letters, letters))
            continue
        c = yield from reader.peek()
        if c == '"':
            yield from raw_string(reader, emit)
            continue
        if c == "'":
            yield from python_value(reader, emit, 1)
            continue
        if c in CLOSING:
            stack.append(c)
        elif not c or all(c != CLOSING[one] for one in stack):
            raise Unreadable
        else:
            while (closing := CLOSING[stack.pop()]) != c:
                emit(_IN_JSON.get(closing, closing))
        reader.at += 1
        emit(_IN_JSON.get(c, c))
        if not stack:
            return


def decoded_string(
    reader: Reader, emit: Emit, quote: str = '"', closes: Callable[[], Steps[bool]] | None = None
) -> Steps[None]:
    """Read a JSON or Python string and emit the text it stands for. `closes` says whether a quote just read does."""
    yield from reader.expect(quote)
    plain = re.compile(r"[^\\" + quote + "]+")
    while True:
        if part := (yield from reader.run(plain)):
            emit(part)
            continue
        c = yield from reader.take()
        if c == quote:
            if closes is None or (yield from closes()):
                return
            emit(c)
            continue
        c = yield from reader.take()
        if c in "ux":
            code = yield from _code(reader, 4 if c == "u" else 2)
            if 0xD800 <= code < 0xDC00 and (yield from reader.match(("\\u",))):
                low = yield from _code(reader, 4)
                code = 0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00) if low >> 10 == 0x37 else 0xFFFD
            emit("�" if 0xD800 <= code < 0xE000 else chr(code))
        elif c in "\"'\\/":
            emit(c)
        elif c != "\n":  # a continued line in Python
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
    """Read a JSON or Python string of at most `MAX_NAME` characters."""
    parts: list[str] = []

    def emit(part: str) -> None:
        parts.append(part)
        if sum(map(len, parts)) > MAX_NAME:
            raise Unreadable

    quote = "'" if (yield from reader.peek()) == "'" else '"'
    yield from decoded_string(reader, emit, quote)
    return "".join(parts)


def skip_value(reader: Reader) -> Steps[None]:
    """Read any JSON value, or a Python string, and drop it."""
    c = yield from reader.peek()
    if c == '"':
        yield from raw_string(reader, _drop)
    elif c == "'":
        yield from python_value(reader, _drop, 1)
    elif c in ("{", "["):
        reader.at += 1
        yield from balanced(reader, _drop, c)
    elif not (yield from reader.whole_run(_WORD)):
        raise Unreadable


def _drop(text: str) -> None:
    """Ignore text."""


def json_is_whole(text: str) -> bool:
    """Whether `text` is a JSON value."""
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def word(reader: Reader) -> Steps[str]:
    """Read letters, digits and signs."""
    found = yield from reader.whole_run(_WORD)
    return found


def python_value(reader: Reader, emit: Emit, depth: int = 0) -> Steps[None]:
    """Read a Python or JSON literal and emit it as JSON."""
    if depth > MAX_DEPTH:
        raise Unreadable
    c = yield from reader.peek()
    if c in ("'", '"'):
        emit('"')
        yield from _python_string(reader, lambda text: emit(escaped(text)), c, depth > 0)
        emit('"')
    elif c in CLOSING:
        yield from _python_group(reader, emit, c, depth)
    else:
        emit(as_json((yield from word(reader))))


def _python_string(reader: Reader, emit: Emit, quote: str, nested: bool) -> Steps[None]:
    """Read a Python string and emit the text it stands for.

    A quote that nothing follows which may follow a value belongs to the text: models forget to escape. The reader's
    mark must be before the string.
    """
    triple = yield from reader.match((quote * 3,))
    if triple:
        reader.at -= 1

    def closes() -> Steps[bool]:
        if triple:
            return (yield from reader.match((quote * 2,))) is not None
        return (yield from _value_ends(reader, nested))

    yield from decoded_string(reader, emit, quote, closes)


def _value_ends(reader: Reader, nested: bool) -> Steps[bool]:
    """Whether the next text may follow a value: of a list, set or dict if `nested`, else of an argument."""
    assert reader.mark is not None
    here = reader.at - reader.mark
    yield from reader.skip_space()
    c = yield from reader.peek()
    ends = not c or c in (",]}):" if nested else ",)")
    if c and ends and not nested:
        reader.at += 1
        begin = reader.at - reader.mark
        yield from reader.skip_space()
        if c == ",":
            name = yield from reader.whole_run(_WORD)
            yield from reader.skip_space()
            ends = (yield from reader.peek()) == ("=" if name else ")")
        else:
            after = yield from reader.peek()
            ends = after in "],;<" or "\n" in reader.text[reader.mark + begin : reader.at]
    reader.at = reader.mark + here
    return ends


def _python_group(reader: Reader, emit: Emit, opening: str, depth: int) -> Steps[None]:
    """Read the rest of a list, tuple, set or dict."""
    reader.at += 1
    items: list[str] = []
    mapping = opening == "{"
    while True:
        yield from reader.skip_space()
        if (yield from reader.match((CLOSING[opening],))):
            break
        if items:
            yield from reader.expect(",")
            yield from reader.skip_space()
            if (yield from reader.match((CLOSING[opening],))):
                break
        parts: list[str] = []
        yield from python_value(reader, parts.append, depth + 1)
        yield from reader.skip_space()
        if opening == "{":
            named = bool((yield from reader.match((":",))))
            mapping = named if not items else mapping
            if named is not mapping:
                raise Unreadable
            if named:
                key = "".join(parts)
                parts = [key if key.startswith('"') else f'"{escaped(key)}"', ": "]
                yield from reader.skip_space()
                yield from python_value(reader, parts.append, depth + 1)
        items.append("".join(parts))
    emit(("{%s}" if mapping else "[%s]") % ", ".join(items))


def as_json(text: str) -> str:
    """Convert a Python or JSON number or constant to JSON. Unreadable if it is neither."""
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


def literal_object(reader: Reader, emit: Emit, quote: str, end: str, depth: int = 0) -> Steps[None]:
    """Read the rest of an object with unquoted keys, whose brace is read, and emit it as JSON.

    `end` ends the call: quotes and brackets that are open there are closed.
    """
    emit("{")
    first = True
    while True:
        yield from reader.skip_space()
        if (yield from reader.match(("}",))):
            break
        emit('"' if first else ', "')
        yield from _literal_key(reader, emit, quote)
        emit('": ')
        yield from reader.skip_space()
        yield from reader.expect(":")
        first = False
        yield from literal_value(reader, emit, quote, end, depth + 1)
        yield from reader.skip_space()
        if not (yield from reader.match((",",))):
            yield from _close(reader, "}", end)
            break
    emit("}")


def _close(reader: Reader, bracket: str, end: str) -> Steps[None]:
    """Read `bracket`, or nothing where an outer one or the end of the call follows."""
    found = yield from reader.match((bracket, "}", "]", end))
    if not found:
        raise Unreadable
    if found != bracket:
        reader.at -= len(found)


def _literal_key(reader: Reader, emit: Emit, quote: str) -> Steps[None]:
    """Read a key, bare or quoted, and emit it as the inside of a JSON string."""
    if (yield from reader.match((quote,))):
        yield from _quoted(reader, lambda text: emit(escaped(text)), quote)
    elif (yield from reader.peek()) == '"':
        emit(escaped((yield from short_string(reader))))
    else:
        key = yield from reader.whole_run(_BARE_KEY)
        if not key:
            raise Unreadable
        emit(escaped(key))


def _quoted(reader: Reader, emit: Emit, quote: str, end: str = "") -> Steps[None]:
    """Read text up to `quote`, or up to `end`, which stays."""
    markers = (quote, end) if end else (quote,)
    found = yield from reader.scan(markers, starts_of(markers), emit)
    if not found:
        raise Unreadable
    if found == end:
        reader.at -= len(end)
    reader.mark = reader.at


def literal_value(reader: Reader, emit: Emit, quote: str, end: str, depth: int = 0) -> Steps[None]:
    """Read a value whose strings stand between two `quote`, or any JSON value, and emit it as JSON."""
    if depth > MAX_DEPTH:
        raise Unreadable
    yield from reader.skip_space()
    if (yield from reader.match((quote,))):
        emit('"')
        yield from _quoted(reader, lambda text: emit(escaped(text)), quote, end)
        emit('"')
        return
    c = yield from reader.peek()
    if c == '"':
        yield from raw_string(reader, emit)
    elif c == "{":
        reader.at += 1
        yield from literal_object(reader, emit, quote, end, depth)
    elif c == "[":
        reader.at += 1
        yield from _literal_list(reader, emit, quote, end, depth)
    else:
        text = (yield from reader.whole_run(_BARE_VALUE, 1 << 16)).strip()
        if not text:
            raise Unreadable
        try:
            emit(as_json(text))
        except Unreadable:  # a string whose quotes the model forgot
            emit(f'"{escaped(text)}"')


def _literal_list(reader: Reader, emit: Emit, quote: str, end: str, depth: int) -> Steps[None]:
    emit("[")
    first = True
    while True:
        yield from reader.skip_space()
        if (yield from reader.match(("]",))):
            break
        if not first:
            emit(", ")
        first = False
        yield from literal_value(reader, emit, quote, end, depth + 1)
        yield from reader.skip_space()
        if not (yield from reader.match((",",))):
            yield from _close(reader, "]", end)
            break
    emit("]")
