"""Owns the memory of blocks, slab by slab, where some layers see only the last positions. Knows ids only, no tokens.

A block holds its tokens' keys and values of all layers. Sliding-window layers' entries are *in sight* as long as
some table's next token can see them; afterwards this part of the block may be given back while the rest stays.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from quire.shapes import BlockShape


class SlabPool:
    """The slabs of `num_slabs` that each block has, and which blocks are in sight of how many tables.

    A block that no table sees keeps its windowed slabs while there is room, if the prefix index names it: a later
    sequence may go on from there. Blocks that a sequence has passed give them up first, the oldest before others;
    blocks at the end of a sequence, where its next turn goes on, keep them as long as the index names them.
    """

    def __init__(self, shape: BlockShape, num_slabs: int, block_size: int) -> None:
        self.shape, self.num_slabs, self._size = shape, num_slabs, block_size
        self._free = list(range(num_slabs - 1, -1, -1))
        self._full: dict[int, list[int]] = {}
        self._windowed: dict[int, list[int]] = {}
        self._sights: dict[int, int] = {}
        self._passed: OrderedDict[int, None] = OrderedDict()
        self._ended: OrderedDict[int, None] = OrderedDict()
        self._mapped: list[list[int]] = []

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_in_sight(self) -> int:
        """Return the number of blocks that some table sees."""
        return len(self._sights)

    def first_in_sight(self, position: int) -> int:
        """Find the first block that a token at `position` reads through a window."""
        return self.shape.first_in_sight(position, self._size)

    def assign(self, blocks: Iterable[int]) -> None:
        """Give slabs to new blocks, each in sight of one table. There must be enough."""
        free, full, each = self._free, self.shape.full, self.shape.slabs
        for block in blocks:
            taken = free[-each:]
            del free[-each:]
            self._full[block], self._windowed[block] = taken[:full], taken[full:]
            self._sights[block] = 1
            self._mapped.append([block, *taken])

    def take_mapped(self) -> list[list[int]]:
        """Take the blocks that got slabs since the last call: [block, slab, slab, ...], by column."""
        mapped, self._mapped = self._mapped, []
        return mapped

    def is_whole(self, block: int) -> bool:
        """Tell whether a block in use, or a cached one, still has its windowed slabs."""
        return block in self._windowed

    def count_idle(self, blocks: Iterable[int]) -> int:
        """Count the whole `blocks` that no table sees."""
        return sum(block not in self._sights for block in blocks)

    def sight(self, blocks: Iterable[int]) -> None:
        """Let one more table see `blocks`, which are whole."""
        for block in blocks:
            self._sights[block] = self._sights.get(block, 0) + 1
            self._passed.pop(block, None)
            self._ended.pop(block, None)

    def lose(self, block: int, is_named: bool, ended: bool) -> None:
        """Let one table fewer see `block`, because it has `ended` or passed the block.

        After the last one a block that is not named gives up its windowed slabs.
        """
        count = self._sights[block] - 1
        if count:
            self._sights[block] = count
            return
        del self._sights[block]
        if is_named:
            (self._ended if ended else self._passed)[block] = None
        else:
            self._free += self._windowed.pop(block)

    def drop_passed(self) -> bool:
        """Take the windowed slabs of the block that was passed first; False if there is none."""
        if not self._passed:
            return False
        self._free += self._windowed.pop(self._passed.popitem(last=False)[0])
        return True

    def drop_ended(self) -> None:
        """Take the windowed slabs of the block whose sequence ended first."""
        self._free += self._windowed.pop(self._ended.popitem(last=False)[0])

    def take_back(self, block: int) -> None:
        """Take all slabs of a block that became free."""
        self._passed.pop(block, None)
        self._ended.pop(block, None)
        self._free += self._full.pop(block)
        self._free += self._windowed.pop(block, ())

    def check(self, held: dict[int, int], in_use: set[int]) -> None:
        """Assert that `held` says how many tables see each block, and that each slab is free or in one block."""
        assert self._sights == held, "blocks in sight are miscounted"
        assert self._full.keys() == in_use, "a free block has slabs, or one in use has none"
        assert self._sights.keys() <= self._windowed.keys(), "a block in sight lacks its window"
        assert not self._passed.keys() & self._ended.keys()
        assert self._passed.keys() | self._ended.keys() == self._windowed.keys() - self._sights.keys()
        owned = [slab for part in (self._full, self._windowed) for slabs in part.values() for slab in slabs]
        assert sorted(owned + self._free) == list(range(self.num_slabs)), "slabs are lost or used twice"
