"""vLLM's --compilation-config: which steps are captured as graphs. Its other keys change nothing here."""

from __future__ import annotations

from typing import Any

from quire.errors import ConfigError
from quire.options import json_object

MODES = "NONE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"
"""MODES of graphs; all but NONE are Quire's own graphs, which hold any mix of decoding and chunks."""


def read_graphs(
    given: Any, eager: bool, sizes: tuple[str, ...], most: int | None
) -> tuple[bool, tuple[str, ...], int | None]:
    """Whether no steps are captured, the sizes of those that are, and their bound; options of its keys win.

    `given` is JSON, or a level of compilation. ConfigError: a mode that nobody has, or sizes that are none.
    """
    is_level = isinstance(given, int) or (isinstance(given, str) and given.isdecimal())
    keys = {} if is_level else json_object("--compilation-config", given)
    mode = str(keys.get("cudagraph_mode") or "FULL").upper()
    if mode not in MODES:
        raise ConfigError(f"--compilation-config: cudagraph_mode must be {' or '.join(MODES)}, got {mode}")
    listed, bound = keys.get("cudagraph_capture_sizes") or (), keys.get("max_cudagraph_capture_size")
    if not isinstance(listed, (list, tuple)) or not isinstance(bound, int | None):
        raise ConfigError("--compilation-config: capture sizes are a list of numbers, and their most is one")
    eager = eager or mode == "NONE" or keys.get("use_cudagraph") is False
    return eager, sizes or tuple(map(str, listed)), bound if most is None else most
