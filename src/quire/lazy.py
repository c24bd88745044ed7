"""Modules that are imported when something of theirs is first used: what most starts do without.

if TYPE_CHECKING:
    import jinja2
else:
    jinja2 = Lazy("jinja2")
"""

from __future__ import annotations

import importlib
from typing import Any


class Lazy:
    """Stands for the module of that name. What it says is looked up in the module, which is imported once."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self._name), name)
