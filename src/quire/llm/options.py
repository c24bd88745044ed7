"""Options of an engine in Python: Quire's own, and vLLM's that change nothing here."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

from quire.config import SECTIONS, EngineConfig
from quire.errors import ConfigError, ModelError
from quire.lazy import Lazy

if TYPE_CHECKING:
    from quire import spelling
    from quire.flags import table
else:
    table, spelling = Lazy("quire.flags.table"), Lazy("quire.spelling")

log = logging.getLogger("quire")


class EngineOptions(Protocol):
    """Maker of a configuration, such as vLLM's EngineArgs."""

    def create_engine_config(self) -> EngineConfig: ...


def engine_config(
    options: Mapping[str, Any], defaults: Mapping[str, Any] = MappingProxyType({})
) -> EngineConfig:
    """Make the configuration that options ask for, None being unset; `defaults` replace Quire's.

    Options of vLLM that change nothing here are named in the log. Raises ConfigError for one that is unknown, wrong, or
    would change a result.
    """
    given = {**defaults, **{name: value for name, value in options.items() if value is not None}}
    if not isinstance(given.get("model", ""), (str, os.PathLike)):
        raise ConfigError(f"model must be a directory or a Hugging Face id, got {given['model']!r}")
    given["model"] = str(given.get("model", ""))
    own = {field.name for section in SECTIONS.values() for field in fields(section)} | {"seed"}
    for notice in table.take_foreign(given) if given.keys() - own else ():
        log.warning("%s", notice)
    return EngineConfig.from_options(**given)


@contextmanager
def as_arguments() -> Iterator[None]:
    """Spell options as Python's arguments in errors of the body."""
    try:
        yield
    except (ConfigError, ModelError) as error:
        error.args = (spelling.as_arguments(str(error)),)
        raise
