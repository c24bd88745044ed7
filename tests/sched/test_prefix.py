"""The prefix index: exact to the token, least recently used leaf first, and never a block in use."""

from __future__ import annotations

import random

import pytest

from quire.radix import RadixNode
from quire.sched import BlockPool, PrefixIndex

SPACE = ("adapter", "salt")


class Cache:
    """An index over a small pool, with tables as the scheduler would hold them."""

    def __init__(self, num_blocks: int = 16, block_size: int = 4) -> None:
        self.pool = BlockPool(num_blocks)
        self.index = PrefixIndex(self.pool, block_size)
        self.size = block_size
        self.tables: list[list[int]] = []

    def compute(self, tokens: list[int], space: object = SPACE) -> tuple[list[int], RadixNode[int]]:
        """A sequence without any reuse: its table and cursor."""
        blocks = self.pool.allocate(-(-len(tokens) // self.size))
        self.tables.append(blocks)
        return blocks, self.index.extend(self.index.root, tokens, blocks, len(tokens), space)

    def end(
        self, tokens: list[int], blocks: list[int], cursor: RadixNode[int], space: object = SPACE
    ) -> None:
        cursor = self.index.extend_tail(cursor, tokens, blocks, len(tokens), space)
        self.tables.remove(blocks)
        for block in reversed(blocks):
            self.pool.release(block)
        self.index.touch(cursor)
        self.check()

    def remember(self, tokens: list[int], space: object = SPACE) -> list[int]:
        blocks, cursor = self.compute(tokens, space)
        self.end(tokens, blocks, cursor, space)
        return blocks

    def found(self, tokens: list[int], space: object = SPACE) -> int:
        return self.index.match(tokens, space, len(tokens))[0].num_tokens

    def check(self) -> None:
        self.index.check()
        self.pool.check(self.tables)


def test_full_blocks_are_shared_and_the_rest_is_copied() -> None:
    cache = Cache()
    blocks = cache.remember(list(range(10)))
    match, cursor = cache.index.match([*range(7), 99, 100], SPACE, 8)
    assert (match.blocks, match.source, match.tail, match.num_tokens) == (blocks[:1], blocks[1], 3, 7)
    assert cursor.value == blocks[0]
    match, _ = cache.index.match(list(range(10)), SPACE, 10)
    assert (match.blocks, match.source, match.tail, match.num_tokens) == (blocks[:2], blocks[2], 2, 10)
    match, cursor = cache.index.match([5], SPACE, 1)
    assert (match.blocks, match.source, match.tail, match.num_tokens) == ([], -1, 0, 0)
    assert cursor is cache.index.root


def test_limit_leaves_tokens_to_compute() -> None:
    cache = Cache()
    blocks = cache.remember(list(range(8)))
    match, _ = cache.index.match(list(range(8)), SPACE, 7)
    assert (match.blocks, match.source, match.tail) == (blocks[:1], blocks[1], 3)
    assert cache.index.match(list(range(8)), SPACE, 0)[0].num_tokens == 0


def test_namespaces_are_apart() -> None:
    cache = Cache()
    cache.remember([1, 2, 3, 4, 5])
    assert cache.found([1, 2, 3, 4, 5]) == 5
    assert cache.found([1, 2, 3, 4, 5], ("other", "salt")) == 0
    assert cache.found([1, 2, 3, 4, 5], ("adapter", "other")) == 0
    cache.remember([1, 2, 3, 9], ("adapter", "other"))
    assert cache.found([1, 2, 3, 4, 5], ("adapter", "other")) == 3
    assert cache.found([1, 2, 3, 4, 5]) == 5


def test_a_longer_tail_replaces_a_shorter_one_and_a_full_block_both() -> None:
    cache = Cache()
    cache.remember([1, 2])
    cache.remember([1, 2, 3])
    assert cache.pool.num_cached == 1
    cache.remember([1, 2])
    assert cache.pool.num_cached == 1
    cache.remember([1, 2, 3, 4])
    assert cache.pool.num_cached == 1
    cache.remember([1, 2, 7])
    assert cache.pool.num_cached == 2
    assert [cache.found([1, 2, 3, 4]), cache.found([1, 2, 7, 7]), cache.found([1, 2, 8])] == [4, 3, 2]


def test_the_first_of_twins_is_kept_and_the_second_goes_on_below_it() -> None:
    cache = Cache()
    first, first_cursor = cache.compute([1, 2, 3, 4, 5, 6, 7, 8])
    second, second_cursor = cache.compute([1, 2, 3, 4, 9, 9, 9, 9])
    cache.check()
    assert cache.index.match([1, 2, 3, 4, 9, 9, 9, 9], SPACE, 8)[0].blocks == [first[0], second[1]]
    cache.end([1, 2, 3, 4, 5, 6, 7, 8], first, first_cursor)
    cache.index.evict(cache.pool.num_free + 2)  # the twin in use had its place below a cached block
    cache.check()
    assert cache.found([1, 2, 3, 4, 9, 9, 9, 9]) == 0
    cursor = cache.index.extend(second_cursor, [1, 2, 3, 4, 9, 9, 9, 9], second, 8, SPACE)
    cache.check()
    assert cache.index.match([1, 2, 3, 4, 9, 9, 9, 9], SPACE, 8)[0].blocks == second
    cache.end([1, 2, 3, 4, 9, 9, 9, 9], second, cursor)
    assert (cache.pool.num_used, cache.pool.num_cached) == (0, 2)


def test_eviction_takes_the_least_recently_used_leaf() -> None:
    cache = Cache()
    cache.remember([1, 1, 1, 1, 2, 2, 2, 2])
    cache.remember([1, 1, 1, 1, 3, 3, 3, 3])
    cache.remember([5, 5, 5, 5])
    free = cache.pool.num_free
    left = []
    for count in range(1, 5):
        cache.index.evict(free + count)
        cache.check()
        left.append([cache.found([1] * 4 + [2] * 4), cache.found([1] * 4 + [3] * 4), cache.found([5] * 4)])
    assert left == [[4, 8, 4], [4, 4, 4], [0, 0, 4], [0, 0, 0]]


def test_eviction_spares_blocks_in_use() -> None:
    cache = Cache(num_blocks=4)
    blocks = cache.remember(list(range(8)))
    cache.pool.acquire(blocks[0])
    cache.tables.append([blocks[0]])
    cache.index.evict(3)
    cache.check()
    assert cache.found(list(range(8))) == 4
    assert cache.pool.num_used == 1


def test_clear_forgets_all_and_cursors_recover() -> None:
    cache = Cache()
    cache.remember([1, 2, 3, 4, 5])
    blocks, cursor = cache.compute([7, 7, 7, 7])
    cache.index.clear()
    cache.check()
    assert cache.pool.num_cached == 0
    assert cache.found([7, 7, 7, 7]) == 0
    cache.index.extend(cursor, [7, 7, 7, 7], blocks, 4, SPACE)
    assert cache.found([7, 7, 7, 7]) == 4


@pytest.mark.parametrize("block_size", [1, 2, 5])
def test_random_use_finds_the_longest_prefix_that_is_still_cached(block_size: int) -> None:
    """Against a dict: block -> the key whose last tokens it holds, kept in step with the pool's free list."""
    rng = random.Random(block_size)
    cache = Cache(24, block_size)
    for _ in range(1500):
        tokens = [rng.randrange(2) for _ in range(rng.randint(1, 4 * block_size))]
        need = -(-len(tokens) // block_size)
        cache.index.evict(need)
        entries = cache.index.entries()
        best = 0
        for key, _ in entries:
            same = 0
            while same < min(len(tokens), len(key) - 1) and tokens[same] == key[same + 1]:
                same += 1
            best = max(best, same)
        match, _ = cache.index.match(tokens, SPACE, len(tokens))
        assert match.num_tokens == best
        names = {block: key for key, block in entries}
        for k, block in enumerate(match.blocks):
            assert names[block] == [SPACE, *tokens[: (k + 1) * block_size]]
        if match.tail:
            assert names[match.source][1 : best + 1] == tokens[:best]
            assert (len(names[match.source]) - 2) // block_size == best // block_size
        cache.remember(tokens)
