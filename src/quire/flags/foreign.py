"""Options that come with another engine's name: taken out with a notice, or refused by name."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import fields
from typing import Any

from quire.config import SECTIONS
from quire.errors import ConfigError
from quire.flags.table import ForeignFlag, Table, engine_flags

ENGINE_OPTIONS = frozenset(f.name for section in SECTIONS.values() for f in fields(section)) | {"seed"}


def take_foreign(
    options: dict[str, Any], own: Container[str] = ENGINE_OPTIONS, table: Table = engine_flags
) -> list[str]:
    """Remove options that change nothing here (by field name); returns a line about each.

    `own` options stay; the table, by default vLLM's, is read if there are others. Raises ConfigError for one that would
    change a result.
    """
    others = [name for name in options if name not in own]
    return take_flags(options, table(), others) if others else []


def take_flags(
    options: dict[str, Any], table: Mapping[str, ForeignFlag], names: list[str] | None = None
) -> list[str]:
    """Do the same by a table, for all options or for `names`."""
    notices = []
    for name in [name for name in (options if names is None else names) if name in table]:
        value = options.pop(name)
        flag = table[name]
        if not flag.accepts(value):
            raise ConfigError(refusal(flag, value))
        if value is not None and value is not False:
            notices.append(notice(flag))
    return notices


def notice(flag: ForeignFlag) -> str:
    """Say that an option changes nothing, and why."""
    why = flag.why if flag.why.startswith("Quire") else flag.why[0].lower() + flag.why[1:]
    return f"{flag.flag} changes nothing: {why}"


def refusal(flag: ForeignFlag, value: object) -> str:
    """Say why `value` of `flag` is refused, and what to use."""
    given = "" if value is True else f" {value}"
    return f"{flag.flag}{given} is not supported: {flag.why}; nearest is {flag.nearest}"
