"""Defers imports that most starts do not need until they are first used.

if TYPE_CHECKING:
    import jinja2
else:
    jinja2 = Lazy("jinja2")
"""

from __future__ import annotations

import importlib
from typing import Any


class Lazy:
    """A stand-in for a module. The first access to an attribute imports it."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self._name), name)
