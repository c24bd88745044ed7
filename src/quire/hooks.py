"""Entry points under which an installed distribution adds to Quire. They are looked up when needed, not at import.

- `quire.endpoints`: a `quire.serve.endpoints.Dialect`, whose routes every server gets.
- `quire.flags`: a `quire.flags.dialects.Dialect`, whose options every command takes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from quire.errors import ConfigError
from quire.lazy import Lazy

if TYPE_CHECKING:
    from importlib import metadata
else:
    metadata = Lazy("importlib.metadata")

ENDPOINTS = "quire.endpoints"
FLAGS = "quire.flags"


def load_hooks(group: str) -> list[Any]:
    """Load what installed distributions register under `group`. ConfigError if one cannot be loaded."""
    return [_load(entry) for entry in metadata.entry_points(group=group)]


def _load(entry: metadata.EntryPoint) -> Any:
    try:
        return entry.load()
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{entry.value}, installed for {entry.group}, cannot be loaded: {error}") from error
