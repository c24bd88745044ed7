"""Options of an engine in Python: Quire's own, and vLLM's that change nothing here."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Protocol

from quire.config import EngineConfig
from quire.flags.foreign import take_foreign

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
    for notice in take_foreign(given):
        log.warning("%s", notice)
    return EngineConfig.from_options(**given)
