"""Options of other engines: vLLM's, and those that installed distributions add under the entry point `quire.flags`."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from quire.flags.arguments import add_foreign, lacks
from quire.flags.table import Table
from quire.hooks import FLAGS, load_hooks


class Dialect(Protocol):
    """Dialect of an engine: flags for a parser, and the options of Quire that they are."""

    def add_flags(self, parser: argparse.ArgumentParser, /) -> None:
        """Add the flags that the parser lacks, each with its name as `dest` and without a default."""

    def read_options(self, given: Mapping[str, Any], /) -> tuple[dict[str, Any], list[str]]:
        """Return Quire's options for those given, and a line about each that changes nothing. Raises ConfigError."""


@dataclass(frozen=True, slots=True)
class Added:
    """Dialect whose flags a parser has, and the names of its options there."""

    dialect: Dialect
    names: Collection[str]


def add_dialects(parser: argparse.ArgumentParser, args: Sequence[str], table: Table) -> list[Added]:
    """Add a table's flags, then those of installed dialects if the parser still lacks one of `args`."""
    add_foreign(parser, table())
    return [_add(parser, dialect) for dialect in load_hooks(FLAGS)] if lacks(parser, args) else []


def _add(parser: argparse.ArgumentParser, dialect: Dialect) -> Added:
    before = {action.dest for action in parser._actions}
    dialect.add_flags(parser)
    return Added(dialect, {action.dest for action in parser._actions} - before)


def take_dialect(added: Added, values: dict[str, Any]) -> list[str]:
    """Replace a dialect's options in `values` by Quire's. Returns a line about each that changes nothing."""
    given = {name: values.pop(name) for name in added.names if name in values}
    options, notices = added.dialect.read_options(given)
    if "model" in options and "model_flag" in values:
        options["model_flag"] = options.pop("model")
    values.update(options)
    return notices
