"""Formats from a file of the operator's: a Python module with FORMAT, or FORMATS."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any, TypeVar

from quire.errors import ConfigError

F = TypeVar("F")


def load_formats(path: str | None, kind: type[F], option: str) -> tuple[F, ...]:
    """Load the formats of `kind` in the file; () without a file. Raises ConfigError if it fails to load or has none.

    The file is the operator's own code and runs as such.
    """
    if path is None:
        return ()
    spec = importlib.util.spec_from_file_location(f"quire_plugin_{Path(path).stem}", path)
    try:
        if spec is None or spec.loader is None:
            raise ImportError("it is no Python file")
        module: Any = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    except Exception as error:
        raise ConfigError(f"{option} {path!r} cannot be loaded: {type(error).__name__}: {error}") from error
    found = (*getattr(module, "FORMATS", ()), *([module.FORMAT] if hasattr(module, "FORMAT") else []))
    if not found or not all(isinstance(one, kind) for one in found):
        raise ConfigError(
            f"{option} {path!r} must set FORMAT to a {kind.__name__} (quire.text.formats.shapes)"
        )
    return found
