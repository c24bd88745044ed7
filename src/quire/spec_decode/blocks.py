"""The KV cache of a drafter: it uses the target's block ids, so that it is shared, copied and given up with them.

Behind a sequence's blocks come a few of the drafter's own per slot, for the positions of drafted tokens. `filled`
counts the first positions of each block that hold the drafter's KV of known tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from quire.devices.protocol import IntArray, KVCache
from quire.errors import EngineError


class DraftBlocks:
    """A `KVCache` for the runner, which copies blocks, and the tables that the drafter's steps use."""

    def __init__(self, kv: KVCache, num_blocks: int, max_seqs: int, max_blocks: int, ahead: int) -> None:
        """`kv` has `num_blocks` blocks, then the slots' own (`scratch_blocks`); drafts reach `ahead` positions."""
        self.kv, size = kv, kv.block_size
        self.spec, self.num_blocks, self.block_size = kv.spec, kv.num_blocks, size
        self._scratch = scratch_blocks(ahead, size)
        self._own = num_blocks + np.arange(max_seqs * self._scratch, dtype=np.int32).reshape(max_seqs, -1)
        self.table_SM = np.zeros((max_seqs, max_blocks + self._scratch), np.int32)
        self._filled = np.zeros(kv.num_blocks, np.int32)

    def place_blocks(self, rows: Sequence[Sequence[int]]) -> None:
        raise EngineError("with a drafter blocks are whole")

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        self.kv.copy_blocks(copies)
        for source, destination in copies:
            self._filled[destination] = self._filled[source]

    def copy_states(self, copies: Sequence[tuple[int, int]]) -> None:
        """Do nothing: drafters keep no states."""

    def overwritten(self, blocks: IntArray, start: int) -> None:
        """Empty the positions from `start` on in a sequence with `blocks`: the target computed them anew."""
        first, offset = divmod(start, self.block_size)
        if first < len(blocks):
            self._filled[blocks[first]] = min(int(self._filled[blocks[first]]), offset)
            self._filled[blocks[first + 1 :]] = 0

    def filled(self, blocks: IntArray, limit: int) -> int:
        """Count the first positions of a sequence, up to `limit`, that hold the drafter's KV."""
        size = self.block_size
        for place, count in enumerate(self._filled[blocks].tolist()):
            if count < size:
                return int(min(limit, place * size + count))
        return int(min(limit, len(blocks) * size))

    def fill(self, blocks: IntArray, start: int, stop: int) -> int:
        """Mark positions start..stop-1 as computed. Returns the end of those in blocks of the sequence."""
        size = self.block_size
        stop = min(stop, len(blocks) * size)
        for place in range(start // size, -(-stop // size)):
            self._filled[blocks[place]] = min(size, stop - place * size)
        return stop

    def lay_table(self, slot: int, blocks: IntArray) -> None:
        """Lay out the slot's row: the sequence's blocks, then the slot's own."""
        row = self.table_SM[slot]
        row[: len(blocks)] = blocks
        row[len(blocks) : len(blocks) + self._scratch] = self._own[slot]


def scratch_blocks(ahead: int, block_size: int) -> int:
    """Return the number of own blocks that each slot needs to draft `ahead` tokens."""
    return -(-(ahead + 1) // block_size) + 1
