"""Owns the KV blocks: reference counts, the free list, the cached ones. Knows block ids only, no tokens."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable

from quire.errors import EngineError


class BlockPool:
    """Reference counts of `num_blocks` blocks. Every call is O(1) per block.

    A block is *used* while tables hold it (its count is their number), else *cached* while the prefix index
    names it, else *free*: used + cached + free == num_blocks. Cached blocks are kept in order of last use.
    The pool never drops a name by itself: the index evicts.
    """

    def __init__(self, num_blocks: int, on_free: Callable[[int], None] | None = None) -> None:
        """`on_free` is told each block that becomes free."""
        if num_blocks < 1:
            raise EngineError(f"a block pool needs at least 1 block, got {num_blocks}")
        self.num_blocks = num_blocks
        self._refs = [0] * num_blocks
        self._named = bytearray(num_blocks)
        self._free = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._on_free = on_free
        self.num_shared = 0  # blocks that more than one table holds

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def free(self) -> set[int]:
        return set(self._free)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_available(self) -> int:
        """Count the blocks that can be allocated: free ones, and cached ones after eviction."""
        return len(self._free) + len(self._cached)

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free) - len(self._cached)

    def allocate(self, count: int) -> list[int]:
        """Take `count` free blocks, each with one holder. The caller evicts first if there are too few."""
        if count > len(self._free):
            raise EngineError(f"{count} blocks wanted, {len(self._free)} are free; evict cached blocks first")
        if count <= 0:
            return []
        taken = self._free[-count:]
        del self._free[-count:]
        for block in taken:
            self._refs[block] = 1
        return taken

    def acquire(self, block: int) -> None:
        """Let one more table hold `block`, which is used or cached."""
        if self._refs[block] == 0:
            if block not in self._cached:
                raise EngineError(f"block {block} is free: there is nothing to share")
            del self._cached[block]
        self._refs[block] += 1
        if self._refs[block] == 2:
            self.num_shared += 1

    def release(self, block: int) -> None:
        """Let one table fewer hold `block`; after the last, it is cached (most recently used) or free."""
        count = self._refs[block] - 1
        if count < 0:
            raise EngineError(f"block {block} was released more often than it was taken")
        self._refs[block] = count
        if count == 1:
            self.num_shared -= 1
        elif count == 0:
            if self._named[block]:
                self._cached[block] = None
            else:
                self._add_free(block)

    def name(self, block: int) -> None:
        """Record that the prefix index names `block`, which is in use."""
        if self._refs[block] == 0:
            raise EngineError(f"block {block} is not in use and cannot be named")
        self._named[block] = 1

    def forget(self, block: int) -> None:
        """Record that the prefix index no longer names `block`: if it was cached, it becomes free."""
        self._named[block] = 0
        if self._refs[block] == 0:
            del self._cached[block]
            self._add_free(block)

    def _add_free(self, block: int) -> None:
        self._free.append(block)
        if self._on_free is not None:
            self._on_free(block)

    def touch(self, block: int) -> None:
        """Make `block` the most recently used of the cached ones, if it is cached."""
        if block in self._cached:
            self._cached.move_to_end(block)

    def oldest_cached(self) -> int:
        """Return the least recently used cached block."""
        return next(iter(self._cached))

    def is_named(self, block: int) -> bool:
        return bool(self._named[block])

    def count_cached(self, blocks: Iterable[int]) -> int:
        """Count the `blocks` that no table holds."""
        return list(map(self._refs.__getitem__, blocks)).count(0)

    def count_exclusive(self, blocks: Iterable[int]) -> int:
        """Count the `blocks` that exactly one table holds."""
        return list(map(self._refs.__getitem__, blocks)).count(1)

    def check(self, tables: Iterable[Iterable[int]]) -> None:
        """Assert that the counts match `tables` and each block is used, cached or free. O(blocks)."""
        held = Counter(block for table in tables for block in table)
        free = set(self._free)
        assert len(free) == len(self._free), "a block is in the free list twice"
        for block, count in enumerate(self._refs):
            assert count == held[block], f"block {block}: {count} references, {held[block]} tables hold it"
            cached = bool(self._named[block]) and count == 0
            assert (block in self._cached) == cached, f"block {block}: wrongly cached or not cached"
            assert (block in free) == (count == 0 and not cached), f"block {block}: wrongly free or not free"
        assert self.num_shared == sum(count > 1 for count in self._refs)
        assert self.num_used + self.num_cached + self.num_free == self.num_blocks
