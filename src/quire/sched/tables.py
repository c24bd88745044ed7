"""Owns the block tables of sequences: sharing, growth and release. Knows no slots and no order."""

from __future__ import annotations

from collections import Counter

from quire.radix import RadixNode
from quire.sched.pool import BlockPool
from quire.sched.prefix import PrefixIndex, PrefixMatch
from quire.sched.sequence import Sequence

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
        self, num_blocks: int, block_size: int, enable_prefix_caching: bool, recompute_last: bool = False
    ) -> None:
        self._recompute_last = recompute_last
        self.block_size = block_size
        self.caching = enable_prefix_caching
        self.pool = BlockPool(num_blocks)
        self.prefix = PrefixIndex(self.pool, block_size)

    def count(self, num_tokens: int) -> int:
        """The number of blocks for `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def match(self, seq: Sequence) -> tuple[PrefixMatch, Cursor] | None:
        """The most KV that `seq` can reuse: from the prefix index, its fork's base, or another sample.

        None: another sample will soon have the prompt; wait for it. Changes nothing.
        """
        limit = seq.match_limit
        match, cursor = PrefixMatch(), self.prefix.root
        if self.caching:
            match, cursor = self.prefix.match(seq.tokens, seq.group.namespace, limit)
            if self._recompute_last and match.num_tokens:
                match, cursor = self._less_one(match, cursor)
        if seq.base is not None and min(limit, seq.base.num_tokens) > match.num_tokens:
            match = self._shorten(seq.base, limit)
        reach = min(limit, seq.num_prompt_tokens)
        if match.num_tokens < reach and len(seq.group.live) > 1:
            holder, computing = seq.group.prompt_holder()
            if holder is not None:
                match = self.fork(holder, reach)
            elif computing:
                return None
        return match, cursor

    def fork(self, seq: Sequence, num_tokens: int) -> PrefixMatch:
        """The KV of the first `num_tokens` (at most `num_settled`) tokens of a running sequence.

        Full blocks are shared. The last one is copied unless `num_tokens` fills it: both sequences write to it.
        """
        full, tail = divmod(num_tokens, self.block_size)
        return PrefixMatch(seq.blocks[:full], seq.blocks[full] if tail else -1, tail, num_tokens)

    def _shorten(self, match: PrefixMatch, limit: int) -> PrefixMatch:
        if match.num_tokens <= limit:
            return match
        full, tail = divmod(limit, self.block_size)
        below = match.blocks[full] if full < len(match.blocks) else match.source
        return PrefixMatch(match.blocks[:full], below if tail else -1, tail, limit)

    def _less_one(self, match: PrefixMatch, cursor: Cursor) -> tuple[PrefixMatch, Cursor]:
        """`match` without its last token. The block that had it is the same, as the token after it may count."""
        match = self._shorten(match, match.num_tokens - 1)
        depth = len(match.blocks) * self.block_size
        while cursor.depth > depth + 1:
            assert cursor.parent is not None
            cursor = cursor.parent
        return match, cursor if match.blocks else self.prefix.root

    def hold(self, match: PrefixMatch) -> None:
        """Keep the blocks of `match` until `let_go`, even if all others release them."""
        for block in _blocks(match):
            self.pool.acquire(block)

    def let_go(self, match: PrefixMatch) -> None:
        for block in _blocks(match):
            self.pool.release(block)

    def count_cached(self, seq: Sequence) -> int:
        """Tokens of a new sequence whose KV exists, as far as its fork's base and the prefix index tell."""
        held = 0 if seq.base is None else seq.base.num_tokens
        if not self.caching:
            return held
        match, _ = self.prefix.match(seq.tokens, seq.group.namespace, seq.match_limit)
        return max(held, match.num_tokens)

    def owed(self, seq: Sequence) -> int:
        """Blocks that a running sequence still needs for its known tokens."""
        return max(0, self.count(len(seq.tokens)) - len(seq.blocks))

    def fit(self, seq: Sequence, match: PrefixMatch, owed: int = 0) -> PrefixMatch | None:
        """`match` if there are blocks for all tokens of `seq` beside `owed` others, else None.

        The source of a copy cannot be evicted in the same step. If that block is needed, the match gives up its
        tail.
        """
        pool = self.pool
        wanted = self.count(len(seq.tokens)) - len(match.blocks) + pool.count_cached(match.blocks)
        spare = pool.num_available - wanted - owed
        if spare < 0:
            return None
        if match.tail and spare < pool.count_cached((match.source,)):
            return PrefixMatch(match.blocks, num_tokens=match.num_tokens - match.tail)
        return match

    def open(self, seq: Sequence, match: PrefixMatch, cursor: Cursor, num_tokens: int) -> Copies:
        """Make the table of `seq` for its first `num_tokens` tokens, beginning with the blocks of `match`.

        Returns the copies (source, destination) to make. Each source has an extra holder until `unpin`, so
        that no block is both a source and newly written in one step.
        """
        for block in _blocks(match):
            self.pool.acquire(block)
        own = self.allocate(self.count(num_tokens) - len(match.blocks))
        seq.blocks = match.blocks + own
        seq.num_computed = match.num_tokens
        seq.cursor = cursor
        if self.caching:
            done = max(0, cursor.depth - 1) // self.block_size
            seq.index_at = (done + 1) * self.block_size
        return [(match.source, own[0])] if match.tail else []

    def unpin(self, copies: Copies) -> None:
        """Release the sources of the copies, once all blocks of the step are allocated."""
        for source, _ in copies:
            self.pool.release(source)

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks. Evicts cached ones if too few are free."""
        if count > self.pool.num_free:
            self.prefix.evict(count)
        return self.pool.allocate(count)

    def loss(self, seq: Sequence) -> int | None:
        """Computed tokens whose KV only `seq` holds, lost with its blocks; None if it would free no block."""
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
            full = failed_from // self.block_size
            seq.cursor = self.prefix.forget(seq.cursor, frozenset(seq.blocks[full:]))
        for block in reversed(seq.blocks):
            self.pool.release(block)
        self.prefix.touch(seq.cursor)
        seq.blocks = []
        seq.draft = []
        seq.num_computed = 0
        seq.cursor = self.prefix.root

    def check(self, running: list[Sequence], held: list[PrefixMatch]) -> None:
        """Assert that pool, index, tables and held matches agree and that no sequence writes to shared blocks."""
        pool, size = self.pool, self.block_size
        pool.check([*(seq.blocks for seq in running), *map(_blocks, held)])
        self.prefix.check()
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
