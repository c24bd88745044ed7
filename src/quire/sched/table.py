"""Owns the block tables of sequences: what they share, grow by and give back. Knows no slots and no order."""

from __future__ import annotations

import sys

from quire.radix import RadixNode
from quire.sched.block_pool import BlockPool
from quire.sched.live import LiveSequence
from quire.sched.prefix import PrefixIndex, PrefixMatch

Cursor = RadixNode[int]
Copies = list[tuple[int, int]]


class BlockTables:
    """The one place that changes `Sequence.blocks`.

    A sequence writes only at positions from its `num_computed` on, and the blocks there are its alone and not
    indexed. What it finds computed elsewhere it shares by whole blocks and copies below that.
    """

    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool) -> None:
        self.block_size = block_size
        self.caching = enable_prefix_caching
        self.pool = BlockPool(num_blocks)
        self.prefix = PrefixIndex(self.pool, block_size)

    def count(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def match(self, seq: LiveSequence) -> tuple[PrefixMatch, Cursor] | None:
        """What `seq` can reuse: from the prefix index or a running sample of its request, whichever has more.

        None: another sample is about to have the prompt; wait for it. Changes nothing.
        """
        limit = seq.match_limit
        match, cursor = PrefixMatch(), self.prefix.root
        if self.caching:
            match, cursor = self.prefix.match(seq.tokens, seq.group.namespace, limit)
        reach = min(limit, seq.num_prompt_tokens)
        if match.num_tokens < reach and len(seq.group.live) > 1:
            holder, computing = seq.group.prompt_holder()
            if holder is not None:
                full, tail = divmod(reach, self.block_size)
                source = holder.blocks[full] if tail else -1
                match = PrefixMatch(holder.blocks[:full], source, tail, reach)
            elif computing:
                return None
        return match, cursor

    def fit(self, seq: LiveSequence, match: PrefixMatch) -> PrefixMatch | None:
        """`match` if blocks for all tokens of `seq` can be had, else None.

        The source of a copy cannot be evicted in the same step: where that block is needed, the match loses
        its tail.
        """
        pool = self.pool
        wanted = self.count(len(seq.tokens)) - len(match.blocks) + pool.count_cached(match.blocks)
        spare = pool.num_available - wanted
        if spare < 0:
            return None
        if match.tail and spare < pool.count_cached((match.source,)):
            return PrefixMatch(match.blocks, num_tokens=match.num_tokens - match.tail)
        return match

    def open(self, seq: LiveSequence, match: PrefixMatch, cursor: Cursor, num_tokens: int) -> Copies:
        """Make the table of `seq` for its first `num_tokens` tokens, beginning with what `match` found.

        Returns the copies (source, destination) to make. Each source has one more holder until `unpin`, so
        that no block is both a source and newly written in one step.
        """
        for block in match.blocks:
            self.pool.acquire(block)
        if match.tail:
            self.pool.acquire(match.source)
        own = self.allocate(self.count(num_tokens) - len(match.blocks))
        seq.blocks = match.blocks + own
        seq.num_computed = match.num_tokens
        seq.cursor = cursor
        done = max(0, cursor.depth - 1) // self.block_size
        seq.index_at = (done + 1) * self.block_size if self.caching else sys.maxsize
        return [(match.source, own[0])] if match.tail else []

    def unpin(self, copies: Copies) -> None:
        """All blocks of the step are given out: the sources of its copies need no protection any more."""
        for source, _ in copies:
            self.pool.release(source)

    def allocate(self, count: int) -> list[int]:
        """`count` blocks, evicting cached ones if too few are free."""
        if count > self.pool.num_free:
            self.prefix.evict(count)
        return self.pool.allocate(count)

    def loss(self, seq: LiveSequence) -> int | None:
        """Computed tokens whose KV only `seq` holds, lost with its blocks; None: it would free no block."""
        alone = self.pool.count_exclusive(seq.blocks)
        if not alone:
            return None
        return max(0, seq.num_computed - (len(seq.blocks) - alone) * self.block_size)

    def index(self, seq: LiveSequence) -> None:
        """Enter the full blocks of what `seq` has computed into the prefix index."""
        computed = seq.num_computed
        seq.cursor = self.prefix.extend(seq.cursor, seq.tokens, seq.blocks, computed, seq.group.namespace)
        seq.index_at = (computed // self.block_size + 1) * self.block_size

    def close(self, seq: LiveSequence, failed: bool = False) -> None:
        """Give all blocks back. What was computed stays cached, to the token, unless the sequence failed."""
        if self.caching and not failed:
            self.index(seq)
            space = seq.group.namespace
            seq.cursor = self.prefix.extend_tail(seq.cursor, seq.tokens, seq.blocks, seq.num_computed, space)
        for block in reversed(seq.blocks):
            self.pool.release(block)
        self.prefix.touch(seq.cursor)
        seq.blocks = []
        seq.draft = []
        seq.num_computed = 0
        seq.cursor = self.prefix.root

    def check(self, holders: list[LiveSequence]) -> None:
        """Assert that pool, index and tables of `holders` agree and that nobody writes to shared blocks."""
        pool = self.pool
        pool.check(seq.blocks for seq in holders)
        self.prefix.check()
        for seq in holders:
            full, count = seq.num_computed // self.block_size, len(seq.blocks)
            assert seq.num_computed <= min(len(seq.tokens), count * self.block_size)
            assert pool.count_exclusive(seq.blocks[full:]) == count - full, "a block to be written is shared"
            assert not any(map(pool.is_named, seq.blocks[full:])), "a block to be written is indexed"
