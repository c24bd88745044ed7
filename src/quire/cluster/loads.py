"""The load of a replica, in seconds: its own word, and what was sent to it since. Time is an argument."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from itertools import takewhile
from typing import Literal

import msgspec

State = Literal["up", "draining", "ejected", "down"]
SLOW_START = 15.0
"""Seconds in which a replica's share of the load grows from `LEAST_SHARE` after it came up."""
LEAST_SHARE = 0.05
OWN_SENDS = 5.0
"""Seconds for which a send is remembered, to be added to a word from before it."""


class Load(msgspec.Struct, frozen=True):
    """A replica's word: tokens of prompts not yet computed, requests, tokens of cache that no running request holds.

    `silent` are the seconds since its engine's last sign of life; the rates are those that it measured so far.
    """

    step: int = 0
    queued: int = 0
    running: int = 0
    waiting: int = 0
    free: int | None = None
    silent: float = 0.0
    prefill_rate: float | None = None
    decode_rate: float | None = None


class Booking(msgspec.Struct, eq=False):
    """A request on its way: `found` tokens are expected in the cache, `left` not."""

    index: int
    at: float
    found: int
    left: int
    ended: bool = False


class Replica:
    """What is known of a replica: the pools it is in, tokens of prompts and of answers that it computes in a second."""

    def __init__(
        self, name: str, labels: Iterable[str] = (), *, rate: float = 1000.0, state: State = "up"
    ) -> None:
        self.name, self.labels, self.state = name, frozenset(labels), state
        self.index = -1  # its number in a choice
        self.rate, self.decode_rate = rate, math.inf
        self.since = self.clear = -math.inf  # when it came up; when its queue will be empty
        self.running = 0
        self.free: float = math.inf
        self._sends: deque[Booking] = deque()

    def word(self, load: Load, now: float, age: float = 0.0) -> None:
        """Take its word, written `age` seconds ago. What was sent since then is added."""
        written = now - age
        self.rate, self.decode_rate = load.prefill_rate or self.rate, load.decode_rate or self.decode_rate
        self.clear = written + load.queued / self.speed(now)
        self.running = load.running
        self.free = math.inf if load.free is None else load.free
        later = [*takewhile(lambda one: one.at > written, reversed(self._sends))]
        for booking in reversed(later):
            self._count(booking, now)

    def send(self, booking: Booking, now: float) -> None:
        """Count a request as soon as it is sent."""
        while self._sends and self._sends[0].at < now - OWN_SENDS:
            self._sends.popleft()
        self._sends.append(booking)
        self._count(booking, now)

    def end(self, booking: Booking, now: float, computed: bool) -> None:
        """Count a request no longer. One whose prompt was not computed gives back its part of the queue."""
        booking.ended = True
        self.running = max(0, self.running - 1)
        if not computed and booking in self._sends:
            self._sends.remove(booking)
            self.clear -= booking.left / self.speed(now)

    def wait(self, now: float) -> float:
        """Estimate the seconds of work in its queue."""
        return max(0.0, self.clear - now)

    def cost(self, tokens: float, now: float) -> float:
        """Estimate the seconds to a first token: the queue, tokens to compute or make room for, a step of others."""
        work = tokens if tokens <= self.free else 2 * tokens - self.free
        return self.wait(now) + work / self.speed(now) + self.running / self.decode_rate

    def speed(self, now: float) -> float:
        """Tell the tokens a second that it is given: soon after it came up less than it can."""
        share = (now - self.since) / SLOW_START
        return self.rate * max(share, LEAST_SHARE) if share < 1 else self.rate

    def _count(self, booking: Booking, now: float) -> None:
        self.clear = max(self.clear, booking.at) + booking.left / self.speed(now)
        self.free -= booking.left
        self.running += not booking.ended
