"""Makes this CPU look like an older one: `quire._native` no longer names its best instruction sets.

`pytest --isa avx2` hides what comes before AVX2, in the tests and in all Python processes that they start.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

NATIVE = "quire._native"


def visible(sets: Sequence[str], best: str) -> list[str]:
    """The sets, best first, that a CPU has whose best one is `best`."""
    kept = list(sets[sets.index(best) :])
    return kept if best.startswith("avx512") else [name for name in kept if not name.endswith("_emulated")]


def limit(native: ModuleType | Any, best: str) -> None:
    """Let the module choose and name `best` and older sets alone."""
    found: Callable[[], list[str]] = native.available_isas

    def available_isas() -> list[str]:
        return visible(found(), best)

    def resolve_isa(isa: str) -> str:
        sets = available_isas()
        if isa != "auto" and isa not in sets:
            choice = ", ".join(["auto", *sets])
            raise ValueError(f"isa '{isa}' cannot run on this CPU; choose one of: {choice}")
        return sets[0] if isa == "auto" else isa

    native.available_isas, native.resolve_isa = available_isas, resolve_isa


class Finder:
    """Finds the native module once, as the others would, and limits it when it is loaded."""

    def __init__(self, best: str) -> None:
        self._best = best

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != NATIVE:
            return None
        sys.meta_path.remove(self)  # type: ignore[arg-type]
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def load_and_limit(module: ModuleType) -> None:
                load(module)
                limit(module, self._best)

            spec.loader.exec_module = load_and_limit  # type: ignore[method-assign]
        return spec


def pretend(best: str) -> None:
    """Limit this process, before or after it loads the native module."""
    if NATIVE in sys.modules:
        limit(sys.modules[NATIVE], best)
    else:
        sys.meta_path.insert(0, Finder(best))


def write_site(directory: Path, best: str) -> None:
    """Write a sitecustomize.py that limits each Python process with `directory` on its path."""
    (directory / "sitecustomize.py").write_text(
        f"import runpy\n\nrunpy.run_path({__file__!r})['pretend']({best!r})\n"
    )
