"""The choice of a replica: laws that hold for any history, and the known faults of other routers."""

from __future__ import annotations

import random

import pytest

from quire.cluster.choice import POLICIES, Ask, Choice, Policy
from quire.cluster.loads import Booking, Load, Replica
from quire.cluster.prefixes import digests

LONG = digests(bytes(range(256)) * 64)
assert len(LONG) == 16


def many(count: int, policy: Policy = "prefix", **options: float) -> Choice:
    choice = Choice(policy)
    for index in range(count):
        assert choice.add(Replica(f"replica {index}", rate=1000.0, **options)) == index  # type: ignore[arg-type]
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
