"""Owns the block tables of sequences: sharing, growth and release. Knows no slots and no order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from typing import TYPE_CHECKING

from quire.lazy import Lazy
from quire.radix import RadixNode
from quire.sched.pool import BlockPool
from quire.sched.prefix import PrefixIndex, PrefixMatch
from quire.sched.sequence import Sequence
from quire.shapes import WHOLE_BLOCK, BlockShape

if TYPE_CHECKING:
    from quire.sched import slabs, states
    from quire.state_rows import StateRows
else:
    slabs, states = Lazy("quire.sched.slabs"), Lazy("quire.sched.states")

Cursor = RadixNode[int]
Copies = list[tuple[int, int]]


class BlockTables:
    """The one place that changes `Sequence.blocks`.

    A sequence writes only at positions from `num_settled` on; no other table and no index entry holds the
    blocks there. KV that exists elsewhere is shared in whole blocks and copied below that.

    Batches are computed in the order of scheduling. So a table may share blocks that a step in flight still
    writes, and blocks may be released and taken again before that step is done.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        enable_prefix_caching: bool,
        recompute_last: bool = False,
        shape: BlockShape = WHOLE_BLOCK,
        budget: int = 0,
        rows: StateRows | None = None,
    ) -> None:
        """With windowed layers in `shape`, `num_blocks` is for whole blocks; tables grow by at most `budget` tokens.

        A cost counts slabs: a block takes `shape.full` and, while its window is in sight, `shape.windowed` more.
        `rows` are those of recurrent states, if the model has such.
        """
        self._recompute_last = recompute_last
        self.block_size = block_size
        self.caching = enable_prefix_caching and (rows is None or rows.num_snapshots > 0)
        self.num_blocks = num_blocks
        self._shape, self._full, self._windowed = shape, shape.full, shape.windowed
        self._num_slabs = num_blocks * shape.slabs
        self._most_in_sight = shape.most_in_sight(block_size, budget)
        self.most_tokens = shape.longest(self._num_slabs, block_size, budget)
        made = slabs.SlabPool(shape, self._num_slabs, block_size) if shape.windowed else None
        self.slabs = made
        self.pool = BlockPool(self._num_slabs // shape.full, None if made is None else made.take_back)
        self.prefix = PrefixIndex(self.pool, block_size, None if made is None else made.is_whole)
        self.states = None if rows is None else states.StatePool(rows, block_size, self.prefix)

    @property
    def num_available(self) -> int:
        """Whole blocks that can be allocated: free ones, and cached ones after eviction."""
        if self.slabs is None:
            return self.pool.num_available
        return self._available // self._shape.slabs

    @property
    def num_free(self) -> int:
        """Whole blocks that can be allocated without forgetting anything."""
        if self.slabs is None:
            return self.pool.num_free
        return self.slabs.num_free // self._shape.slabs

    @property
    def _available(self) -> int:
        """Count the slabs that can be allocated."""
        if self.slabs is None:
            return self.pool.num_available
        used, in_sight = self.pool.num_used, self.slabs.num_in_sight
        return self._num_slabs - self._full * used - self._windowed * in_sight

    def cost(self, num_blocks: int) -> int:
        """Bound the slabs that a table takes while it grows by `num_blocks` blocks."""
        return self._shape.cost(num_blocks, self._most_in_sight)

    def gain(self, seq: Sequence) -> int:
        """Bound the slabs that a running sequence gives back."""
        return self._full * len(seq.blocks) + self._windowed * (len(seq.blocks) - seq.num_passed)

    def can_gain(self, gain: int, seq: Sequence, match: PrefixMatch) -> bool:
        """Tell whether a waiting sequence would find room if others gave `gain` back."""
        return gain + self._available >= self.cost(self.count(len(seq.tokens)) - len(match.blocks))

    def count(self, num_tokens: int) -> int:
        """Count the blocks for `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def match(self, seq: Sequence) -> tuple[PrefixMatch, Cursor] | None:
        """Find the most KV that `seq` can reuse: from the prefix index, its fork's base, or another sample.

        None: another sample will soon have the prompt, or scores it; wait for it. Changes nothing.
        """
        if seq.request.sampling.scores_prompt and seq.index and any(s.scores_due for s in seq.group.live):
            return None
        limit = seq.match_limit
        match, cursor = PrefixMatch(), self.prefix.root
        if self.caching:
            match, cursor = self.find(seq.tokens, seq.group.namespace, limit, self._recompute_last)
        if seq.base is not None and min(limit, seq.base.num_tokens) > match.num_tokens:
            match = self._longer(match, self._whole(self._shorten(seq.base, limit)))
        reach = min(limit, seq.num_prompt_tokens)
        if match.num_tokens < reach and len(seq.group.live) > 1 and (self.states is None or self.caching):
            holder, computing = seq.group.prompt_holder()
            if holder is not None:
                match = self._longer(match, self.fork(holder, reach))
            elif computing:
                return None
        return match, cursor

    def find(
        self, tokens: list[int], namespace: Hashable, limit: int, less_one: bool = False
    ) -> tuple[PrefixMatch, Cursor]:
        """Find the longest reusable prefix of tokens[:limit] in the index, and the cursor of its last full block.

        `less_one` cuts the last token off. Its block stays the same, as the token after it may count.
        """
        match, cursor = self.prefix.match(tokens, namespace, limit)
        less = less_one and match.num_tokens > 0
        whole = self._whole(self._shorten(match, match.num_tokens - 1) if less else match)
        if whole.num_tokens < match.num_tokens:
            cursor = cursor.above(len(whole.blocks) * self.block_size + 1)
        return whole, cursor if whole.blocks else self.prefix.root

    def _longer(self, match: PrefixMatch, other: PrefixMatch) -> PrefixMatch:
        return other if other.num_tokens > match.num_tokens else match

    def _whole(self, match: PrefixMatch) -> PrefixMatch:
        """Cut `match` to the last place from which a sequence can go on: all that it needs there is still stored."""
        if self.states is None:
            return match if self.slabs is None else self._in_windows(match)
        return self.states.whole(match, self._in_windows, self._shorten)

    def _in_windows(self, match: PrefixMatch) -> PrefixMatch:
        """Cut `match` to the last place where the windows that a sequence sees are still stored."""
        slabs, blocks = self.slabs, match.blocks
        if slabs is None or all(map(slabs.is_whole, self._in_sight(match))):
            return match
        end = first = len(blocks)
        while first > slabs.first_in_sight(end * self.block_size):
            first -= 1
            if not slabs.is_whole(blocks[first]):
                end = first
        return self._shorten(match, end * self.block_size)

    def fork(self, seq: Sequence, num_tokens: int, live: bool = False) -> PrefixMatch:
        """Share the KV of the first `num_tokens` (at most `num_settled`) tokens of a running sequence, or of fewer.

        Full blocks are shared. The last one is copied unless `num_tokens` fills it: both sequences write to it. If it
        is `live`, a recurrent state is copied too, which must be held; else there must be a snapshot.
        """
        full, tail = divmod(num_tokens, self.block_size)
        source, node = seq.blocks[full] if tail else -1, seq.cursor
        match = PrefixMatch(seq.blocks[:full], source, tail, num_tokens, node)
        if live and self.states is not None and seq.state is not None and self._in_windows(match) is match:
            match.state = self.states.fork(seq.state, num_tokens)
        return self._whole(match)

    def _shorten(self, match: PrefixMatch, limit: int) -> PrefixMatch:
        if match.num_tokens <= limit:
            return match
        full, tail = divmod(limit, self.block_size)
        below = match.blocks[full] if full < len(match.blocks) else match.source
        return PrefixMatch(match.blocks[:full], below if tail else -1, tail, limit, match.node)

    def hold(self, match: PrefixMatch) -> None:
        """Keep blocks and state of `match` until `let_go`, even if all others release them."""
        self._share(match)
        if match.state is not None and self.states is not None:
            self.states.hold(match.state)

    def _share(self, match: PrefixMatch) -> None:
        for block in _blocks(match):
            self.pool.acquire(block)
        if self.slabs is not None:
            self.slabs.sight(self._in_sight(match))

    def let_go(self, match: PrefixMatch) -> None:
        if match.state is not None and self.states is not None:
            self.states.let_go(match.state)
        if self.slabs is not None:
            self._lose(self._in_sight(match), ended=True)
        for block in _blocks(match):
            self.pool.release(block)

    def _in_sight(self, match: PrefixMatch) -> list[int]:
        """List the blocks that a sequence sees through windows after `match`, and the source of its copy."""
        assert self.slabs is not None
        return _blocks(match)[self.slabs.first_in_sight(match.num_tokens) :]

    def _lose(self, blocks: list[int], ended: bool) -> None:
        assert self.slabs is not None
        for block in blocks:
            self.slabs.lose(block, self.pool.is_named(block), ended)

    def pass_by(self, seq: Sequence, position: int) -> None:
        """Lose sight of the blocks that no token of `seq` from `position` on sees through a window."""
        if self.slabs is None:
            return
        first = self.slabs.first_in_sight(position)
        if first > seq.num_passed:
            self._lose(seq.blocks[seq.num_passed : first], ended=False)
            seq.num_passed = first

    def count_cached(self, seq: Sequence) -> int:
        """Count a new sequence's tokens whose KV exists, as far as its fork's base and the prefix index tell."""
        held = 0 if seq.base is None else seq.base.num_tokens
        if not self.caching:
            return held
        match, _ = self.find(seq.tokens, seq.group.namespace, seq.match_limit)
        return max(held, match.num_tokens)

    def owed(self, seq: Sequence) -> int:
        """Count the slabs that a running sequence still needs for its known tokens."""
        return self.cost(max(0, self.count(len(seq.tokens)) - len(seq.blocks)))

    def fit(self, seq: Sequence, match: PrefixMatch, owed: int = 0) -> PrefixMatch | None:
        """Return `match` if there is room for `seq` and all its tokens beside the cost `owed`, else None.

        The source of a copy cannot be evicted in the same step. If that block is needed, the match gives up its
        tail.
        """
        if self.states is not None and not self.states.has_room(match.state):
            return None
        new = self.count(len(seq.tokens)) - len(match.blocks)
        idle = self._count_idle(match.blocks, match.num_tokens)
        wanted = self._full * (new + self.pool.count_cached(match.blocks))
        wanted += self._windowed * min(new + idle, self._most_in_sight)
        spare = self._available - wanted - owed
        if spare < 0:
            return None
        source = [match.source] if match.tail else []
        kept = self._full * self.pool.count_cached(source) + self._windowed * self._count_idle(source, 0)
        if spare < kept:
            shorter = self._shorten(match, match.num_tokens - match.tail)
            return self.fit(seq, self._whole(shorter), owed)
        return match

    def _count_idle(self, blocks: list[int], position: int) -> int:
        """Count the `blocks` that a token at `position` would see through a window and no table sees now."""
        if self.slabs is None:
            return 0
        return self.slabs.count_idle(blocks[self.slabs.first_in_sight(position) :])

    def open(self, seq: Sequence, match: PrefixMatch, cursor: Cursor, num_tokens: int) -> Copies:
        """Make the table of `seq` for its first `num_tokens` tokens, beginning with the blocks of `match`.

        Returns the copies (source, destination) to make. Each source has an extra holder until `unpin`, so
        that no block is both a source and newly written in one step.
        """
        self._share(match)
        if self.states is not None:
            known = match.num_known if self.caching else 0
            seq.state = self.states.start(match.state, known // self.block_size * self.block_size)
        own = self.allocate(self.count(num_tokens) - len(match.blocks))
        seq.blocks = match.blocks + own
        if self.slabs is not None:
            seq.num_passed = min(len(match.blocks), self.slabs.first_in_sight(match.num_tokens))
        seq.num_computed = match.num_tokens
        seq.cursor = cursor
        if self.caching:
            done = max(0, cursor.depth - 1) // self.block_size
            seq.index_at = (done + 1) * self.block_size
        return [(match.source, own[0])] if match.tail else []

    def unpin(self, copies: Copies) -> None:
        """Release the sources of the copies, once all blocks of the step are allocated."""
        for source, _ in copies:
            if self.slabs is not None:
                self._lose([source], ended=True)
            self.pool.release(source)

    def allocate(self, count: int) -> list[int]:
        """Take `count` whole blocks. If too few are free, gives up windows out of sight, then evicts cached blocks."""
        slabs = self.slabs
        if slabs is None:
            if count > self.pool.num_free:
                self.prefix.evict(count)
            return self.pool.allocate(count)
        while slabs.num_free < count * self._shape.slabs:
            if slabs.drop_passed():
                continue
            if self.pool.num_cached:
                self.prefix.evict(self.pool.num_free + 1)
            else:
                slabs.drop_ended()
        blocks = self.pool.allocate(count)
        slabs.assign(blocks)
        return blocks

    def loss(self, seq: Sequence) -> int | None:
        """Count computed tokens whose KV only `seq` holds, lost with its blocks; None if it would free no block."""
        alone = self.pool.count_exclusive(seq.blocks)
        if not alone:
            return None
        return max(0, seq.num_computed - (len(seq.blocks) - alone) * self.block_size)

    def index(self, seq: Sequence) -> None:
        """Enter full blocks of known, computed tokens of `seq` into the prefix index."""
        settled = seq.num_settled
        seq.cursor = self.prefix.extend(seq.cursor, seq.tokens, seq.blocks, settled, seq.group.namespace)
        seq.index_at = (settled // self.block_size + 1) * self.block_size

    def close(self, seq: Sequence, failed_from: int | None = None) -> None:
        """Release all blocks. Known, computed tokens stay cached, including the partial block at their end.

        After a failure, everything that the sequence computed from position `failed_from` on leaves the index.
        """
        if self.caching and failed_from is None:
            self.index(seq)
            space, settled = seq.group.namespace, seq.num_settled
            seq.cursor = self.prefix.extend_tail(seq.cursor, seq.tokens, seq.blocks, settled, space)
        elif self.caching and failed_from is not None:
            if self.states is not None:  # the cursor may have been evicted, but not the nodes above it
                match, _ = self.prefix.match(seq.tokens, seq.group.namespace, len(seq.tokens))
                self.states.forget_after(match.node, failed_from)
            self.prefix.forget(seq.blocks[failed_from // self.block_size :])
            seq.cursor = self.prefix.root
        if self.slabs is not None:
            self._lose(seq.blocks[seq.num_passed :][::-1], ended=True)
        for block in reversed(seq.blocks):
            self.pool.release(block)
        self.prefix.touch(seq.cursor)
        if self.states is not None and seq.state is not None:
            at = seq.cursor if self.caching and failed_from is None else None
            self.states.stop(seq.state, seq.num_settled, at)
            seq.state = None
        seq.blocks = []
        seq.num_passed = 0
        seq.draft = []
        seq.num_computed = 0
        seq.cursor = self.prefix.root

    def check(self, running: list[Sequence], held: list[PrefixMatch]) -> None:
        """Assert that pool, index, tables and held matches agree and that no sequence writes to shared blocks."""
        pool, size = self.pool, self.block_size
        pool.check([*(seq.blocks for seq in running), *map(_blocks, held)])
        self.prefix.check()
        if self.states is not None:
            self.states.check(running, [match.state for match in held if match.state is not None])
        if self.slabs is not None:
            in_sight = Counter(block for seq in running for block in seq.blocks[seq.num_passed :])
            in_sight.update(block for match in held for block in self._in_sight(match))
            self.slabs.check(dict(in_sight), set(range(pool.num_blocks)) - pool.free)
        holders = Counter(block for seq in running for block in seq.blocks)
        shared = {block for match in held for block in match.blocks}
        for seq in running:
            own = seq.blocks[seq.num_settled // size :]
            assert seq.num_computed <= min(
                len(seq.tokens) + seq.num_unseen + len(seq.draft), len(seq.blocks) * size
            )
            assert all(holders[block] == 1 for block in own), "a block to be written is shared"
            assert not shared.intersection(own), "a block to be written is held as a full one"
            assert not any(map(pool.is_named, own)), "a block to be written is indexed"


def _blocks(match: PrefixMatch) -> list[int]:
    return [*match.blocks, match.source] if match.tail else match.blocks
