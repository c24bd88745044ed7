"""Keeps pauses of Python's garbage collector short: an answer may hold millions of objects."""

from __future__ import annotations

import gc

# Young objects are collected often, so cycles that die young are freed. A collection of all objects visits each of
# them and may take a second, so it is rare.
THRESHOLDS = (2000, 10, 5000)


def collect_rarely() -> None:
    """Let collections of all objects be rare in this process, from now on."""
    gc.set_threshold(*THRESHOLDS)


def keep() -> None:
    """Never visit the objects that live now: they live to the end."""
    gc.collect()
    gc.freeze()
