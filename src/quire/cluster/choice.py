"""The choice of a replica for a request. Pure: time is an argument, and nothing is read or sent.

A choice looks at the holders of the longest prefix and at eight others in turn: that is as good as looking at all, and
costs the same for any number of them.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Generic, Literal, TypeVar, get_args

import msgspec
import numpy as np
import xxhash

from quire.cluster.loads import Booking, Replica, State
from quire.cluster.prefixes import Prefixes

Policy = Literal["prefix", "load", "session", "round_robin"]
POLICIES: tuple[Policy, ...] = get_args(Policy)
OTHERS = 8
MOST_HOLDERS = 16
LOST_AFTER = 600.0
MIXER, HALF = np.uint64(0xBF58476D1CE4E5B9), np.uint64(32)
FOUND_WEIGHT = 3
"""Tokens to compute count three times: those found also spare the wait of others."""


class Ask(msgspec.Struct, frozen=True):
    """A request: tokens of its prompt, its prefixes, each `block` tokens longer, the pool of replicas ("": all)."""

    tokens: int
    digests: Sequence[int] = ()
    pool: str = ""
    session: str = ""
    block: int = 256


class _Pool(msgspec.Struct):
    """The replicas of a label that are up: in order, as bits, and hashes of their names."""

    indexes: list[int]
    bits: int
    hashes: np.ndarray[tuple[int], np.dtype[np.uint64]]


R = TypeVar("R", bound=Replica)


class Choice(Generic[R]):
    """Chooses replicas, and books requests there until their end, or for `LOST_AFTER` seconds.

    Routers that work side by side begin their turns at different places (`first`).
    """

    def __init__(self, policy: Policy = "prefix", *, first: int = 0) -> None:
        self._policy = {
            "prefix": self._by_prefix,
            "load": self._by_load,
            "session": self._by_session,
            "round_robin": self._in_turn,
        }[policy]
        self._step = first
        self.replicas: list[R | None] = []
        self.prefixes = Prefixes()
        self.booked: dict[Booking, None] = {}
        self._pools: dict[str, _Pool] = {}
        self._next_check = -math.inf

    def add(self, replica: R, cache_tokens: int = 1 << 20) -> int:
        """Add a replica. The number returned names it from now on."""
        index = self.replicas.index(None) if None in self.replicas else len(self.replicas)
        self.replicas[index : index + 1] = [replica]
        replica.index = index
        self.prefixes.add(index, cache_tokens)
        self._pools.clear()
        return index

    def remove(self, index: int) -> None:
        """Forget a replica. Its number may be given to another."""
        self.booked = {booking: None for booking in self.booked if booking.index != index}
        self.prefixes.clear(index)
        self.replicas[index] = None
        self._pools.clear()

    def set_state(self, index: int, state: State, now: float) -> None:
        """Note a change of state. A replica that comes up starts slowly."""
        replica = self.at(index)
        if state == "up" and replica.state != "up":
            replica.since = now
        replica.state = state
        self._pools.clear()

    def label(self, index: int, labels: Iterable[str]) -> None:
        """Say which pools a replica belongs to."""
        self.at(index).labels = frozenset(labels)
        self._pools.clear()

    def at(self, index: int) -> R:
        """Find a replica by its number."""
        replica = self.replicas[index]
        assert replica is not None
        return replica

    def choose(self, ask: Ask, now: float, excluded: Collection[int] = ()) -> Booking | None:
        """Choose a replica and book the request there; None if none of its pool is up and not excluded."""
        if now >= self._next_check:
            self._next_check = now + 1.0
            for lost in [one for one in self.booked if one.at < now - LOST_AFTER]:
                self.end(lost, now)
        pool = self._pools.get(ask.pool) or self._make_pool(ask.pool)
        bits = pool.bits
        for index in excluded:
            bits &= ~(1 << index)
        if not bits:
            return None
        index = self._policy(ask, pool, bits, now)
        self._step += 1
        replica = self.at(index)
        found = self._found(ask, index, len(ask.digests))
        booking = Booking(index, now, found, ask.tokens - found)
        self.booked[booking] = None
        replica.send(booking, now)
        self.prefixes.touch(index, ask.digests, ask.block)
        return booking

    def end(self, booking: Booking, now: float, *, computed: bool = True) -> None:
        """Release a booking, once. `computed`: its prompt was."""
        if booking in self.booked:
            del self.booked[booking]
            self.at(booking.index).end(booking, now, computed)

    def _by_prefix(self, ask: Ask, pool: _Pool, bits: int, now: float) -> int:
        candidates = self._others(pool, bits)
        depth = self.prefixes.depth(ask.digests, bits, len(ask.digests))
        if depth > 1:  # the first block, of a system prompt, may be everybody's
            holders = self.prefixes.holders[ask.digests[depth - 1]] & bits
            candidates += _some(holders, self._step % len(self.replicas), MOST_HOLDERS)
        return self._least(ask, candidates, depth, now)

    def _by_load(self, ask: Ask, pool: _Pool, bits: int, now: float) -> int:
        return self._least(ask, self._others(pool, bits), 0, now)

    def _by_session(self, ask: Ask, pool: _Pool, bits: int, now: float) -> int:
        """Take the first in the session's order (rendezvous hashing) that does not wait twice as long as others."""
        if not ask.session:
            return self._by_prefix(ask, pool, bits, now)
        others = self._others(pool, bits)
        most = 1.0 + 2 * sum(self.at(index).wait(now) for index in others) / len(others)
        scores = (pool.hashes ^ np.uint64(xxhash.xxh3_64_intdigest(ask.session.encode()))) * MIXER
        scores ^= scores >> HALF
        scores *= MIXER
        while True:
            place = int(scores.argmax())
            index = pool.indexes[place]
            if bits >> index & 1 and self.at(index).wait(now) <= most:
                return index
            scores[place] = 0

    def _in_turn(self, ask: Ask, pool: _Pool, bits: int, now: float) -> int:
        return next(_some(bits, pool.indexes[self._step % len(pool.indexes)], 1))

    def _others(self, pool: _Pool, bits: int) -> list[int]:
        """Name up to eight replicas at equal distances, others at each step."""
        indexes, count = pool.indexes, len(pool.indexes)
        stride = max(1, count // OTHERS)
        places = range(self._step, self._step + stride * min(OTHERS, count), stride)
        found = [index for place in places if bits >> (index := indexes[place % count]) & 1]
        return found or list(_some(bits, indexes[self._step % count], OTHERS))

    def _least(self, ask: Ask, candidates: Iterable[int], depth: int, now: float) -> int:
        """Find the least cost. Of equals, it is the first at or after this step's replica."""
        count, step = len(self.replicas), self._step
        best = (math.inf, count, -1)
        for index in candidates:
            left = ask.tokens - (self._found(ask, index, depth) if depth else 0)
            cost = self.at(index).cost(FOUND_WEIGHT * left, now)
            best = min(best, (cost, (index - step) % count, index))
        return best[2]

    def _found(self, ask: Ask, index: int, most: int) -> int:
        """Estimate the tokens of the prompt in a replica's cache, up to a number of blocks."""
        return min(ask.block * self.prefixes.depth(ask.digests, 1 << index, most), ask.tokens - 1)

    def _make_pool(self, label: str) -> _Pool:
        found = {
            index: xxhash.xxh3_64_intdigest(replica.name.encode())
            for index, replica in enumerate(self.replicas)
            if replica and replica.state == "up" and (not label or label in replica.labels)
        }
        bits = sum(1 << index for index in found)
        pool = _Pool(list(found), bits, np.array(list(found.values()), np.uint64))
        if found:
            self._pools[label] = pool
        return pool


def _some(bits: int, start: int, most: int) -> Iterator[int]:
    """Name members of a set of bits: the first ones from a place on, then from the beginning."""
    for part in (bits >> start << start, bits & ((1 << start) - 1)):
        while part and most:
            low = part & -part
            yield low.bit_length() - 1
            part ^= low
            most -= 1
