"""Tells how far long work is if somebody watches: a terminal, or a log. Short work tells nothing."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from quire.lazy import Lazy

meter = Lazy("quire.meter")
log = logging.getLogger(__name__)
Told = Callable[[int], None]  # called with the bytes or things that were done since the last call


def untold(count: int) -> None:
    """Tell nothing."""


def progress(label: str, total: int | None = None, unit: str = "") -> AbstractContextManager[Told]:
    """Tell of work until the block ends. Call the function after each part of it; without `unit`, parts are bytes."""
    watched = log.isEnabledFor(logging.INFO) or sys.stderr.isatty()
    return meter.telling(meter.Work(label, total, unit)) if watched else nullcontext(untold)
