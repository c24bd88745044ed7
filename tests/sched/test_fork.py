"""Forks share a live sequence's blocks at any token; drops end sequences that nobody reads."""

from __future__ import annotations

import random

import pytest
from fake_executor import FakeExecutor, Journal, Loop, alone, drain, request
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.config import SchedulerConfig
from quire.sched import Scheduler
from quire.types import FinishReason, Request


class World:
    def __init__(
        self, num_blocks: int = 40, caching: bool = True, max_num_seqs: int = 8, depth: int = 1
    ) -> None:
        config = SchedulerConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=64)
        self.scheduler = Scheduler(config, num_blocks, 4, 64, caching)
        self.executor = FakeExecutor(num_blocks, 4, random.Random(0))
        self.journal = Journal()
        self.depth = depth
        self.loop = Loop(self.scheduler, self.executor, depth)

    def add(self, made: Request) -> Request:
        self.journal.take(self.scheduler.add(made))
        return made

    def fork(self, source: str, made: Request, output: list[int]) -> Request:
        self.journal.before[made.id] = output
        self.journal.take(self.scheduler.fork(source, 0, made, output))
        self.scheduler.check()
        return made

    def run(self, tokens: int) -> None:
        """Until the first request has said so many tokens."""
        while len(self.journal.tokens.get(("a", 0), [])) < tokens:
            while self.loop.plan():
                pass
            self.journal.take(self.loop.take())

    def drain(self) -> None:
        while self.loop.flight:
            self.journal.take(self.loop.take())
        drain(self.scheduler, self.executor, self.journal, self.depth)

    def expect(self, made: Request) -> None:
        tokens, reason, _ = alone(made, 0, 64, self.journal.before.get(made.id, ()))
        assert self.journal.tokens[made.id, 0] == tokens
        assert self.journal.ends[made.id, 0].finish_reason is reason


@pytest.mark.parametrize("caching", [True, False])
def test_a_fork_shares_full_blocks_and_copies_the_last_one(caching: bool) -> None:
    world = World(caching=caching)
    source = world.add(request("a", [1, 2, 3, 4, 5], 20))
    world.run(5)
    said = world.journal.tokens["a", 0]
    fork = world.fork("a", request("b", [1, 2, 3, 4, 5], 20, seed=9), said[:4] + [7])
    used = world.scheduler.stats().num_used_blocks
    batch = world.loop.plan()
    assert batch is not None
    (item,) = [item for item in batch.seqs if item.start < 10 and item.tokens[-1] == 7]
    assert (item.start, item.tokens, len(batch.copies)) == (9, [7], 1)
    assert world.scheduler.stats().num_used_blocks == used + 1
    world.drain()
    for made in (source, fork):
        world.expect(made)
    assert world.scheduler.stats().num_used_blocks == 0


@pytest.mark.parametrize("caching", [True, False])
def test_a_fork_keeps_the_blocks_of_a_dropped_sequence(caching: bool) -> None:
    world = World(caching=caching)
    world.add(request("a", [1, 2, 3, 4, 5], 20))
    world.run(6)
    fork = world.fork("a", request("b", [1, 2, 3, 4, 5], 20, seed=9), world.journal.tokens["a", 0][:5])
    world.scheduler.abort("a")
    world.scheduler.check()
    assert world.scheduler.stats().num_used_blocks == 3
    batch = world.loop.plan()
    assert batch is not None
    assert [(item.start, len(item.tokens)) for item in batch.seqs] == [(9, 1)]
    world.drain()
    world.expect(fork)


def test_a_fork_gives_up_its_blocks_when_they_run_dry() -> None:
    world = World(num_blocks=6, caching=False, max_num_seqs=1)
    source = world.add(request("a", [1, 2, 3, 4, 5], 18))
    world.run(3)
    said = list(world.journal.tokens["a", 0])
    forks = [world.fork("a", request(f"f{i}", [1, 2, 3, 4, 5], 15, seed=i), said) for i in range(3)]
    world.drain()
    for made in (source, *forks):
        world.expect(made)
    assert world.scheduler.stats().num_preemptions == 0


def test_a_fork_of_what_has_ended_is_computed_again() -> None:
    world = World(caching=False)
    world.add(request("a", [1, 2, 3], 4))
    world.drain()
    fork = world.fork("a", request("b", [1, 2, 3], 9), world.journal.tokens["a", 0])
    world.drain()
    world.expect(fork)


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (request("a", [1, 2, 3], 9), "choose another id"),
        (request("b", [1, 2, 3], 2), "raise max_tokens"),
        (request("b", [1, 2, 3], 9, n=2), "fork n times"),
        (request("b", [], 9), "the prompt is empty"),
    ],
)
def test_what_cannot_run_ends_at_once(made: Request, says: str) -> None:
    world = World()
    world.add(request("a", [1, 2, 3], 9))
    world.run(2)
    for delta in world.scheduler.fork("a", 0, made, [4, 5]):
        assert delta.finish_reason is FinishReason.ERROR
        assert says in (delta.error or "")
    world.scheduler.check()


def test_other_tenants_and_adapters_share_nothing() -> None:
    world = World(caching=False)
    world.add(request("a", [1, 2, 3, 4, 5], 9))
    world.run(2)
    world.fork("a", request("b", [1, 2, 3, 4, 5], 9, salt="other"), [])
    batch = world.loop.plan()
    assert batch is not None
    assert [item.start for item in batch.seqs if item.start < 5] == [0]


@settings(max_examples=60, deadline=None)
@given(data=st.data(), num_blocks=st.integers(7, 30), caching=st.booleans(), depth=st.integers(1, 3))
def test_beams_of_any_shape_read_their_own_kv(
    data: st.DataObject, num_blocks: int, caching: bool, depth: int
) -> None:
    """A search that forks from beams at any token and drops them: all say what they say alone."""
    world = World(num_blocks, caching, max_num_seqs=data.draw(st.integers(1, 4)), depth=depth)
    live = [world.add(request("a", [1, 2, 3, 4, 5], 20))]
    made = list(live)
    for i in range(data.draw(st.integers(1, 6))):
        for _ in range(data.draw(st.integers(0, 4))):
            while world.loop.plan():
                pass
            if world.loop.flight:
                world.journal.take(world.loop.take())
        source = data.draw(st.sampled_from(live))
        output = [*world.journal.before.get(source.id, []), *world.journal.tokens.get((source.id, 0), [])]
        output = output[: data.draw(st.integers(0, min(len(output), 14)))] + data.draw(
            st.lists(st.integers(0, 9), max_size=2)
        )
        fork = world.fork(source.id, request(f"f{i}", [1, 2, 3, 4, 5], 20, seed=i), output)
        if data.draw(st.booleans()):
            world.scheduler.abort(source.id)
            live.remove(source)
        live.append(fork)
        made.append(fork)
        world.loop.check()
    world.drain()
    for one in made:
        if (one.id, 0) in world.journal.ends:
            world.expect(one)
    assert {one.id for one in live} <= {id for id, _ in world.journal.ends}
    assert world.scheduler.stats().num_used_blocks == 0
    assert not world.scheduler.has_work
