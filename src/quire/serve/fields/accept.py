"""Turn a JSON body into an endpoint's struct, by the endpoint's table of fields."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import msgspec

from quire.serve.errors import HttpError, from_field, invalid, unsupported
from quire.serve.fields.shapes import Body, Fields, Shape

MAX_NAME = 64
MAX_UNKNOWN = 64


def accept(
    fields: Fields[Body], given: Any, template_words: Collection[str], strict: bool = False
) -> tuple[Body, list[str]]:
    """Return the body as a struct, and the paths of fields that nobody knows, which are ignored.

    Raises HttpError for a field that is refused or has a wrong value, for one whose name nearly matches a known field,
    and with `strict` for every unknown one.
    """
    reader = _Reader(template_words, strict)
    kept = reader.object(given, fields, "") if isinstance(given, dict) else given
    try:
        return msgspec.convert(kept, fields.body), reader.ignored
    except msgspec.ValidationError as error:
        raise from_field(error, fields.body, kept) from error


class _Reader:
    def __init__(self, template_words: Collection[str], strict: bool) -> None:
        self._words = template_words
        self._strict = strict
        self.ignored: list[str] = []

    def object(self, given: dict[str, Any], shape: Shape, path: str) -> dict[str, Any]:
        """Keep the taken fields of an object at `path`."""
        if shape.kinds and given.get("type", shape.kinds[0]) not in shape.kinds:
            return given
        kept: dict[str, Any] = {}
        for name, value in given.items():
            if value is None and not shape.nulls:
                continue
            if name in shape.taken:
                inner = shape.inner.get(name)
                kept[name] = value if inner is None else self._inside(value, inner, _join(path, name))
            elif shape.template and name in self._words:
                kept[name] = value
            elif name in shape.refused:
                if shape.refused[name].asks(value):
                    raise unsupported(_join(path, name), shape.refused[name].why)
            elif name not in shape.ignored:
                self._unknown(name, shape, path)
        return kept

    def _inside(self, value: Any, shape: Shape, path: str) -> Any:
        if isinstance(value, dict):
            return self.object(value, shape, path)
        if isinstance(value, list):
            return [
                self.object(item, shape, f"{path}[{i}]") if isinstance(item, dict) else item
                for i, item in enumerate(value)
            ]
        return value

    def _unknown(self, name: str, shape: Shape, path: str) -> None:
        place = _join(path, name[:MAX_NAME])
        meant = near(name, shape.names)
        if meant is not None or self._strict:
            raise unknown(place, None if meant is None else _join(path, meant))
        if len(self.ignored) == MAX_UNKNOWN:
            raise invalid(
                f"more than {MAX_UNKNOWN} unknown fields, {place} among them", place, "unknown_parameter"
            )
        self.ignored.append(place)


def unknown(place: str, meant: str | None = None) -> HttpError:
    """Make a 400 for a field that nobody knows, with the one that was `meant`."""
    hint = "Leave it out." if meant is None else f"Did you mean {meant}?"
    return invalid(f"Unknown field: {place}. {hint}", place, "unknown_parameter")


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def near(name: str, known: Iterable[str]) -> str | None:
    """Find the known name that `name` misspells: other case or separators, or one letter wrong (two in long names)."""
    if len(name) > MAX_NAME:
        return None
    plain = _plain(name)
    for other in known:
        letters = _plain(other)
        shortest = min(len(plain), len(letters))
        limit = 0 if shortest < 5 else 1 if shortest < 9 else 2
        if abs(len(plain) - len(letters)) <= limit and _distance(plain, letters) <= limit:
            return other
    return None


def _plain(name: str) -> str:
    return name.lower().replace("_", "").replace("-", "")


def _distance(a: str, b: str) -> int:
    """Edit distance in which swapped neighbours count once (optimal string alignment)."""
    before: list[int] = []
    last = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        row = [i]
        for j, y in enumerate(b, 1):
            cost = min(last[j] + 1, row[-1] + 1, last[j - 1] + (x != y))
            if i > 1 and j > 1 and x == b[j - 2] and a[i - 2] == y:
                cost = min(cost, before[j - 2] + 1)
            row.append(cost)
        before, last = last, row
    return last[-1]
