"""The prefixes that a replica's cache holds, by name (`quire.cluster.prefixes`), as it tells them to routers."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from itertools import islice

BLOCK_BYTES = 1024
"""BLOCK_BYTES of text make a block of a prefix."""


def written(names: Iterable[int]) -> list[str]:
    """Spell digests as they cross the wire."""
    return [f"{name:016x}" for name in names]


def read(names: Iterable[str]) -> list[int]:
    """Read digests from the wire."""
    return [int(name, 16) for name in names]


class Held:
    """The prefixes in a cache of `capacity` tokens: least recently used out first, of one request the deepest first.

    A router believes in one for each replica. A replica has one and publishes its changes, the last `kept` of them.
    They have numbers from `number` on: a clock's, say, so that they are above those of an earlier life.
    """

    def __init__(self, capacity: int, kept: int = 0, number: int = 0) -> None:
        self.capacity = capacity
        self.number = number
        self.order: dict[int, int] = {}
        self._tokens = 0
        self._changes: deque[tuple[str, list[int]]] = deque(maxlen=kept)

    def touch(self, names: Sequence[int], each: int) -> tuple[list[int], list[int]]:
        """Put a request's prefixes in front, blocks of `each` tokens. Returns what came and what went."""
        order, came, gone = self.order, [], []
        for name in reversed(names):
            had = order.pop(name, 0)
            if had != each:
                self._tokens += each - had
                if not had:
                    came.append(name)
            order[name] = each
        surplus = self._tokens - self.capacity
        if surplus > 0:
            for name, tokens in order.items():
                gone.append(name)
                surplus -= tokens
                if surplus <= 0:
                    break
            self.drop(gone)
        came.reverse()
        changes = [(sign, changed) for sign, changed in (("+", came), ("-", gone)) if changed]
        self._changes += changes
        self.number += len(changes)
        return came, gone

    def drop(self, names: Iterable[int]) -> None:
        """Forget prefixes."""
        for name in names:
            self._tokens -= self.order.pop(name, 0)

    def clear(self) -> None:
        """Forget everything: the cache is empty."""
        self.order.clear()
        self._changes.clear()
        self._tokens = 0
        self.number += 1

    def since(self, number: int) -> tuple[int, bool, list[list[str]]]:
        """Tell the next number, whether to forget everything first, and the changes since a number."""
        missed = self.number - number
        if 0 <= missed <= len(self._changes):
            changes = islice(self._changes, len(self._changes) - missed, None)
            return self.number, False, [[sign, *written(names)] for sign, names in changes]
        return self.number, True, [["+", *written(reversed(self.order))]]
