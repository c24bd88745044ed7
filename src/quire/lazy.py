"""Defers imports that most starts do not need until they are first used.

if TYPE_CHECKING:
    import jinja2
else:
    jinja2 = Lazy("jinja2")

`lazy_methods` does the same for a class that lends its methods to another one.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

from quire.errors import ConfigError


class Lazy:
    """A stand-in for a module. The first access to an attribute imports it."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self._name), name)


class _LazyMethod:
    """A method of a class in a module that is imported when the method is first asked for."""

    def __init__(self, module: str, kind: str, name: str) -> None:
        self._module, self._kind, self._name = module, kind, name

    def __get__(self, instance: object, owner: type) -> Any:
        kind = getattr(importlib.import_module(self._module), self._kind)
        return vars(kind)[self._name].__get__(instance, owner)


def lazy_methods(module: str, kind: str, names: str) -> Any:
    """Make a stand-in for the class `kind` of `module`: a base that has its methods, all of them in `names`."""
    return type(kind, (), {name: _LazyMethod(module, kind, name) for name in names.split()})


def missing(*packages: str) -> list[str]:
    """List the packages that are not installed, without importing any."""
    return [name for name in packages if importlib.util.find_spec(name) is None]


def need(feature: str, *packages: str) -> None:
    """Raise ConfigError with the line that installs `packages`, which `feature` needs, unless all are there."""
    if lacking := missing(*packages):
        raise ConfigError(f"{feature} needs {' and '.join(lacking)}: pip install {' '.join(lacking)}")
