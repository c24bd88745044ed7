"""Names of prefixes, a replica's list of them with its changes, and the router's map."""

from __future__ import annotations

import asyncio
import random
from collections import OrderedDict

import msgspec
import pytest

from quire.cluster.choice import Choice
from quire.cluster.options import RouteConfig
from quire.cluster.prefixes import MOST_BLOCKS, Prefixes, Prompt, digests
from quire.cluster.replicas import Member, Replicas
from quire.serve.held import BLOCK_BYTES, Held, read, written


def test_a_digest_names_all_before_it() -> None:
    text = random.Random(0).randbytes(10 * BLOCK_BYTES + 7)
    names = digests(text)
    assert len(names) == len(set(names)) == 10
    assert digests(text[: 4 * BLOCK_BYTES]) == names[:4]
    changed = bytearray(text)
    changed[5 * BLOCK_BYTES] ^= 1
    other = digests(bytes(changed))
    assert other[:5] == names[:5]
    assert not set(other[5:]) & set(names)
    assert read(written(names)) == names
    assert all(len(name) == 16 for name in written(names))


def test_salts_keep_owners_apart() -> None:
    text = b"x" * 4 * BLOCK_BYTES
    salts = [(), ("owner",), ("owner", "model"), ("owner", "model", "salt"), ("other", "model", "salt")]
    names = [digests(text, *salt) for salt in salts]
    assert len({name for some in names for name in some}) == 4 * len(salts)


def test_names_are_bounded() -> None:
    assert len(digests(b"x" * BLOCK_BYTES * (MOST_BLOCKS + 9))) == MOST_BLOCKS


def test_a_longer_chat_begins_as_the_shorter_one() -> None:
    system = {"role": "system", "content": "You are kind. " * 300}
    question = {"role": "user", "content": "Why? " * 300}
    answer = {"role": "assistant", "content": "Because. " * 300}
    fields = {"seed": 3, "tools": [{"type": "function"}]}
    first = {"model": "m", "temperature": 1, "messages": [system, question], **fields}
    later = {**fields, "messages": [system, question, answer, question], "model": "m", "temperature": 0.5}
    one, two = (msgspec.json.decode(msgspec.json.encode(body), type=Prompt).text for body in (first, later))
    assert digests(two)[: len(digests(one))] == digests(one)
    assert len(digests(two)) > len(digests(one)) > 3


def test_what_is_used_least_recently_goes_first() -> None:
    """A list in another shape is the oracle: an OrderedDict by deepest block first."""
    rng = random.Random(1)
    held, oracle = Held(40 * 10), OrderedDict[int, None]()
    for _ in range(2000):
        family = rng.randrange(8)
        names = [family] + [family * 100 + depth for depth in range(1, rng.randrange(1, 14))]
        held.touch(names, 10)
        for name in reversed(names):
            oracle[name] = None
            oracle.move_to_end(name)
        while len(oracle) > 40:
            oracle.popitem(last=False)
        assert list(held.order) == list(oracle)


def test_a_router_follows_the_changes() -> None:
    rng = random.Random(2)
    held, prefixes = Held(300, kept=50, number=1000), Prefixes()
    prefixes.add(0, 10**9)
    number, resets = 0, 0
    for _ in range(3000):
        names = [7] + [rng.randrange(20) * 100 + depth for depth in range(rng.randrange(9))]
        held.touch(names, 10)
        if rng.random() < 0.005:
            held.clear()
        if rng.random() < 0.1:
            number, reset, changes = held.since(number)
            resets += reset
            prefixes.events(0, changes, reset=reset)
            assert set(prefixes.holders) == set(held.order)
    assert 1 < resets < 60
    assert held.since(number) == (held.number, False, []) or held.number > number


def test_a_replica_tells_how_much_its_cache_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    pages = {
        "/health": b"",
        "/internal/replica": b'{"class": "a", "models": {"m": {}}, "cache_tokens": 1000}',
        "/internal/events": b'{"next": 1, "reset": true, "load": {}, "events": []}',
    }

    async def get(member: Member, path: str) -> bytes:
        return pages[path.partition("?")[0]]

    choice: Choice[Member] = Choice()
    replicas = Replicas(choice, RouteConfig(replica=("http://replica:8000",), router_api_key=("key",)))
    monkeypatch.setattr(replicas, "_get", get)
    member = Member("http://replica:8000", 0, "key")
    choice.add(member)
    for _ in range(2):  # it comes, and comes back
        assert asyncio.run(replicas._meet(member)) == 1
        assert choice.prefixes.depth([1, 2, 3, 4], 1, 4) == 0
        choice.prefixes.touch(member.index, [1, 2, 3, 4], 300)
        assert choice.prefixes.depth([1, 2, 3, 4], 1, 4) == 3


def test_numbers_of_an_earlier_life_are_no_numbers() -> None:
    before, after = Held(100, kept=10, number=5), Held(100, kept=10, number=10**6)
    before.touch([1, 2], 10)
    after.touch([3], 10)
    assert after.since(before.number) == (10**6 + 1, True, [["+", f"{3:016x}"]])
    assert before.since(10**7)[1]


@pytest.mark.parametrize("seed", range(3))
def test_depths_are_those_of_a_walk(seed: int) -> None:
    rng = random.Random(seed)
    prefixes = Prefixes()
    tree = [[family * 1000 + depth for depth in range(30)] for family in range(5)]
    for index in range(6):
        prefixes.add(index, 60 * 10)
    for _ in range(300):
        family = rng.choice(tree)
        prefixes.touch(rng.randrange(6), family[: rng.randrange(31)], 10)
        bits = rng.randrange(1, 64)
        walked = 0
        while walked < 30 and prefixes.holders.get(family[walked], 0) & bits:
            walked += 1
        assert prefixes.depth(family, bits, 30) == walked
        assert prefixes.depth(family, bits, 7) == min(walked, 7)
    for index in range(6):
        prefixes.clear(index)
    assert not prefixes.holders
