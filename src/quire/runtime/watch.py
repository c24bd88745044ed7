"""Watch: what the engine's loop is doing, how long at most it stayed with it, and signs of life for another process."""

from __future__ import annotations

import mmap
from array import array
from enum import IntEnum
from time import perf_counter

PAGE_BYTES = 8
ONE = 1 << 8  # of the count, above what is being done


class Doing(IntEnum):
    """What the loop may be doing; names are the causes that metrics and logs give."""

    IDLE = 0
    COMMANDS = 1
    ORDERS = 2
    STEP = 3
    PROGRAMS = 4
    GATES = 5
    SCHEDULE = 6
    SLOTS = 7
    FORWARD_PASS = 8
    RESULTS = 9
    SENDING = 10

    @property
    def cause(self) -> str:
        return self.name.lower().replace("_", " ")


IDLE, COMMANDS, ORDERS, STEP, PROGRAMS, GATES, SCHEDULE, SLOTS, FORWARD_PASS, RESULTS, SENDING = map(
    int, Doing
)
"""IDLE and the others are plain numbers: the loop enters several in each step."""
UNMEASURED = (Doing.IDLE, Doing.FORWARD_PASS)
"""UNMEASURED are no stays: the loop waits for work, or does it."""


class Watch:
    """Takes note of each thing that the loop begins. With a `page` another process sees it, even if this one hangs."""

    def __init__(self, page: memoryview | None = None) -> None:
        self._page: memoryview | array[int] = array("Q", (0,)) if page is None else page.cast("Q")
        self._longest = [0.0] * len(Doing)
        self._doing, self._since, self._count = 0, perf_counter(), 0

    def enter(self, doing: int) -> None:
        """Begin something, which ends what was done before."""
        now = perf_counter()
        stay = now - self._since
        if stay > self._longest[self._doing]:
            self._longest[self._doing] = stay
        self._doing, self._since = doing, now
        self._count = count = self._count + ONE
        self._page[0] = count | doing

    @property
    def longest(self) -> dict[str, float]:
        """Return the longest stay in seconds, by cause."""
        return {
            one.cause: self._longest[one] for one in Doing if one not in UNMEASURED and self._longest[one]
        }


class Page:
    """A page that another process writes, which has the file of `descriptor` too."""

    def __init__(self, descriptor: int) -> None:
        self._view = shared_page(descriptor).cast("Q")

    @property
    def doing(self) -> Doing:
        return Doing(self._view[0] % ONE)

    @property
    def count(self) -> int:
        """Count what the other process has begun."""
        return self._view[0] // ONE


def shared_page(descriptor: int) -> memoryview:
    """Map the page of a file, for both processes."""
    return memoryview(mmap.mmap(descriptor, PAGE_BYTES))
