"""Replicas by the rules of `bench/cluster.py`, the requests of a trace, and the figures of a run."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from quire.cluster.loads import Load, Replica
from quire.cluster.prefixes import Prefixes
from quire.serve.held import Held

BLOCK = 512
STAMP = 3.0
TOKEN = 0.025
ENDLESS = 1 << 50
Floats = np.ndarray[Any, np.dtype[np.float64]]


class Request(NamedTuple):
    at: float
    tokens: int
    output: int
    blocks: tuple[int, ...]


class Figures(NamedTuple):
    """The share of tokens found, imbalance, and seconds to the first token: mean, median, 99th percentile."""

    hit: float
    imbalance: float
    mean: float
    median: float
    p99: float

    def __str__(self) -> str:
        hit, imbalance, mean, median, p99 = self
        return f"{100 * hit:.1f} / {imbalance:.2f} / {mean:.2f} / {median:.2f} / {p99:.1f}"


def spread(lines: Iterable[dict[str, Any]], copies: int) -> list[Request]:
    """Give the requests of a trace their times, and repeat the trace."""
    lines = list(lines)
    alike: dict[int, int] = {}
    for line in lines:
        alike[line["timestamp"]] = alike.get(line["timestamp"], 0) + 1
    seen: dict[int, int] = {}
    once = []
    for line in lines:
        stamp = line["timestamp"]
        place = seen.get(stamp, 0)
        seen[stamp] = place + 1
        at = stamp / 1000 + STAMP * (place + 0.5) / alike[stamp]
        once.append(Request(at, line["input_length"], line["output_length"], tuple(line["hash_ids"])))
    length = max(request.at for request in once) + 1
    ids = 1 + max(max(request.blocks) for request in once)
    found = [
        Request(
            (request.at + copy * length / copies) % length,
            request.tokens,
            request.output,
            tuple(block + copy * ids for block in request.blocks) if copy else request.blocks,
        )
        for copy in range(copies)
        for request in once
    ]
    return sorted(found, key=lambda request: request.at)


class Cluster:
    """Replicas under a clock that requests move on."""

    def __init__(self, count: int, blocks: int, rate: float) -> None:
        self.count, self.rate = count, rate
        self.capacity = blocks * BLOCK or ENDLESS
        self.step, self.now = 0, 0.0
        self.clear = np.zeros(count)
        """When each replica's queue is empty."""
        self.open = np.zeros(count, np.int64)
        """Requests that are queued, computed or answered."""
        self.computed = np.zeros(count)
        self.speed = np.full(count, rate)
        self.caches = Prefixes()
        for index in range(count):
            self.caches.add(index, self.capacity)
        self.published = [Held(self.capacity, kept=1000) for _ in range(count)]
        """The caches again, as their replicas tell changes to routers."""
        self.ends: list[tuple[float, int]] = []
        self.waits: list[float] = []
        self.pending: list[list[tuple[float, int, Request]]] = [[] for _ in range(count)]
        """Of each replica the requests without a first token: its time, their places in `waits`."""
        self.found = self.asked = 0
        self.ended: list[Request] = []
        """Requests that ended and that routers have not heard of yet."""

    def arrive(self, at: float) -> None:
        """Move the clock."""
        self.now = at
        while self.ends and self.ends[0][0] <= self.now:
            self.open[heapq.heappop(self.ends)[1]] -= 1

    def depth(self, request: Request, index: int) -> int:
        """Count the blocks of a request in a replica's cache."""
        return self.caches.depth(request.blocks, 1 << index, len(request.blocks))

    def send(self, request: Request, index: int, place: int | None = None) -> None:
        """Give a request to a replica, a second time if it has a place in `waits`."""
        found = min(BLOCK * self.depth(request, index), request.tokens - 1)
        left = request.tokens - found
        first = max(self.clear[index], self.now) + left / self.speed[index]
        self.caches.touch(index, request.blocks, BLOCK)
        self.published[index].touch(request.blocks, BLOCK)
        self.clear[index] = first
        self.computed[index] += left
        self.open[index] += 1
        heapq.heappush(self.ends, (first + TOKEN * request.output, index))
        if place is None:
            place = len(self.waits)
            self.waits.append(0.0)
        self.waits[place] = first - request.at
        self.pending[index] = [one for one in self.pending[index] if one[0] > self.now]
        self.pending[index].append((first, place, request))
        self.found += found
        self.asked += request.tokens
        self.step += 1

    def slow(self, index: int, speed: float) -> None:
        """Change the speed of a replica, and of what waits there."""
        factor = self.speed[index] / speed
        self.speed[index] = speed
        waiting = [one for one in self.pending[index] if one[0] > self.now]
        self.pending[index] = []
        for first, place, request in waiting:
            later = self.now + (first - self.now) * factor
            self.waits[place] += later - first
            self.pending[index].append((later, place, request))
        self.clear[index] = self.now + max(0.0, self.clear[index] - self.now) * factor

    def die(self, index: int) -> list[tuple[int, Request]]:
        """Forget the cache and the queue of a replica. Returns the requests that wait there, with their places."""
        self.caches.clear(index)
        self.published[index].clear()
        waiting = [(place, request) for first, place, request in self.pending[index] if first > self.now]
        self.pending[index] = []
        self.clear[index] = self.now
        return waiting

    def tell(self, replica: Replica, index: int, at: float) -> None:
        """Tell a router what a replica says of its rate and its load."""
        replica.rate = float(self.speed[index])
        replica.word(Load(queued=int(max(self.clear[index] - at, 0.0) * self.speed[index])), at)

    def waiting(self) -> Floats:
        """Tell the seconds of work queued at each replica."""
        return np.maximum(self.clear - self.now, 0.0)

    def finish(self) -> None:
        """Let all requests end."""

    def first_of(self, best: np.ndarray[Any, Any]) -> int:
        """Break ties: `best` marks the equals."""
        places = np.flatnonzero(best)
        start = self.step % self.count
        return int(places[np.searchsorted(places, start) % len(places)])

    def figures(self) -> Figures:
        """Sum up."""
        waits = np.sort(self.waits)
        median, worst = (float(waits[int(share * (len(waits) - 1))]) for share in (0.5, 0.99))
        imbalance = float(self.computed.max() / self.computed.mean())
        return Figures(
            round(self.found / self.asked, 4),
            round(imbalance, 3),
            round(float(waits.mean()), 3),
            round(median, 3),
            round(worst, 2),
        )
