"""The shape of KV blocks, on which scheduler and devices agree. Knows numbers only."""

from __future__ import annotations

import msgspec


class BlockShape(msgspec.Struct, frozen=True):
    """How many slabs a block takes: `full` ones for layers that see all positions, `windowed` ones for the others.

    The windowed layers see at most the last `reach` positions, their own included, and read `tile` aligned positions
    at a time. Slabs are of one size.
    """

    full: int = 1
    windowed: int = 0
    reach: int = 0
    tile: int = 64

    @property
    def slabs(self) -> int:
        """Slabs of a whole block."""
        return self.full + self.windowed

    def first_in_sight(self, position: int, block_size: int) -> int:
        """The first block that a token at `position` reads through a window."""
        return max(0, position - self.reach + 1) // self.tile * self.tile // block_size

    def most_in_sight(self, block_size: int, budget: int) -> int:
        """The most blocks of a sequence in sight while it grows by at most `budget` tokens at a time.

        It loses sight of blocks after a step, so it may have grown twice before that.
        """
        return -(-(self.reach + self.tile + 2 * budget) // block_size) + 1 if self.windowed else 0

    def cost(self, num_blocks: int, most_in_sight: int) -> int:
        """Bound the slabs that a sequence takes while it grows by `num_blocks` blocks."""
        return self.full * num_blocks + self.windowed * min(num_blocks, most_in_sight)

    def longest(self, num_slabs: int, block_size: int, budget: int) -> int:
        """The most tokens of a sequence for which there are `num_slabs`."""
        passing = num_slabs - self.windowed * self.most_in_sight(block_size, budget)
        return max(num_slabs // self.slabs, passing // self.full) * block_size


WHOLE_BLOCK = BlockShape()
"""A block without windowed layers."""
