"""Reads JSON objects that a model cut off or malformed, as far as their members can be read."""

from __future__ import annotations

import json
from collections import deque
from typing import Any

from quire.text.output.literals import CLOSING


def partial_object(text: str) -> dict[str, Any]:
    """Read the object that `text` holds; if it breaks off, only the members before that place."""
    whole = _object(text)
    if whole is not None:
        return whole
    for end, closing in reversed(_cuts(text)):
        found = _object(text[:end] + closing)
        if found is not None:
            return found
    return {}


def _object(text: str) -> dict[str, Any] | None:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _cuts(text: str) -> list[tuple[int, str]]:
    """List the last places where the JSON text can end, each with the brackets that close it there."""
    stack: list[str] = []
    cuts: deque[tuple[int, str]] = deque(maxlen=64)
    quoted = escape = False
    for i, c in enumerate(text):
        if quoted:
            quoted = escape or c != '"'
            escape = c == "\\" and not escape
        elif c == '"':
            quoted = True
        elif c in "{[":
            stack.append(CLOSING[c])
            cuts.append((i + 1, "".join(reversed(stack))))
        elif c == ",":
            cuts.append((i, "".join(reversed(stack))))
        elif c in "}]" and stack:
            stack.pop()
            cuts.append((i + 1, "".join(reversed(stack))))
    return list(cuts)
