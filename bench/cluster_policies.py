"""How requests are sent to the replicas of `bench/cluster.py`: rules of others, bounds, and the router's own code."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import numpy as np

from bench.cluster_replicas import BLOCK, ENDLESS, Cluster, Floats, Request
from quire.cluster.choice import Ask, Choice
from quire.cluster.loads import Booking, Replica, State
from quire.cluster.prefixes import Prefixes

Policy = Callable[[Cluster, Request], int]


def round_robin(cluster: Cluster, request: Request) -> int:
    return cluster.step % cluster.count


def fewest_requests(cluster: Cluster, request: Request) -> int:
    return cluster.first_of(cluster.open == cluster.open.min())


def least_wait(cluster: Cluster, request: Request) -> int:
    waits = cluster.waiting()
    return cluster.first_of(waits == waits.min())


def hashed(cluster: Cluster, request: Request) -> int:
    """By the second block: the first is everybody's."""
    block = request.blocks[min(1, len(request.blocks) - 1)]
    return block * 2654435761 % (1 << 32) % cluster.count


def members(bits: int) -> list[int]:
    found = []
    while bits:
        found.append((bits & -bits).bit_length() - 1)
        bits &= bits - 1
    return found


def depths(cluster: Cluster, request: Request, caches: Prefixes | None = None) -> Floats:
    """Tell the leading blocks of a request in each cache."""
    holders = (caches or cluster.caches).holders
    found = np.zeros(cluster.count)
    here = all_of_them = (1 << cluster.count) - 1
    for depth, block in enumerate(request.blocks, 1):
        here &= holders.get(block, 0)
        if not here:
            break
        found[slice(None) if here == all_of_them else members(here)] = depth
    return found


def tokens_left(cluster: Cluster, request: Request, caches: Prefixes | None = None) -> Floats:
    """Tell the tokens of a request that each replica would compute."""
    return np.maximum(request.tokens - BLOCK * depths(cluster, request, caches), 1)


def longest_prefix(cluster: Cluster, request: Request) -> int:
    """Of equals, that with the fewest requests."""
    found = depths(cluster, request)
    best = found == found.max()
    return cluster.first_of(best & (cluster.open == cluster.open[best].min()))


def thresholds(cluster: Cluster, request: Request) -> int:
    """Follow SGLang's rule."""
    most, least = cluster.open.max(), cluster.open.min()
    even = most - least <= 64 or most <= 1.5 * least
    if even and depths(cluster, request).max() > 0.3 * len(request.blocks):
        return longest_prefix(cluster, request)
    return fewest_requests(cluster, request)


def scores(cluster: Cluster, request: Request) -> int:
    waits = cluster.waiting()
    total = 3 * depths(cluster, request) / len(request.blocks)
    total += 2 * (1 - waits / (waits.max() or 1))
    total += 2 * (1 - cluster.open / (cluster.open.max() or 1))
    return cluster.first_of(total == total.max())


def least_time(weight: int) -> Policy:
    """Make the policy of the least time to the first token, over all replicas."""

    def choose(cluster: Cluster, request: Request) -> int:
        cost = cluster.waiting() + weight * tokens_left(cluster, request) / cluster.rate
        return cluster.first_of(cost == cost.min())

    return choose


def sampled(weight: int) -> Policy:
    """Make the same over the holders of the longest prefix and eight others."""

    def choose(cluster: Cluster, request: Request) -> int:
        count, step = cluster.count, cluster.step
        candidates = {(step + j * max(1, count // 8)) % count for j in range(8)}
        depth = cluster.caches.depth(request.blocks, (1 << count) - 1, len(request.blocks))
        if depth > 1:
            candidates |= set(members(cluster.caches.holders[request.blocks[depth - 1]]))
        best = (math.inf, 0, 0)
        for index in candidates:
            found = min(BLOCK * cluster.depth(request, index), request.tokens - 1)
            wait = max(0.0, cluster.clear[index] - cluster.now)
            cost = wait + weight * (request.tokens - found) / cluster.rate
            best = min(best, (cost, (index - step) % count, index))
        return best[2]

    return choose


class Believer:
    """Least time, if nothing were ever evicted."""

    def __init__(self, cluster: Cluster) -> None:
        self.caches = Prefixes()
        for index in range(cluster.count):
            self.caches.add(index, ENDLESS)

    def __call__(self, cluster: Cluster, request: Request) -> int:
        cost = cluster.waiting() + 3 * tokens_left(cluster, request, self.caches) / cluster.rate
        index = cluster.first_of(cost == cost.min())
        self.caches.touch(index, request.blocks, BLOCK)
        return index


class Stale:
    """Least time by the waits of each `age` seconds: they pass as time does, and own sends are added."""

    def __init__(self, cluster: Cluster, age: float) -> None:
        self.age, self.at = age, -math.inf
        self.waits = np.zeros(cluster.count)

    def __call__(self, cluster: Cluster, request: Request) -> int:
        if cluster.now - self.at >= self.age:
            self.waits, self.at = cluster.waiting(), cluster.now
        left = tokens_left(cluster, request) / cluster.rate
        cost = np.maximum(self.waits - (cluster.now - self.at), 0.0) + left
        index = cluster.first_of(cost == cost.min())
        self.waits[index] += left[index]
        return index


class Routers:
    """The router's own code. Requests go to the routers in turn; each hears from the replicas every so many seconds."""

    def __init__(self, cluster: Cluster, count: int, every: float) -> None:
        self.every, self.heard = every, 0
        firsts = [random.Random(router).randrange(1 << 16) for router in range(count)]  # as routers draw them
        self.choices = [Choice(first=first) for first in (firsts if count > 1 else [0])]
        self.sent: dict[int, tuple[Choice, Booking]] = {}
        self.numbers = [[0] * cluster.count for _ in range(count)]
        for choice in self.choices:
            for index in range(cluster.count):
                room = cluster.capacity * (1 if count == 1 else 2)
                choice.add(Replica(f"{index}", rate=cluster.rate), room)

    def __call__(self, cluster: Cluster, request: Request) -> int:
        if int(cluster.now / self.every) != self.heard:
            self.heard = int(cluster.now / self.every)
            self.hear(cluster, self.heard * self.every)
        choice = self.choices[cluster.step % len(self.choices)]
        booking = choice.choose(Ask(request.tokens, request.blocks, block=BLOCK), cluster.now)
        assert booking
        self.end(request, cluster.now)
        self.sent[id(request)] = choice, booking
        return booking.index

    def end(self, request: Request, now: float) -> None:
        """Release the booking of a request that ended, or goes to another replica."""
        if sent := self.sent.pop(id(request), None):
            sent[0].end(sent[1], now)

    def set_state(self, index: int, state: State, now: float) -> None:
        """Tell all routers; what a replica held it holds no longer."""
        for choice in self.choices:
            choice.set_state(index, state, now)
            if state == "down":
                choice.prefixes.clear(index)

    def hear(self, cluster: Cluster, at: float) -> None:
        """Take the replicas' word on load and cache, and the ends of requests."""
        for request in cluster.ended:
            self.end(request, at)
        cluster.ended.clear()
        for choice, numbers in zip(self.choices, self.numbers, strict=True):
            for index, held in enumerate(cluster.published):
                cluster.tell(choice.at(index), index, at)
                if held.number != numbers[index]:
                    numbers[index], reset, events = held.since(numbers[index])
                    choice.prefixes.events(index, events, reset=reset, each=BLOCK)


POLICIES: dict[str, Callable[[Cluster], Policy]] = {
    "round robin": lambda _: round_robin,
    "fewest requests": lambda _: fewest_requests,
    "least wait": lambda _: least_wait,
    "hash": lambda _: hashed,
    "prefix only": lambda _: longest_prefix,
    "thresholds": lambda _: thresholds,
    "scores": lambda _: scores,
    "min TTFT": lambda _: least_time(1),
    "min TTFT x3": lambda _: least_time(3),
    "sampled": lambda _: sampled(1),
    "sampled x3": lambda _: sampled(3),
    "min TTFT x3, belief": Believer,
    "min TTFT, loads 1 s old": lambda cluster: Stale(cluster, 1.0),
    "min TTFT, loads 5 s old": lambda cluster: Stale(cluster, 5.0),
    "quire": lambda cluster: Routers(cluster, 1, 0.2),
    "quire, four routers, words 1 s old": lambda cluster: Routers(cluster, 4, 1.0),
    "quire, four routers, words 0.2 s old": lambda cluster: Routers(cluster, 4, 0.2),
}
