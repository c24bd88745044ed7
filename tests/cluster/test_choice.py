"""The choice of a replica: laws that hold for any history, and the known faults of other routers."""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Iterator
from typing import Any

import pytest

from quire.cluster.choice import LOST_AFTER, MOST_HOLDERS, POLICIES, Ask, Choice, Policy
from quire.cluster.loads import SLOW_START, Booking, Load, Replica
from quire.cluster.prefixes import digests

LONG = digests(bytes(range(256)) * 64)
assert len(LONG) == 16


def many(count: int, policy: Policy = "prefix") -> Choice:
    choice = Choice(policy)
    for index in range(count):
        assert choice.add(Replica(f"replica {index}", rate=1000.0)) == index
    return choice


def chosen(choice: Choice, ask: Ask, now: float = 0.0, excluded: tuple[int, ...] = ()) -> int:
    booking = choice.choose(ask, now, excluded)
    assert booking
    return booking.index


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", range(4))
def test_any_history(policy: Policy, seed: int) -> None:
    """Only replicas that are up, in the pool and not excluded are chosen; in the end nothing is booked."""
    rng = random.Random(seed)
    choice = Choice(policy, first=rng.randrange(100))
    open_bookings: list[Booking] = []
    now = 0.0
    for step in range(3000):
        now += rng.expovariate(20)
        there = [index for index, replica in enumerate(choice.replicas) if replica]
        event = rng.random()
        if not there or event < 0.01:
            labels = rng.sample(["a", "b", "c"], 2)
            choice.add(
                Replica(f"{step}", labels, rate=rng.choice([500.0, 4000.0])), rng.choice([4096, 1 << 16])
            )
        elif event < 0.02:
            index = rng.choice(there)
            choice.remove(index)
        elif event < 0.05:
            choice.set_state(rng.choice(there), rng.choice(["up", "draining", "ejected", "down"]), now)
        elif event < 0.15:
            load = Load(
                queued=rng.randrange(5000), running=rng.randrange(9), free=rng.choice([None, 100, 10**6])
            )
            choice.at(rng.choice(there)).word(load, now, rng.random())
        elif event < 0.2:
            choice.prefixes.events(
                rng.choice(there), [["-", f"{rng.choice(LONG):016x}"]], reset=rng.random() < 0.3
            )
        elif event < 0.55 and open_bookings:
            booking = open_bookings.pop(rng.randrange(len(open_bookings)))
            for _ in range(rng.choice([1, 2])):
                choice.end(booking, now, computed=rng.random() < 0.5)
        else:
            pool = rng.choice(["", "a", "b"])
            excluded = rng.sample(there, min(2, len(there)))
            ask = Ask(rng.randrange(1, 5000), LONG[: rng.randrange(17)], pool, rng.choice(["", "me", "you"]))
            allowed = {
                index
                for index in there
                if choice.at(index).state == "up" and (not pool or pool in choice.at(index).labels)
            } - set(excluded)
            booking_or_none = choice.choose(ask, now, excluded)
            assert (booking_or_none is None) == (not allowed)
            if booking_or_none:
                assert booking_or_none.index in allowed
                assert 0 <= booking_or_none.found < ask.tokens
                open_bookings.append(booking_or_none)
    for booking in open_bookings:
        choice.end(booking, now)
    assert not choice.booked
    for index, replica in enumerate(choice.replicas):
        if replica:
            replica.word(Load(), now + 9)
            assert replica.running == 0
            assert replica.wait(now + 9) == 0
            choice.prefixes.clear(index)
    assert not choice.prefixes.holders


def test_bookings_without_words_return_to_zero() -> None:
    choice = many(3)
    bookings = [choice.choose(Ask(1000), 0.0) for _ in range(30)]
    assert sum(choice.at(index).wait(0.0) for index in range(3)) == pytest.approx(30)
    for booking in bookings:
        assert booking
        choice.end(booking, 0.0, computed=False)
    assert [choice.at(index).running for index in range(3)] == [0, 0, 0]
    assert sum(choice.at(index).wait(0.0) for index in range(3)) == pytest.approx(0)


def test_a_lost_end_is_not_booked_for_ever() -> None:
    """Fault: load booked without a time limit (Ray's tracker)."""
    choice = many(2)
    for _ in range(10):
        choice.choose(Ask(100), 0.0)
    assert sum(choice.at(index).running for index in range(2)) == 10
    choice.choose(Ask(100), LOST_AFTER + 2)
    assert len(choice.booked) == 1
    assert sum(choice.at(index).running for index in range(2)) == 1


def test_a_late_end_of_another_attempt_frees_nothing() -> None:
    """Fault: the end of a first attempt that comes late frees the second one's booking (Dynamo #11647)."""
    choice = many(2)
    first = choice.choose(Ask(1000), 0.0)
    assert first
    choice.end(first, 0.0, computed=False)
    second = choice.choose(Ask(1000), 0.0, excluded=[first.index])
    assert second
    choice.end(first, 0.1, computed=False)
    assert (choice.at(second.index).running, choice.at(second.index).wait(0.0)) == (1, 1.0)


@pytest.mark.parametrize("policy", POLICIES)
def test_at_low_load_all_replicas_take_turns(policy: Policy) -> None:
    """Fault: ties go to the first, so everything goes to one replica (sglang #32983, #15473)."""
    choice = many(8, policy)
    counts = Counter[int]()
    for second in range(80):
        booking = choice.choose(Ask(10), 100.0 * second)
        assert booking
        choice.end(booking, 100.0 * second + 1)
        counts[booking.index] += 1
    assert counts == dict.fromkeys(range(8), 10)


@pytest.mark.parametrize("count", [3, 8, 40, 512])
def test_ties_go_to_the_one_after_the_last(count: int) -> None:
    choice = many(count)
    assert [chosen(choice, Ask(10), 100.0 * second) for second in range(count + 3)] == [
        *range(count),
        *range(3),
    ]


def test_a_miss_goes_to_the_least_queue_not_the_emptiest_cache() -> None:
    """Fault: a miss goes to the emptiest cache, which is the overloaded replica's (sglang #14305, #14532)."""
    choice = many(4)
    for index in range(3):
        choice.prefixes.touch(index, digests(bytes([index]) * 60_000), 256)
        choice.at(index).word(Load(queued=100), 0.0)
    choice.at(3).word(Load(queued=50_000), 0.0)
    assert 3 not in {chosen(choice, Ask(2000, digests(b"new" * 3000)), 0.0) for _ in range(12)}


@pytest.mark.parametrize("policy", ["prefix", "load"])
def test_a_prompt_counts_as_soon_as_it_is_sent(policy: Policy) -> None:
    """Fault: load is counted when the answer begins, so long prompts pile up (sglang #27547, smg #1714)."""
    choice = many(8, policy)
    burst = [chosen(choice, Ask(40_000), 0.001 * k) for k in range(8)]
    assert sorted(burst) == list(range(8))
    assert [choice.at(index).wait(0.01) > 39 for index in range(8)] == [True] * 8


def test_a_word_from_before_a_send_does_not_forget_it() -> None:
    choice = many(2)
    index = chosen(choice, Ask(3000), 10.0)
    choice.at(index).word(Load(queued=1000, running=1), 10.2, age=0.5)
    assert choice.at(index).wait(10.2) == pytest.approx(3.5)
    assert choice.at(index).running == 2
    choice.at(index).word(Load(queued=2000, running=1), 10.4, age=0.1)
    assert choice.at(index).wait(10.4) == pytest.approx(1.9)
    assert choice.at(index).running == 1


def test_a_word_looks_at_later_sends_alone() -> None:
    """Thousands of sends in five seconds would make each answer dearer. Counted, not timed."""
    replica, looked = Replica("busy"), 0

    class Counted(deque[Booking]):
        def __reversed__(self) -> Iterator[Booking]:
            nonlocal looked
            for one in super().__reversed__():
                looked += 1
                yield one

    replica._sends = Counted()
    for number in range(1000):
        replica.send(Booking(0, number / 1000, 0, 10), number / 1000)
    replica.word(Load(queued=500), 0.9995, age=0.01)
    assert looked == 11
    assert replica.wait(0.9895) == pytest.approx(0.5 + 0.1)


def test_a_longer_queue_does_not_end_affinity_at_once() -> None:
    """Fault: affinity is dropped altogether when loads are uneven (sglang #32195)."""
    choice = many(8)
    home = chosen(choice, Ask(4096, LONG), 0.0)
    choice.at(home).word(Load(queued=6000), 50.0)  # 6 s, beside 12 s (weighed) to compute it elsewhere
    assert chosen(choice, Ask(4196, LONG), 50.0) == home
    choice.at(home).word(Load(queued=40_000), 60.0)
    assert chosen(choice, Ask(4196, LONG), 60.0) != home


def test_tokens_count_not_requests() -> None:
    """Fault: counts of requests, so long contexts saturate one engine (smg #1621)."""
    choice = many(2)
    big = chosen(choice, Ask(100_000), 0.0)
    assert {chosen(choice, Ask(500), 0.001 * k) for k in range(100)} == {1 - big}


def test_routers_see_the_load_of_others() -> None:
    """Fault: each of N routers sees 1/N of the load (smg #1621, llm-d-router #1842)."""
    routers = [many(2), many(2)]
    for _ in range(5):
        routers[0].choose(Ask(20_000), 0.0, excluded=[1])
    routers[1].at(0).word(Load(queued=100_000, running=5), 0.2)
    assert {chosen(routers[1], Ask(1000), 0.2) for _ in range(20)} == {1}


@pytest.mark.parametrize("policy", POLICIES)
def test_replicas_that_are_away_count_nowhere(policy: Policy) -> None:
    """Fault: unhealthy replicas count in the minimum, or are chosen (vllm-project/router #254)."""
    choice = many(6, policy)
    for index, state in enumerate(("down", "draining", "ejected")):
        choice.set_state(index, state, 0.0)  # type: ignore[arg-type]
        choice.prefixes.touch(index, LONG, 256)
    for index in range(3, 6):
        choice.at(index).word(Load(queued=50_000), 0.0)
    picked = {chosen(choice, Ask(4096, LONG, session=f"{k}"), 0.0) for k in range(30)}
    assert picked <= {3, 4, 5}
    assert choice.choose(Ask(1), 0.0, excluded=[3, 4, 5]) is None


def test_the_cost_of_a_choice_does_not_grow_with_replicas() -> None:
    """Fault: a choice looks at all replicas (smg #1692, #1758, #1789). Counted, not timed."""
    looked = []
    for count in (32, 512):
        choice = many(count)
        for index in range(count):
            choice.prefixes.touch(index, LONG, 256)
        counts = Counter[str]()

        class Counted(dict[int, int]):
            def get(self, *key: Any) -> Any:
                counts["looked"] += 1  # noqa: B023
                return super().get(*key)

        choice.prefixes.holders = Counted(choice.prefixes.holders)
        for k in range(20):
            choice.choose(Ask(4096 + k, LONG), 0.0)
        looked.append(counts["looked"])
    assert looked[1] <= looked[0] <= 20 * (8 + MOST_HOLDERS + 2) * 5


def test_a_replica_that_comes_up_starts_slowly() -> None:
    choice = many(8)
    choice.set_state(0, "down", 0.0)
    choice.set_state(0, "up", 1000.0)
    shares = []
    for start in (0.0, SLOW_START / 2, SLOW_START):
        sent, now = Counter[int](), 1000.0 + start
        for _ in range(800):  # more than they compute, so that queues, not ties, decide
            now += 0.001
            booking = choice.choose(Ask(100), now)
            assert booking
            sent[booking.index] += 1
        shares.append(sent[0] / 100)
        for index in range(8):
            choice.at(index).word(Load(), now)
    assert shares[0] < 0.15 < 0.35 < shares[1] < 0.7 < 0.9 < shares[2] < 1.1


def test_sessions_stay_and_few_move() -> None:
    choice = many(8, "session")

    def homes(now: float) -> list[int]:
        found = []
        for k in range(2000):
            booking = choice.choose(Ask(1, session=f"session {k}"), now)
            assert booking
            choice.end(booking, now)
            found.append(booking.index)
        return found

    before = homes(0.0)
    counts = Counter(before)
    assert set(counts) == set(range(8))
    assert max(counts.values()) < 1.3 * 250
    assert homes(100.0) == before
    choice.set_state(3, "down", 200.0)
    after = homes(200.0)
    moved = [(one, other) for one, other in zip(before, after, strict=True) if one != other]
    assert all(one == 3 for one, _ in moved)
    assert len({other for _, other in moved}) == 7
    choice.set_state(3, "up", 300.0)
    assert homes(400.0) == before


def test_a_session_moves_on_from_a_long_queue_and_comes_back() -> None:
    choice = many(8, "session")
    ask = Ask(1, session="mine")
    home = chosen(choice, ask)
    choice.at(home).word(Load(queued=60_000), 10.0)
    next_home = {chosen(choice, ask, 10.0) for _ in range(9)}
    assert len(next_home) == 1
    assert home not in next_home
    assert chosen(choice, ask, 100.0) == home


def test_owners_do_not_meet_in_the_map() -> None:
    choice = many(8)
    text = b"the same prompt " * 1000
    home = chosen(choice, Ask(4000, digests(text, "one")), 0.0)
    other = choice.choose(Ask(4000, digests(text, "two")), 100.0)
    again = choice.choose(Ask(4000, digests(text, "one")), 200.0)
    assert other
    assert again
    assert (other.found, again.found, again.index) == (0, 15 * 256, home)


def test_full_caches_are_avoided() -> None:
    choice = many(4)
    for index in range(4):
        choice.at(index).word(Load(free=10_000 if index == 2 else 100), 0.0)
    assert chosen(choice, Ask(5000), 0.0) == 2


def test_decoding_counts_where_its_rate_is_known() -> None:
    choice = many(2)
    for index in range(2):
        choice.at(index).decode_rate = 100.0
    choice.at(0).word(Load(running=50), 0.0)
    assert [chosen(choice, Ask(10), 0.0) for _ in range(20)] == [1] * 20


def test_a_word_tells_the_rates_of_a_replica() -> None:
    """One that was met before it had measured any is not taken for slow for ever."""
    replica = Replica("new")
    replica.word(Load(queued=8000), 0.0)
    assert replica.wait(0.0) == 8.0
    replica.word(Load(queued=8000, prefill_rate=4000.0, decode_rate=50.0), 1.0)
    assert (replica.wait(1.0), replica.rate, replica.decode_rate) == (2.0, 4000.0, 50.0)
    replica.word(Load(queued=8000), 2.0)
    assert replica.wait(2.0) == 2.0
