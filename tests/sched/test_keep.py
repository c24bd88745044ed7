"""Prefixes that are kept by name: held while there is room, given up before anybody is preempted."""

from __future__ import annotations

import random

import pytest
from fake_executor import FakeExecutor, Journal, alone, drain, request
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.config import SchedulerConfig
from quire.sched import Scheduler

SIZE = 4


def made(
    num_blocks: int, caching: bool = True, max_num_seqs: int = 4
) -> tuple[Scheduler, FakeExecutor, Journal]:
    config = SchedulerConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=64)
    scheduler = Scheduler(config, num_blocks, SIZE, 64, caching)
    return scheduler, FakeExecutor(num_blocks, SIZE, random.Random(0)), Journal()


def test_a_kept_prefix_is_found_after_others_filled_the_cache() -> None:
    scheduler, executor, journal = made(24)
    first = request("a", list(range(1, 18)), 4)
    scheduler.add(first)
    drain(scheduler, executor, journal)
    tokens = [*first.tokens, *journal.tokens["a", 0]]
    assert scheduler.keep("s", first, tokens) == 5
    assert scheduler.stats().num_kept_blocks == scheduler.stats().num_used_blocks == 5
    for i in range(6):
        scheduler.add(request(f"f{i}", [100 + i] * 30, 6))
        drain(scheduler, executor, journal)
    again = request("b", [*tokens, 7], 4)
    scheduler.add(again)
    scheduler.check()
    drain(scheduler, executor, journal)
    assert journal.ends["b", 0].usage.num_cached == len(tokens) - 1
    assert journal.tokens["b", 0] == alone(again, 0, 64)[0]
    scheduler.let_go("s")
    scheduler.let_go("s")
    scheduler.check()
    assert scheduler.stats().num_used_blocks == 0


def test_kept_prefixes_go_before_anybody_is_preempted() -> None:
    scheduler, executor, journal = made(16)
    for i in range(3):
        one = request(f"a{i}", [i + 1] * 9, 3)
        scheduler.add(one)
        drain(scheduler, executor, journal)
        scheduler.keep(f"s{i}", one, [*one.tokens, *journal.tokens[one.id, 0]])
    assert scheduler.stats().num_kept_blocks <= 8, "at most half of the pool"
    many = [request(f"b{i}", [50 + i] * 12, 4) for i in range(4)]
    for one in many:
        scheduler.add(one)
    drain(scheduler, executor, journal)
    assert scheduler.stats().num_preemptions == 0
    assert scheduler.stats().num_kept_blocks == 0
    for one in many:
        assert journal.tokens[one.id, 0] == alone(one, 0, 64)[0]


def test_nothing_is_kept_without_a_cache_or_after_a_reset() -> None:
    scheduler, executor, journal = made(16, caching=False)
    one = request("a", [1] * 9, 3)
    scheduler.add(one)
    drain(scheduler, executor, journal)
    assert scheduler.keep("s", one, one.tokens) == 0
    scheduler, executor, journal = made(16)
    scheduler.add(one)
    drain(scheduler, executor, journal)
    assert scheduler.keep("s", request("x", [1], 1, salt="other"), one.tokens) == 0
    assert scheduler.keep("s", one, one.tokens) == 3
    scheduler.reset_prefix_cache()
    scheduler.check()
    assert scheduler.stats().num_used_blocks == 0


@settings(max_examples=25)
@given(seed=st.integers(0, 1 << 30))
@pytest.mark.parametrize("depth", [1, 2])
def test_random_traces_stay_exact(depth: int, seed: int) -> None:
    rng = random.Random(seed)
    scheduler, executor, journal = made(14)
    ended = []
    for i in range(12):
        text = (
            rng.choice(ended)[1] if ended and rng.random() < 0.6 else [rng.randrange(9)] * rng.randint(1, 9)
        )
        one = request(f"r{i}", [*text, rng.randrange(9)][:40], rng.randint(1, 8), seed=i)
        scheduler.add(one)
        if rng.random() < 0.7:
            drain(scheduler, executor, journal, depth)
            scheduler.check()
            tokens = [*one.tokens, *journal.tokens[one.id, 0]]
            ended.append((one, tokens))
            if rng.random() < 0.7:
                scheduler.keep(f"k{rng.randrange(4)}", one, tokens[: rng.randint(1, len(tokens))])
            if rng.random() < 0.2:
                scheduler.let_go(f"k{rng.randrange(4)}")
            scheduler.check()
    drain(scheduler, executor, journal, depth)
    for one, _ in ended:
        assert journal.tokens[one.id, 0] == alone(one, 0, 64)[0]
    for i in range(4):
        scheduler.let_go(f"k{i}")
    scheduler.check()
    assert scheduler.stats().num_used_blocks == 0
