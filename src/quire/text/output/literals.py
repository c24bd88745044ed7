"""Reads JSON, Python and Gemma literals from a `Reader` and writes them as JSON."""

from __future__ import annotations

import json
import re

from quire.text.output.reader import MAX_NAME, Emit, Reader, Steps, Unreadable, starts_of

MAX_DEPTH = 64
CLOSING = {"{": "}", "[": "]", "(": ")"}
_NO_STRING = re.compile(r"[ \t\r\n0-9A-Za-z_+\-.,:]+")
_IN_STRING = re.compile(r'[^"\\\x00-\x1f]+')
_WORD = re.compile(r"[0-9A-Za-z_+\-.]+")
_BARE_KEY = re.compile(r"[^\s:{}\[\],]+")
_BARE_VALUE = re.compile(r"[^,}\]]+")
_HEX = re.compile(r"[0-9A-Fa-f]")
_NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?")
_PYTHON_NUMBER = re.compile(r"([+-]?)(\d*)(?:(\.)(\d*))?([eE][+-]?\d+)?")
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

    Brackets are matched and strings skipped; commas and words are not checked.
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
    """Read a JSON or Python string and emit the text it stands for."""
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
    """Read a JSON string of at most `MAX_NAME` characters."""
    parts: list[str] = []

    def emit(part: str) -> None:
        parts.append(part)
        if sum(map(len, parts)) > MAX_NAME:
            raise Unreadable

    yield from decoded_string(reader, emit)
    return "".join(parts)


def skip_value(reader: Reader) -> Steps[None]:
    """Read any JSON value and drop it."""
    c = yield from reader.peek()
    if c == '"':
        yield from raw_string(reader, _drop)
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


def literal_object(reader: Reader, emit: Emit, quote: str, depth: int = 0) -> Steps[None]:
    """Read the rest of an object with unquoted keys, whose brace is read, and emit it as JSON."""
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
        yield from literal_value(reader, emit, quote, depth + 1)
        yield from reader.skip_space()
        if not (yield from reader.match((",",))):
            yield from reader.expect("}")
            break
    emit("}")


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


def _quoted(reader: Reader, emit: Emit, quote: str) -> Steps[None]:
    """Read text up to `quote`."""
    if not (yield from reader.scan((quote,), starts_of((quote,)), emit)):
        raise Unreadable
    reader.mark = reader.at


def literal_value(reader: Reader, emit: Emit, quote: str, depth: int = 0) -> Steps[None]:
    """Read a value whose strings stand between two `quote`, or any JSON value, and emit it as JSON."""
    if depth > MAX_DEPTH:
        raise Unreadable
    yield from reader.skip_space()
    if (yield from reader.match((quote,))):
        emit('"')
        yield from _quoted(reader, lambda text: emit(escaped(text)), quote)
        emit('"')
        return
    c = yield from reader.peek()
    if c == '"':
        yield from raw_string(reader, emit)
    elif c == "{":
        reader.at += 1
        yield from literal_object(reader, emit, quote, depth)
    elif c == "[":
        reader.at += 1
        yield from _literal_list(reader, emit, quote, depth)
    else:
        text = (yield from reader.whole_run(_BARE_VALUE, 1 << 16)).strip()
        if not text:
            raise Unreadable
        try:
            emit(as_json(text))
        except Unreadable:  # a string whose quotes the model forgot
            emit(f'"{escaped(text)}"')


def _literal_list(reader: Reader, emit: Emit, quote: str, depth: int) -> Steps[None]:
    emit("[")
    first = True
    while True:
        yield from reader.skip_space()
        if (yield from reader.match(("]",))):
            break
        if not first:
            emit(", ")
        first = False
        yield from literal_value(reader, emit, quote, depth + 1)
        yield from reader.skip_space()
        if not (yield from reader.match((",",))):
            yield from reader.expect("]")
            break
    emit("]")
