"""Finds the real packages whose names this distribution carries."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import distributions

OWN = "quire-compat"  # the keyword of the metadata that this distribution carries for a name
REAL = ("vllm", "sglang", "tensorrt-llm", "tensorrt")


def installed(names: Sequence[str] = REAL) -> list[str]:
    """List the packages of `names` that are installed."""
    return [name for name in names if _has(name)]


def _has(name: str) -> bool:
    return any(found.metadata["Keywords"] != OWN for found in distributions(name=name))


def message(found: Sequence[str]) -> str:
    """Why quire-compat does not go with real packages, and what to do."""
    names = " and ".join(found)
    return (
        f"quire-compat does not install beside {names}, whose names it carries: use another environment, or "
        f"`pip uninstall {' '.join(found)}` first"
    )
