"""Shares of a pool that all users have in common: owners take turns, and who holds most gives way first."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from typing import Generic, TypeVar

T = TypeVar("T")


def largest_holder(holdings: Iterable[tuple[str, int]]) -> str:
    """Name the owner whose holdings are most together; of equals the first."""
    totals: Counter[str] = Counter()
    for owner, amount in holdings:
        totals[owner] += amount
    return max(totals, key=totals.__getitem__)


def next_to_go(held: Iterable[tuple[T, str, int]]) -> T:
    """Choose what makes room: the first thing of the owner with most. Each has its owner and its amount beside it."""
    things = list(held)
    largest = largest_holder((owner, amount) for _, owner, amount in things)
    return next(thing for thing, owner, _ in things if owner == largest)


class Pool:
    """Counts what owners hold of a limit (None: no limit).

    An owner below its share, the limit over the number of owners, may exceed the limit up to twice.
    """

    def __init__(self, limit: int | None) -> None:
        self.limit, self.total = limit, 0
        self._held: Counter[str] = Counter()

    def add(self, owner: str, amount: int) -> None:
        """Count what an owner takes, or with a negative amount gives back."""
        self.total += amount
        self._held[owner] += amount
        if not self._held[owner]:
            del self._held[owner]

    def has_room(self, owner: str, amount: int) -> bool:
        """Tell whether the owner may take the amount."""
        if self.limit is None or self.total + amount <= self.limit:
            return True
        held = self._held.get(owner, 0)
        owners = len(self._held) + (not held)
        return held + amount <= self.limit // owners and self.total + amount <= 2 * self.limit


class Turns(Generic[T]):
    """Things that wait, of which owners take turns: each has one before any has another."""

    def __init__(self) -> None:
        self._waiting: dict[str, deque[T]] = {}  # by owner, in the order of turns
        self._latest = ""

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def put(self, owner: str, thing: T) -> None:
        """Have a thing wait for the owner's turn, behind the owner's others."""
        self._waiting.setdefault(owner, deque()).append(thing)

    def next(self) -> T:
        """Take the thing whose turn it is."""
        if self._latest in self._waiting:  # it has had a turn: others go first
            self._waiting[self._latest] = self._waiting.pop(self._latest)
        self._latest = next(iter(self._waiting))
        return self._take(self._latest, 0)

    def drop(self, owner: str, thing: T) -> None:
        """Forget a thing, if it waits."""
        if thing in self._waiting.get(owner, ()):
            self._take(owner, self._waiting[owner].index(thing))

    def make_room(self, owner: str) -> T | None:
        """Take the newest thing of the owner with most; None if with one more that is the owner who asks."""
        counts = [(owner, 1), *((one, len(things)) for one, things in self._waiting.items())]
        largest = largest_holder(counts)
        return None if largest == owner else self._take(largest, -1)

    def _take(self, owner: str, place: int) -> T:
        things = self._waiting[owner]
        thing = things[place]
        del things[place]
        if not things:
            del self._waiting[owner]
        return thing
