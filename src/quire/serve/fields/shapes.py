"""Describe the fields of a body: taken, ignored and why, refused and why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import msgspec

Body = TypeVar("Body", bound=msgspec.Struct)


@dataclass(frozen=True, slots=True)
class Refused:
    """A field that would change the answer and is not implemented.

    A value that asks for nothing is ignored: one of `neutral`, an empty text and, unless `off` or `empty` say
    otherwise, false and an empty list or object.
    """

    why: str
    neutral: tuple[Any, ...] = ()
    empty: bool = True
    off: bool = True

    def asks(self, value: Any) -> bool:
        """Tell whether the value asks for something."""
        if value is None or value == "" or (value is False and self.off):
            return False
        if self.empty and value in ([], {}):
            return False
        return not any(type(value) is type(known) and value == known for known in self.neutral)


@dataclass(frozen=True, slots=True)
class Shape:
    """The fields of one object: taken with its meaning, or ignored or refused with the reason.

    `inner` describes taken fields that are objects or lists of objects. With `template`, names that the chat template
    reads are taken too. With `nulls`, null is a value; elsewhere a null field is absent. With `kinds`, an object of
    another `type` is taken as it is.
    """

    taken: Mapping[str, str]
    ignored: Mapping[str, str] = field(default_factory=dict)
    refused: Mapping[str, Refused] = field(default_factory=dict)
    inner: Mapping[str, Shape] = field(default_factory=dict)
    template: bool = False
    nulls: bool = False
    kinds: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """List all known names."""
        return (*self.taken, *self.ignored, *self.refused)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fields(Shape, Generic[Body]):
    """The fields of the body that `path` takes, which becomes a `body`; by default the struct's own.

    What is taken is not ignored, and what is ignored is not refused, so that tables of other servers' fields fit all.
    """

    taken: Mapping[str, str] = field(default_factory=dict)
    path: str
    body: type[Body]

    def __post_init__(self) -> None:
        if not self.taken:
            object.__setattr__(self, "taken", dict.fromkeys(self.body.__struct_fields__, ""))
        ignored = {name: why for name, why in self.ignored.items() if name not in self.taken}
        refused = {n: rule for n, rule in self.refused.items() if n not in self.taken and n not in ignored}
        object.__setattr__(self, "ignored", ignored)
        object.__setattr__(self, "refused", refused)


def names(text: str) -> dict[str, str]:
    """Take fields of an inner object, whose names say what they mean."""
    return dict.fromkeys(text.split(), "")
