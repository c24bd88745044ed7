"""Options that come with another engine's name: taken out with a notice, or refused by name. Knows the table alone."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

from quire.errors import ConfigError
from quire.flags.table import FOREIGN, ForeignFlag


def take_foreign(
    options: dict[str, Any], own: Container[str] = (), table: Mapping[str, ForeignFlag] = FOREIGN
) -> list[str]:
    """Remove from `options` (by field name) those that change nothing here; returns a line about each.

    `own` are names of options that the caller has: they stay, whatever the table says. The default table is vLLM's.

    Raises ConfigError for one that would change a result.
    """
    notices = []
    for name in [name for name in options if name in table and name not in own]:
        value = options.pop(name)
        flag = table[name]
        if not flag.accepts(value):
            raise ConfigError(refusal(flag, value))
        if value is not None and value is not False:
            notices.append(notice(flag))
    return notices


def notice(flag: ForeignFlag) -> str:
    """The line about an option that changes nothing."""
    why = flag.why if flag.why.startswith("Quire") else flag.why[0].lower() + flag.why[1:]
    return f"{flag.flag} changes nothing: {why}"


def refusal(flag: ForeignFlag, value: object) -> str:
    """Why `value` of `flag` is refused, and what to use."""
    given = "" if value is True else f" {value}"
    return f"{flag.flag}{given} is not supported: {flag.why}; nearest is {flag.nearest}"
