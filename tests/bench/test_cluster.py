"""The simulator of replicas: its published rows, a second program, and what the router's own code reaches."""

from __future__ import annotations

import itertools
import json
import random
from collections import OrderedDict
from functools import cache
from typing import Any

import pytest

from bench import cluster
from bench.cluster_engines import Engines
from bench.cluster_replicas import Request
from quire.cluster.loads import Replica
from tests.shared import DATA, needs

TRACES = DATA / "traces-mooncake"


@cache
def conversations() -> list[Any]:
    return read("conversation_trace.jsonl")


def read(name: str) -> list[Any]:
    lines = (TRACES / name).read_text().splitlines()
    found: list[Any] = cluster.spread([json.loads(line) for line in lines], 1)
    return found


@cache
def made_up() -> list[Any]:
    """Conversations over one system prompt: each turn is the one before and some more."""
    rng = random.Random(0)
    turns: list[list[int]] = []
    lines: list[dict[str, Any]] = []
    for stamp in range(0, 180_000, 3000):
        for _ in range(rng.randrange(1, 12)):
            blocks = list(rng.choice(turns)) if turns and rng.random() < 0.6 else [0]
            blocks += range(10_000 * len(lines), 10_000 * len(lines) + rng.randrange(1, 25))
            tokens = 512 * (len(blocks) - 1) + rng.randrange(1, 513)
            turns.append(blocks[:-1])
            lines.append(
                {
                    "timestamp": stamp,
                    "input_length": tokens,
                    "output_length": rng.randrange(1, 500),
                    "hash_ids": blocks,
                }
            )
    found: list[Any] = cluster.spread(lines, 1)
    return found


def second_program(trace: list[Any], count: int, blocks: int, weight: int) -> tuple[float, float]:
    """Compute the share found and the mean time to a first token of the policy of least time, from the rules alone."""
    caches = [OrderedDict[int, None]() for _ in range(count)]
    clear = [0.0] * count
    found = 0
    waits = []
    for step, request in enumerate(trace):
        best: tuple[float, int, int] | None = None
        for turn in range(count):
            index = (step + turn) % count
            depth = 0
            while depth < len(request.blocks) and request.blocks[depth] in caches[index]:
                depth += 1
            left = max(request.tokens - 512 * depth, 1)
            cost = max(clear[index] - request.at, 0.0) + weight * left / 8000.0
            if best is None or cost < best[0]:
                best = cost, index, left
        assert best
        _, index, left = best
        clear[index] = max(clear[index], request.at) + left / 8000.0
        waits.append(clear[index] - request.at)
        found += request.tokens - left
        for block in reversed(request.blocks):
            caches[index][block] = None
            caches[index].move_to_end(block)
        while len(caches[index]) > blocks:
            caches[index].popitem(last=False)
    return found / sum(request.tokens for request in trace), sum(waits) / len(waits)


@pytest.mark.parametrize(("policy", "weight"), [("min TTFT", 1), ("min TTFT x3", 3)])
@pytest.mark.parametrize("blocks", [100, 400])
def test_a_second_program_finds_the_same(policy: str, weight: int, blocks: int) -> None:
    figures = cluster.simulate(made_up(), 4, blocks, cluster.POLICIES[policy]).figures()
    hit, mean = second_program(made_up(), 4, blocks, weight)
    assert (figures.hit, figures.mean) == (round(hit, 4), round(mean, 3))


GOLDEN = {
    "round robin": "28.7 / 1.05 / 1.92 / 1.49 / 6.9",
    "fewest requests": "30.4 / 1.07 / 2.20 / 1.70 / 6.8",
    "least wait": "28.4 / 1.03 / 1.52 / 1.29 / 5.0",
    "prefix only": "35.3 / 4.00 / 100.51 / 90.64 / 238.4",
    "thresholds": "50.2 / 1.35 / 1.42 / 1.14 / 5.9",
    "scores": "42.8 / 1.05 / 1.23 / 1.09 / 4.7",
    "sampled x3": "50.3 / 1.36 / 1.20 / 1.03 / 5.0",
    "min TTFT x3, belief": "49.4 / 1.33 / 1.24 / 1.03 / 5.7",
    "quire": "50.3 / 1.36 / 1.20 / 1.03 / 5.0",
    "min TTFT, loads 1 s old": "49.5 / 1.20 / 1.12 / 1.00 / 4.0",
    "quire, four routers, words 0.2 s old": "50.6 / 1.46 / 1.23 / 1.03 / 5.1",
}


@pytest.mark.parametrize("policy", GOLDEN)
def test_a_made_up_trace(policy: str) -> None:
    assert str(cluster.simulate(made_up(), 4, 400, cluster.POLICIES[policy]).figures()) == GOLDEN[policy]


TABLE = {
    (500, "thresholds"): "8.6 / 1.04 / 2.82 / 1.66 / 15.3",
    (500, "scores"): "8.7 / 1.02 / 1.74 / 1.08 / 11.2",
    (500, "min TTFT x3, belief"): "8.5 / 1.04 / 1.58 / 0.84 / 11.6",
    (2000, "fewest requests"): "7.4 / 1.01 / 2.86 / 1.66 / 15.7",
    (2000, "least wait"): "7.7 / 1.04 / 1.46 / 0.82 / 10.6",
    (2000, "hash"): "26.7 / 1.10 / 2.83 / 1.33 / 17.1",
    (2000, "min TTFT x3"): "25.3 / 1.03 / 1.22 / 0.59 / 9.8",
    (0, "min TTFT x3"): "36.1 / 1.06 / 1.06 / 0.48 / 9.1",
}
"""Rows of eight replicas on Mooncake's conversation trace, found by others with the same rules."""


@needs(TRACES)
@pytest.mark.parametrize(("blocks", "policy"), TABLE)
def test_the_published_rows(blocks: int, policy: str) -> None:
    figures = cluster.simulate(conversations(), 8, blocks, cluster.POLICIES[policy]).figures()
    assert str(figures) == TABLE[blocks, policy]


@needs(TRACES)
def test_a_published_row_of_loads_that_are_old() -> None:
    lines = [json.loads(line) for line in (TRACES / "conversation_trace.jsonl").read_text().splitlines()]
    policy = cluster.POLICIES["min TTFT, loads 1 s old"]
    figures = cluster.simulate(cluster.spread(lines, 8), 64, 2000, policy).figures()
    assert str(figures) == "22.5 / 1.34 / 1.22 / 0.61 / 9.8"


@needs(TRACES)
def test_pooled_caches() -> None:
    found = [f"{cluster.pooled(conversations(), 8 * blocks):.1f}" for blocks in (500, 2000, 8000)]
    assert found == ["8.8", "26.8", "36.6"]


@needs(TRACES)
def test_the_routers_own_code_reaches_the_best_policy() -> None:
    """And four routers that hear from the replicas five times a second stay close to one."""
    one = cluster.simulate(conversations(), 8, 2000, cluster.POLICIES["quire"]).figures()
    assert one.mean <= 1.03 * 1.22
    assert one.hit >= 0.97 * 0.253
    assert one.imbalance <= 1.15
    assert one.p99 <= 10
    some = conversations()[:2000]
    alone, four = (
        cluster.simulate(some, 8, 2000, lambda its, n=count: cluster.Routers(its, n, 0.2)).figures()
        for count in (1, 4)
    )
    assert four.mean <= 1.1 * alone.mean


def test_several_routers_and_weather() -> None:
    """Replicas die, drain and slow down: each request is answered, and four routers do as well as one."""
    trace = made_up()
    calm = cluster.simulate(trace, 4, 400, cluster.POLICIES["quire"])
    rough = cluster.storm(trace, 4, 400, 1, 0.2)
    four = cluster.storm(trace, 4, 400, 4, 0.2)
    for one in (calm, rough, four):
        assert len(one.waits) == len(trace)
        assert min(one.waits) > 0
    assert calm.figures().mean < rough.figures().mean < 4 * calm.figures().mean
    assert four.figures().mean < 1.1 * rough.figures().mean


# --- the scheduler of each replica under a scripted clock ------------------------------------------------


def sent(*requests: tuple[float, int, int, tuple[int, ...]], blocks: int = 100) -> Any:
    """One replica of 8,000 tokens a second that got these requests."""
    one = Engines(1, blocks, 8000.0)
    for request in itertools.starmap(Request, requests):
        one.arrive(request.at)
        one.send(request, 0)
    return one


def test_a_step_takes_what_its_tokens_take() -> None:
    alone = sent((1.0, 2000, 5, (0, 1, 2, 3)))
    alone.finish()
    assert alone.waits == [pytest.approx(2000 / 8000)]
    assert alone.engines[0].now == pytest.approx(1.25 + 4 * 0.025)
    assert not alone.engines[0].live
    assert alone.open[0] == 0


def test_a_prompt_is_found_again_with_its_answer_beside_it() -> None:
    twice = sent((0.0, 2048, 9, (0, 1, 2, 3)), (5.0, 2348, 9, (0, 1, 2, 3, 4)))
    twice.finish()
    assert twice.waits[1] == pytest.approx(300 / 8000)
    assert twice.figures().hit == round(2048 / (2048 + 2348), 4)
    assert list(twice.computed) == [2048 + 300]


def test_a_short_prompt_goes_before_a_long_one_as_in_a_server() -> None:
    both = sent((0.0, 400, 400, (0,)), (0.5, 40_000, 9, tuple(range(100, 179))), (0.6, 500, 9, (200,)))
    both.finish()
    assert both.waits[2] < 0.5 < 5.0 < both.waits[1]


def test_what_a_replica_tells_is_what_it_has_to_do() -> None:
    one = sent((0.0, 4000, 9, tuple(range(8))), (0.0, 4000, 9, tuple(range(8, 16))))
    replica = Replica("one", rate=8000.0)
    one.tell(replica, 0, 0.0)
    assert replica.wait(0.0) == pytest.approx(1.0)
    one.arrive(0.5)
    one.tell(replica, 0, 0.5)
    assert replica.wait(0.5) == pytest.approx(0.5, abs=0.11)  # a step is under way
    assert replica.running == 2
    one.slow(0, 4000.0)
    one.finish()
    assert max(one.waits) == pytest.approx(1.5, abs=0.11)


def test_what_a_dead_replica_had_begun_goes_on_elsewhere() -> None:
    pair = Engines(2, 100, 8000.0)
    pair.send(Request(0.0, 1000, 100, (0, 1)), 0)
    pair.send(Request(0.0, 20_000, 100, tuple(range(10, 50))), 0)
    pair.arrive(1.0)
    begun, waits = pair.die(0)
    for place, request in (begun, waits):
        pair.send(request, 1, place)
    pair.finish()
    assert pair.waits[0] < 0.3
    assert pair.waits[1] > 1.0 + 20_000 / 8000
    assert 0 < pair.computed[1] - 21_000 < 100  # and what was made of the first answer
    assert pair.engines[1].scheduler.stats().generation_tokens < 200


@cache
def in_turn() -> Any:
    return cluster.simulate(made_up(), 4, 400, cluster.POLICIES["round robin"], replicas=Engines)


@pytest.mark.parametrize("routers", [1, 4])
def test_routers_over_real_schedulers(routers: int) -> None:
    """In calm and in weather all requests are answered; the router does better than turns."""
    trace = made_up()
    turns = in_turn()
    calm = cluster.simulate(trace, 4, 400, lambda its: cluster.Routers(its, routers, 0.2), replicas=Engines)
    rough = cluster.storm(trace, 4, 400, routers, 0.2, replicas=Engines)
    for one in (turns, calm, rough):
        assert len(one.waits) == len(trace)
        assert min(one.waits) > 0
        assert not one.open.any()
    assert calm.figures().mean < 0.8 * turns.figures().mean
    assert calm.figures().mean < rough.figures().mean < 4 * calm.figures().mean
