"""A simulator of replicas behind a router: tokens found in caches, evenness of loads, seconds to the first token.

    python bench/cluster.py TRACE.jsonl [--replicas 8 64] [--blocks 500 2000 0] [--policy "min TTFT" quire] [--weather]

A trace has a line for each request: `timestamp` (ms), `input_length`, `output_length`, `hash_ids` (blocks of 512
tokens, equal where prefixes are), as Mooncake publishes them. Time is virtual and nothing draws lots, so figures do not
depend on the machine, and another program with these rules finds the same:

- Requests: the k of one stamp come in order at stamp + 3 (j + 1/2) / k s. Each eight replicas have a copy of the trace:
  of m copies, copy c has block ids of its own and starts c D / m later, modulo D, which is the last time + 1 s.
- Replicas: prompts, first come first served, at `--rate` tokens/s; an output token takes 25 ms, beside and unhindered.
  A cache has a number of blocks (0: no end); least recently used out first, of one request the deepest first. What is
  found is decided on arrival; at least one token is computed.
- Ties: the first of equals at or after replica (requests so far) mod N.
- A row is tokens found, % / tokens computed by the busiest replica beside the mean / seconds to the first token: mean /
  median / 99th percentile. Shares are rounded to four digits first, seconds to three, the last to two.

The policies named `quire` are the router's own code with its own beliefs: it knows its own sends, and at times the
replicas' word on load and cache; several routers take requests in turn. `--weather` shows it while replicas die and
come back, drain, and slow down to a half.
"""

from __future__ import annotations

import argparse
import heapq
import json
import math
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from quire.cluster.choice import Ask, Choice
from quire.cluster.loads import Load, Replica, State
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

    def waiting(self) -> Floats:
        """Tell the seconds of work queued at each replica."""
        return np.maximum(self.clear - self.now, 0.0)

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


class Routers:
    """The router's own code. Requests go to the routers in turn; each hears from the replicas every so many seconds."""

    def __init__(self, cluster: Cluster, count: int, every: float) -> None:
        self.every, self.heard = every, 0
        self.choices = [Choice(first=3 * router) for router in range(count)]
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
        return booking.index

    def set_state(self, index: int, state: State, now: float) -> None:
        """Tell all routers; what a replica held it holds no longer."""
        for choice in self.choices:
            choice.set_state(index, state, now)
            if state == "down":
                choice.prefixes.clear(index)

    def hear(self, cluster: Cluster, at: float) -> None:
        """Take the replicas' word on load and cache."""
        queued = (np.maximum(cluster.clear - at, 0) * cluster.speed).tolist()
        for choice, numbers in zip(self.choices, self.numbers, strict=True):
            for index, held in enumerate(cluster.published):
                choice.at(index).rate = float(cluster.speed[index])
                choice.at(index).word(Load(queued=int(queued[index])), at)
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
    "quire": lambda cluster: Routers(cluster, 1, 0.2),
    "quire, four routers, words 1 s old": lambda cluster: Routers(cluster, 4, 1.0),
    "quire, four routers, words 0.2 s old": lambda cluster: Routers(cluster, 4, 0.2),
}


def simulate(
    trace: list[Request], count: int, blocks: int, policy: Callable[[Cluster], Policy], rate: float = 8000.0
) -> Cluster:
    """Send the requests of a trace where a policy says."""
    cluster = Cluster(count, blocks, rate)
    choose = policy(cluster)
    for request in trace:
        cluster.arrive(request.at)
        cluster.send(request, choose(cluster, request))
    return cluster


def weather(count: int, length: float) -> list[tuple[float, str, int]]:
    """Tell what happens: of eight replicas one dies each minute for 40 s, some drain, some are slow for two."""
    found = []
    for every, start, lasts, begins, ends, first in (
        (60.0, 30.0, 40.0, "dies", "up", 0),
        (90.0, 50.0, 30.0, "drains", "up", 3),
        (150.0, 70.0, 120.0, "slows", "recovers", 5),
    ):
        steps = int((length - start) / every * count / 8)
        for k in range(steps):
            at, index = start + k * every * 8 / count, (7 * k + first) % count
            found += [(at, begins, index), (at + lasts, ends, index)]
    return sorted(found)


def storm(
    trace: list[Request], count: int, blocks: int, routers: int, every: float, rate: float = 8000.0
) -> Cluster:
    """Do the same with the router's own code, as replicas come, go and slow down."""
    cluster = Cluster(count, blocks, rate)
    choose = Routers(cluster, routers, every)
    events = weather(count, trace[-1].at)[::-1]
    away = np.zeros(count, np.int64)
    for request in trace:
        while events and events[-1][0] <= request.at:
            at, event, index = events.pop()
            cluster.arrive(at)
            if event in ("slows", "recovers"):
                cluster.slow(index, rate / 2 if event == "slows" else rate)
                continue
            away[index] += 1 if event != "up" else -1
            choose.set_state(
                index, "up" if not away[index] else "down" if event == "dies" else "draining", at
            )
            for place, lost in cluster.die(index) if event == "dies" else []:
                cluster.send(lost, choose(cluster, lost), place)
        cluster.arrive(request.at)
        cluster.send(request, choose(cluster, request))
    return cluster


def pooled(trace: list[Request], blocks: int) -> float:
    """Tell the hit % of one cache, least recently used out first."""
    held = Held(blocks * BLOCK or ENDLESS)
    found = 0
    for request in trace:
        depth = next(
            (i for i, block in enumerate(request.blocks) if block not in held.order), len(request.blocks)
        )
        found += min(BLOCK * depth, request.tokens - 1)
        held.touch(request.blocks, BLOCK)
    return 100 * found / sum(request.tokens for request in trace)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trace", type=Path)
    parser.add_argument("--replicas", type=int, nargs="+", default=[8])
    parser.add_argument("--blocks", type=int, nargs="+", default=[500, 2000, 8000, 0])
    parser.add_argument("--policy", nargs="+", default=list(POLICIES))
    parser.add_argument("--rate", type=float, default=8000.0)
    parser.add_argument("--weather", action="store_true")
    args = parser.parse_args()
    lines = [json.loads(line) for line in args.trace.read_text().splitlines()]
    for count in args.replicas:
        trace = spread(lines, max(1, count // 8))
        print(f"{count} replicas, {len(trace)} requests: hit % / imbalance / mean / p50 / p99 s")
        for blocks in args.blocks:
            print(f"  {blocks} blocks: pooled {pooled(trace, count * blocks):.1f}", flush=True)
            if args.weather:
                for routers in (1, 4):
                    print(
                        f"  quire, {routers} routers, weather: {storm(trace, count, blocks, routers, 0.2).figures()}"
                    )
                continue
            for name in args.policy:
                start = time.perf_counter()
                figures = simulate(trace, count, blocks, POLICIES[name], args.rate).figures()
                print(f"  {name}: {figures}  ({time.perf_counter() - start:.0f} s)", flush=True)


if __name__ == "__main__":
    main()
