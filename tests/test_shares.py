"""Owners take turns, and share what is full."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from quire.shares import Pool, Turns


def test_each_owner_has_a_turn_before_any_has_another() -> None:
    turns: Turns[str] = Turns()
    for name in ("a1", "a2", "a3"):
        turns.put("a", name)
    assert turns.next() == "a1"
    turns.put("b", "b1")  # behind one that has had its turn
    turns.put("c", "c1")
    turns.put("b", "b2")
    assert [turns.next() for _ in range(3)] == ["b1", "c1", "a2"]
    turns.put("c", "c2")
    assert [turns.next() for _ in range(3)] == ["b2", "c2", "a3"]
    assert len(turns) == 0


def test_who_waits_with_most_makes_room() -> None:
    turns: Turns[str] = Turns()
    for name in ("a1", "a2", "b1"):
        turns.put(name[0], name)
    assert turns.make_room("a") is None
    assert turns.make_room("c") == "a2"
    assert turns.make_room("b") is None
    turns.drop("a", "a1")
    turns.drop("a", "a1")
    assert len(turns) == 1
    assert turns.next() == "b1"


@pytest.mark.parametrize("seed", range(20))
def test_a_pool_never_exceeds_twice_its_limit_and_keeps_room_for_shares(seed: int) -> None:
    """Owners are counted anew from all that was taken; nobody with a share's room below the bound is refused."""
    chance, limit = random.Random(seed), 60
    pool, taken = Pool(limit), list[tuple[str, int]]()
    for _ in range(400):
        if taken and chance.random() < 0.3:
            owner, amount = taken.pop(chance.randrange(len(taken)))
            pool.add(owner, -amount)
            continue
        owner, amount = chance.choice("aaaaabcd"), chance.randint(1, 12)
        held = Counter[str]()
        for one, size in taken:
            held[one] += size
        share = limit // len({*held, owner})
        total = held.total() + amount
        room = total <= limit or (held[owner] + amount <= share and total <= 2 * limit)
        assert pool.has_room(owner, amount) == room
        if room:
            taken.append((owner, amount))
            pool.add(owner, amount)
        assert pool.total == sum(size for _, size in taken) <= 2 * limit
