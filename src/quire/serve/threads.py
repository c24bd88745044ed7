"""Run long work beside the event loop, in threads, so that no request waits for the work of another."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")

# Bodies up to this many bytes are worked on at once: a thread costs more.
INLINE_BYTES = 16384
# Up to this many entries of log-probabilities, too.
FEW_SCORES = 1 << 14
# Larger ones have one thread of their own, and cannot hold up the others.
LARGE_BYTES = 1 << 20


async def within(seconds: float, job: Coroutine[Any, Any, T]) -> T:
    """Await `job`. Raises asyncio.TimeoutError after `seconds`.

    `asyncio.wait_for` would run it in a task of its own, which costs turns of the event loop.
    """
    if sys.version_info >= (3, 11):
        async with asyncio.timeout(seconds):
            return await job
    return await asyncio.wait_for(job, seconds)


class Threads:
    """Threads by the size of the body that a job works on."""

    def __init__(self) -> None:
        self._middle = ThreadPoolExecutor(2, "quire-work")
        self._large = ThreadPoolExecutor(1, "quire-large")

    async def run(self, size: int, job: Callable[[], T], inline: bool = True) -> T:
        """Run `job`: at once if the body is short and the job may run `inline`, else in a thread."""
        if inline and size <= INLINE_BYTES:
            return job()
        threads = self._middle if size <= LARGE_BYTES else self._large
        return await asyncio.get_running_loop().run_in_executor(threads, job)
