"""Shared: values that slots of one request have in common. Knows slots and keys; knows no request."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar

S = TypeVar("S")
V = TypeVar("V")


class Shared(Generic[V]):
    """Makes a value for the first slot that asks by a key, and forgets it with the last slot that has it.

    Keys may hold ids of objects: the source of a value is kept as long as the value.
    """

    def __init__(self) -> None:
        self._entries: dict[Hashable, tuple[V, Any, set[int]]] = {}  # value, source, slots
        self._keys: dict[int, Hashable] = {}

    def take(self, slot: int, key: Hashable, source: S, make: Callable[[S], V]) -> V:
        """Give a slot the value of `key`, which `make` makes of `source` if no other slot has it."""
        self.clear(slot)
        if key not in self._entries:
            self._entries[key] = make(source), source, set()
        value, _, slots = self._entries[key]
        slots.add(slot)
        self._keys[slot] = key
        return value

    def of(self, slot: int) -> V:
        """Return the value of a slot that took one."""
        return self._entries[self._keys[slot]][0]

    def clear(self, slot: int) -> None:
        """Forget a slot. Unknown slots are ignored."""
        if slot in self._keys:
            key = self._keys.pop(slot)
            slots = self._entries[key][2]
            slots.remove(slot)
            if not slots:
                del self._entries[key]
