"""Turn a JSON body into an endpoint's struct, by the endpoint's table of fields."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import msgspec

from quire.lazy import Lazy
from quire.serve.errors import HttpError, from_field, invalid, unsupported
from quire.serve.fields.shapes import Body, Fields, Shape

if TYPE_CHECKING:
    from quire import spelling
else:
    spelling = Lazy("quire.spelling")

MAX_NAME = 64  # characters of a name in an error
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
        meant = spelling.near(name, shape.names)
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
