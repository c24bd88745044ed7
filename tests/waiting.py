"""Waiting for what a test expects, on machines however busy, and keeping processes busy, on machines however fast."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TypeVar

T = TypeVar("T")


def wait_until(condition: Callable[[], T], seconds: float = 60) -> T:
    """Return what `condition()` gives, once it holds; fail after `seconds`."""
    limit = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < limit, "waited in vain"
        time.sleep(0.02)
    return found


@contextmanager
def stopped(*pids: int) -> Iterator[None]:
    """Stop processes, so that they are busy for as long as the block takes, however fast they are."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            with suppress(ProcessLookupError):  # the test has killed it
                os.kill(pid, signal.SIGCONT)
