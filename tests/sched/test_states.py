"""Snapshots of recurrent states: where they are taken, what goes on from them, and which of them stay."""

from __future__ import annotations

import random
from typing import Any

import pytest
from fake_executor import FakeExecutor, Journal, Loop, alone, drain, request
from msgspec.structs import replace

from quire.config import SchedulerConfig
from quire.radix import RadixNode
from quire.sched import Scheduler
from quire.sched.pool import BlockPool
from quire.sched.prefix import PrefixIndex
from quire.sched.states import Snapshot, StatePool
from quire.state_rows import StateRows
from quire.types import FinishReason

SIZE, GRID, STRIDE = 4, 16, 64


class World:
    """A scheduler for a model with recurrent states, and a device that asserts whose state it reads."""

    def __init__(
        self, others: int = 30, depth: int = 1, budget: int = 64, draft_rate: float = 0.0, **options: Any
    ) -> None:
        options = {"num_blocks": 400, "caching": True, "running": 8, "in_each_block": False, **options}
        rows = StateRows(
            options["running"] + others, options["running"], 6, options["in_each_block"], GRID, STRIDE
        )
        self.scheduler = Scheduler(
            SchedulerConfig(max_num_batched_tokens=budget),
            options["num_blocks"],
            SIZE,
            800,
            options["caching"],
            rows=rows,
        )
        self.executor = FakeExecutor(options["num_blocks"], SIZE, random.Random(0), draft_rate, rows=rows)
        self.loop = Loop(self.scheduler, self.executor, depth)
        self.journal, self.depth, self.count = Journal(), depth, 0

    def say(self, tokens: list[int], max_tokens: int = 20, **options: Any) -> tuple[list[int], int]:
        """What a request answers when nothing else runs, and how many of its tokens were not computed."""
        self.count += 1
        made = request(f"r{self.count}", tokens, max_tokens, **options)
        self.scheduler.add(made)
        drain(self.scheduler, self.executor, self.journal, self.depth)
        said = self.journal.tokens[made.id, 0]
        assert said == alone(made, 0, 800)[0]
        return said, self.journal.ends[made.id, 0].usage.num_cached

    @property
    def num_snapshots(self) -> int:
        return self.scheduler.stats().num_snapshots


def text(count: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(11), k=count)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("draft_rate", [0.0, 0.7])
@pytest.mark.parametrize("budget", [10, 64, 300])
def test_a_conversation_goes_on_where_the_answer_ended(budget: int, draft_rate: float, depth: int) -> None:
    world = World(depth=depth, budget=budget, draft_rate=draft_rate)
    tokens = text(50)
    for turn in range(8):
        said, cached = world.say(tokens, 30)
        if turn:
            assert cached >= len(tokens) - 9 - 1, "the last answer is computed again"
        tokens = [*tokens, *said, *text(8, turn)]


def test_an_answer_that_ends_while_the_next_step_is_in_flight_is_kept_to_its_end() -> None:
    world = World(depth=2)
    tokens = text(21)
    ends = alone(request("", tokens, 10), 0, 800)[0]
    last = next(i for i in range(3, 10) if ends[i] not in ends[:i])
    said, _ = world.say(tokens, 10, stop_token_ids=[ends[last]])
    tokens += said
    assert world.say([*tokens, 1, 2])[1] == len(tokens)


@pytest.mark.parametrize("budget", [10, 300])
def test_an_answer_that_the_next_turn_changes_is_computed_from_the_grid(budget: int) -> None:
    """Reasoning is left out of later turns, templates change the end of a turn, a stop string cuts a token."""
    world = World(budget=budget)
    tokens = text(150)
    said, _ = world.say(tokens, 60)
    assert world.say([*tokens, *said[:50], 1, 2])[1] >= 200 - GRID
    assert world.say([*tokens[:-2], 1, 2, 3])[1] >= 148 - GRID - SIZE


@pytest.mark.parametrize("length", [203, 250])
def test_the_third_request_of_a_shared_prompt_computes_only_its_own_tokens(length: int) -> None:
    world = World()
    shared = text(length)
    cached = [world.say([*shared, *text(90, seed)])[1] for seed in range(1, 6)]
    assert cached[0] == 0
    assert cached[1] >= length // STRIDE * STRIDE
    assert all(length - GRID < found <= length for found in cached[2:])


def test_the_same_prompt_computes_less_than_a_block_again() -> None:
    world = World()
    tokens = text(101)
    assert [world.say(tokens)[1] for _ in range(3)] == [0, 100, 100]


def test_samples_of_a_request_share_its_prompt() -> None:
    world = World()
    world.scheduler.add(request("r", text(102), 5, n=6))
    drain(world.scheduler, world.executor, world.journal)
    assert [world.journal.ends["r", i].usage.num_cached for i in range(6)] == [0, *[100] * 5]


@pytest.mark.parametrize("caching", [False, True])
def test_without_snapshots_nothing_is_shared_and_nobody_waits(caching: bool) -> None:
    world = World(others=0, caching=caching)
    assert [world.say(text(60))[1] for _ in range(2)] == [0, 0]
    world.scheduler.add(request("r", text(60), 5, n=3))
    assert len(drain(world.scheduler, world.executor, world.journal)[0].seqs) == 2
    assert world.num_snapshots == 0


def test_states_as_small_as_blocks_are_kept_in_each() -> None:
    world = World(others=200, in_each_block=True)
    tokens = text(120)
    world.say(tokens, 50)
    for cut in range(SIZE + 1, 120, 7):
        assert world.say([*tokens[:cut], 12, *text(6, cut)], 2)[1] == cut // SIZE * SIZE


@pytest.mark.parametrize("draft_rate", [0.0, 1.0])
def test_a_fork_copies_the_state_where_its_sample_is(draft_rate: float) -> None:
    world = World(draft_rate=draft_rate)
    made = request("r", text(30), 60)
    world.scheduler.add(made)
    for step in range(12):
        assert world.loop.plan() is not None
        world.journal.take(world.loop.take())
        said = list(world.journal.tokens["r", 0])
        fork = request(f"f{step}", made.tokens, len(said) + 4, seed=step)
        world.journal.before[fork.id] = said
        assert world.scheduler.fork("r", 0, fork, said) == []
    drain(world.scheduler, world.executor, world.journal)
    for step in range(12):
        before = world.journal.before[f"f{step}"]
        made = request("f", text(30), len(before) + 4, seed=step)
        assert world.journal.tokens[f"f{step}", 0] == alone(made, 0, 800, before)[0]
        assert world.journal.ends[f"f{step}", 0].usage.num_cached == 30 + len(before) - 1


def test_a_preempted_sequence_goes_on_from_its_own_state() -> None:
    world = World(num_blocks=40)
    for i in range(3):
        world.scheduler.add(request(f"r{i}", text(40, i), 60))
    batches = drain(world.scheduler, world.executor, world.journal)
    stats = world.scheduler.stats()
    assert stats.num_preemptions > 0
    assert sum(batch.num_tokens for batch in batches) < 3 * 100 + stats.num_preemptions * 2 * GRID + GRID
    for i in range(3):
        assert world.journal.tokens[f"r{i}", 0] == alone(request("", text(40, i), 60), 0, 800)[0]


def test_rows_bound_the_sequences_that_run() -> None:
    world = World(others=2, running=2)
    for i in range(5):
        world.scheduler.add(request(f"r{i}", text(10, i), 5))
    batches = drain(world.scheduler, world.executor, world.journal)
    assert max(len(batch.seqs) for batch in batches) == 2
    assert all(end.finish_reason is FinishReason.LENGTH for end in world.journal.ends.values())


def test_one_row_is_enough_and_is_handed_on() -> None:
    """A sequence that goes on from the only snapshot takes its row."""
    world = World(others=1, running=1)
    first, second = text(40), text(40, 1)
    said, _ = world.say(first)
    assert world.say([*first, *said, 1, 2])[1] >= 40
    for _ in range(3):
        world.say(second)
        world.say(first)
    assert world.scheduler.stats().snapshots_evicted > 0


def test_what_saves_more_tokens_or_was_used_later_stays() -> None:
    world = World(others=3, running=1)
    long = text(180)
    world.say(long, 1)
    for seed in range(1, 4):
        world.say(text(24, seed), 1)
    assert world.say([*long, 5], 1)[1] >= 180 - GRID, "short prompts drove out a long one"
    for seed in range(1, 40):
        world.say(text(48, seed), 1)
    assert world.say([*long, 5], 1)[1] < 100, "what nobody uses stays for ever"


def test_what_became_worth_more_goes_back_among_the_others() -> None:
    """Also while the heap of snapshots is made anew, because most of its entries are out of date."""
    pool = StatePool(StateRows(3, 0), SIZE, PrefixIndex(BlockPool(9), SIZE))
    short = RadixNode[int]([0] * 21, 21, None)
    long = RadixNode[int]([0] * 40, 61, short)
    other = RadixNode[int]([1] * 51, 51, None)
    for row, node in enumerate((short, long, other)):
        pool._add(Snapshot(row, node.depth - 1), node)  # the long one saves 40 tokens, the other one 50
    pool.forget(short)  # now the long one saves 60
    pool._free.clear()
    pool._heap += [(1e9, i, pool._snapshots[long]) for i in range(100, 120)]
    assert pool._take() == 2
    assert list(pool._snapshots) == [long]
    assert pool._take() == 1


def test_a_kept_prefix_keeps_its_state() -> None:
    world = World(others=3, running=1)
    tokens = text(60)
    said, _ = world.say(tokens, 10)
    kept = [*tokens, *said]
    assert world.scheduler.keep("k", request("k", kept), kept) > 0
    for seed in range(1, 20):
        world.say(text(90, seed), 1)
    assert world.say([*kept, 1], 1)[1] == len(kept) - 1
    world.scheduler.let_go("k")
    world.loop.check()


def test_a_snapshot_goes_with_the_blocks_that_lead_to_it() -> None:
    world = World(num_blocks=60)
    tokens = text(100)
    world.say(tokens)
    assert world.num_snapshots > 0
    for seed in range(1, 5):
        world.say(text(150, seed))
    assert world.say(tokens)[1] == 0
    world.scheduler.reset_prefix_cache()
    assert world.num_snapshots == 0


def test_an_abort_keeps_what_was_computed() -> None:
    world = World()
    tokens = text(90)
    world.scheduler.add(request("r", tokens, 50))
    for _ in range(6):
        world.loop.plan()
        world.journal.take(world.loop.take())
    said = list(world.journal.tokens["r", 0])
    world.scheduler.abort("r")
    assert world.say([*tokens, *said, 1])[1] == len(tokens) + len(said) - 1


def test_a_step_that_fails_leaves_no_snapshot_behind() -> None:
    """Not even where another sequence computed the same tokens: the blocks there are sound, the snapshot is not."""
    world = World(budget=400)
    shared = text(250)
    world.say([*shared, *text(60, 1)])
    before = world.num_snapshots
    bad = request("bad", [*shared, *text(60, 2)])
    world.scheduler.add(bad)
    world.executor.poison = {"bad"}
    drain(world.scheduler, world.executor, world.journal)
    assert world.journal.ends["bad", 0].finish_reason is FinishReason.ERROR
    assert world.num_snapshots == before
    world.say([*shared, *text(60, 3)])


@pytest.mark.parametrize(("marks", "cached"), [((), 64), ((101, 30), 100)])
def test_the_next_request_goes_on_where_one_asked_for_it(marks: tuple[int, ...], cached: int) -> None:
    world = World()
    tokens = text(180)
    made = replace(request("first", tokens, 5), marks=marks)
    world.scheduler.add(made)
    drain(world.scheduler, world.executor, world.journal)
    assert world.say([*tokens[:101], *text(40, 1)])[1] == cached


def test_a_kept_prefix_inside_a_prompt_is_hit_from_the_second_request_on() -> None:
    """The first one finds the state before it, and leaves one at its end."""
    world = World()
    tokens = text(180)
    world.say(tokens, 1)
    assert world.scheduler.keep("k", request("k", tokens[:150]), tokens[:150]) > 0
    cached = [world.say([*tokens[:150], *text(40, seed)], 1)[1] for seed in range(1, 4)]
    assert cached == [128, 148, 148]
