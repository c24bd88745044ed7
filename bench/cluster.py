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

With `--scheduler real` each replica is the server's own scheduler with its prefix cache, and only the seconds of its
steps are scripted (`bench/cluster_engines.py`). `--seconds` takes the first part of the trace.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # where `bench` is a package

from bench.cluster_engines import Engines
from bench.cluster_policies import POLICIES, Policy, Routers
from bench.cluster_replicas import BLOCK, ENDLESS, Cluster, Request, spread
from quire.serve.held import Held


def simulate(
    trace: list[Request],
    count: int,
    blocks: int,
    policy: Callable[[Cluster], Policy],
    rate: float = 8000.0,
    replicas: type[Cluster] = Cluster,
) -> Cluster:
    """Send the requests of a trace where a policy says."""
    cluster = replicas(count, blocks, rate)
    choose = policy(cluster)
    for request in trace:
        cluster.arrive(request.at)
        cluster.send(request, choose(cluster, request))
    cluster.finish()
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
    trace: list[Request],
    count: int,
    blocks: int,
    routers: int,
    every: float,
    rate: float = 8000.0,
    replicas: type[Cluster] = Cluster,
) -> Cluster:
    """Do the same with the router's own code, as replicas come, go and slow down."""
    cluster = replicas(count, blocks, rate)
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
    cluster.finish()
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
    parser.add_argument("--scheduler", choices=("rules", "real"), default="rules")
    parser.add_argument("--seconds", type=float, default=math.inf)
    args = parser.parse_args()
    replicas = Engines if args.scheduler == "real" else Cluster
    lines = [json.loads(line) for line in args.trace.read_text().splitlines()]
    for count in args.replicas:
        trace = [one for one in spread(lines, max(1, count // 8)) if one.at < args.seconds]
        print(f"{count} replicas, {len(trace)} requests: hit % / imbalance / mean / p50 / p99 s")
        for blocks in args.blocks:
            print(f"  {blocks} blocks: pooled {pooled(trace, count * blocks):.1f}", flush=True)
            if args.weather:
                for routers in (1, 4):
                    rough = storm(trace, count, blocks, routers, 0.2, args.rate, replicas)
                    print(f"  quire, {routers} routers, weather: {rough.figures()}", flush=True)
                continue
            for name in args.policy:
                start = time.perf_counter()
                figures = simulate(trace, count, blocks, POLICIES[name], args.rate, replicas).figures()
                print(f"  {name}: {figures}  ({time.perf_counter() - start:.0f} s)", flush=True)


if __name__ == "__main__":
    main()
