"""Waiting for what a test expects, on machines however busy, and keeping processes busy, on machines however fast."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress


def wait_until(condition: Callable[[], object], seconds: float = 60) -> None:
    """Return once `condition()` holds; fail after `seconds`."""
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit, "waited in vain"
        time.sleep(0.02)


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
