"""Options under another engine's names: those that exist here, those that change nothing, those that are refused."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from quire.flags.table import ForeignFlag, take_flags

log = logging.getLogger("quire")


@dataclass(frozen=True, slots=True)
class Dialect:
    """`names` are Quire's names of another engine's options; `foreign` those that Quire lacks."""

    names: Mapping[str, str] = field(default_factory=dict)
    foreign: Mapping[str, ForeignFlag] = field(default_factory=dict)

    def translated(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Options that are set, under Quire's names. The log has a line about each that changes nothing.

        Raises ConfigError for one that would change a result. Names that are in no table stay as they are.
        """
        options = {name: value for name, value in given.items() if value is not None}
        for notice in take_flags(options, self.foreign):
            log.warning("%s", notice)
        return {self.names.get(name, name): value for name, value in options.items()}
