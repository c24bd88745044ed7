"""Requests and owners take turns: nobody waits while another one has more than its first sample running."""

from __future__ import annotations

from test_scheduler import World

from quire.sched.plan import MOST_ENTRIES
from quire.types import Request


def slots(world: World, *requests: Request) -> list[int]:
    """How many samples of each request run."""
    running = [seq.request.id for seq in world.scheduler._planner.running]
    return [running.count(made.id) for made in requests]


def test_a_request_displaces_one_sample_of_a_request_that_fills_all_slots() -> None:
    world = World(num_blocks=200, max_num_seqs=4)
    many = world.add("many", [1, 2, 3], 40, n=30)
    for _ in range(5):
        world.step()
    assert slots(world, many) == [4]
    one = world.add("one", [4, 5], 3)
    world.step()
    assert slots(world, many, one) == [3, 1]
    assert len(world.said(one)) == 1
    world.step()
    world.step()
    assert len(world.said(one)) == 3
    world.step()
    assert slots(world, many) == [4]
    world.drain()
    world.expect(many, one)


def test_new_requests_go_before_further_samples_that_wait() -> None:
    world = World(num_blocks=200, max_num_seqs=4)
    many = world.add("many", [1, 2, 3], 40, n=30)
    world.step()
    others = [world.add(f"one {i}", [4, i], 8) for i in range(6)]
    for _ in range(5):
        world.step()
    assert slots(world, many, *others) == [1, 1, 1, 1, 0, 0, 0]
    world.drain()
    world.expect(many, *others)


def test_the_first_sample_of_a_request_is_never_displaced() -> None:
    world = World(num_blocks=200, max_num_seqs=2)
    first = [world.add(f"a{i}", [i], 30) for i in range(2)]
    world.step()
    late = world.add("late", [9], 2)
    world.step()
    assert slots(world, *first, late) == [1, 1, 0]
    assert world.scheduler.stats().num_preemptions == 0
    world.drain()


def test_an_owner_with_nothing_running_displaces_a_request_of_an_owner_with_several() -> None:
    world = World(num_blocks=200, max_num_seqs=3)
    busy = [world.add(f"busy {i}", [1, i], 30, owner="a") for i in range(8)]
    world.step()
    quiet = world.add("quiet", [7], 2, owner="b")
    world.step()
    world.step()
    assert len(world.said(quiet)) == 2
    assert world.scheduler.stats().num_preemptions == 1
    world.drain()
    world.expect(*busy, quiet)


def test_samples_give_up_blocks_as_well_as_slots() -> None:
    world = World(num_blocks=16, block_size=4, max_num_seqs=8, caching=False)
    many = world.add("many", [1, 2, 3], 20, n=4)
    while world.scheduler.stats().num_free_blocks > 1:
        world.step()
    one = world.add("one", [4] * 10, 2)
    for _ in range(3):
        world.step()
    assert len(world.said(one)) == 2
    world.drain()
    world.expect(many, one)


def test_displacing_stops_when_it_cannot_make_room() -> None:
    world = World(num_blocks=16, block_size=4, max_num_seqs=8, max_len=64, caching=False)
    long = world.add("long", list(range(10)) * 4, 20)
    world.step()
    pair = world.add("pair", [1, 2], 12, n=2)
    world.step()
    world.step()
    assert slots(world, long, pair) == [1, 2]
    late = world.add("late", [5] * 40, 2)
    world.step()
    assert slots(world, long, pair, late) == [1, 2, 0]
    world.drain()
    world.expect(long, pair, late)


def test_a_higher_priority_is_not_displaced_by_a_lower_one() -> None:
    world = World(num_blocks=200, max_num_seqs=3, scheduling_policy="priority")
    world.add("high", [1], 20, n=3, priority=-1)
    world.step()
    world.step()
    low = world.add("low", [2], 2, priority=1)
    world.step()
    assert slots(world, low) == [0]
    world.drain()
    world.expect(low)


def test_requests_with_long_lists_begin_in_several_steps() -> None:
    world = World(num_blocks=200, max_num_seqs=16)
    guess = (1,) * (MOST_ENTRIES // 2)
    heavy = [world.add(f"heavy {i}", [1, i], 8, n=2, prediction=guess) for i in range(5)]
    light = world.add("light", [7], 8)
    began: dict[str, int] = {}
    for step in range(3):
        for new in world.step().new:
            began.setdefault(new.request.id, step)
    assert [began[made.id] for made in heavy] == [0, 0, 1, 1, 2]
    assert began[light.id] == 2
    world.drain()
    world.expect(*heavy, light)


def test_a_list_counts_in_the_queue_for_each_sample() -> None:
    world = World()
    one, many = (world.add(f"n{n}", [1, 2], 8, n=n, prediction=(3,) * 10) for n in (1, 64))
    assert (one.weight, many.weight) == (12, 642)
