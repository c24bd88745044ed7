"""Maps token prefixes to the blocks with their KV. Knows token ids and block ids, no sequences."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from quire.radix import RadixNode, RadixTree
from quire.sched.pool import BlockPool

if TYPE_CHECKING:
    from quire.sched.states import Snapshot

Node = RadixNode[int]


@dataclass(slots=True)
class PrefixMatch:
    """Reusable KV: full `blocks`, shared by reference, and a `tail` of further tokens in block `source`.

    The tail must be copied to a new block, because the sequence will write to it. The match lies on the path to `node`.
    With recurrent states it ends at `state` (None: at 0); of the tokens, `num_known` have KV.
    """

    blocks: list[int] = field(default_factory=list)
    source: int = -1
    tail: int = 0
    num_tokens: int = 0
    node: Node | None = None
    state: Snapshot | None = None
    num_known: int = 0


class PrefixIndex:
    """A radix tree from (namespace, token, token, ...) to the block that holds the key's last tokens.

    There is one node per indexed block, at the block's end; a partial block (the tail of an ended sequence) is a
    node at the depth of its last token. Lookups are exact to the token: if one stops inside a block, any node below
    has a block that begins with the matched tokens (as RadixAttention, Zheng et al. 2023, with the fixed pages of
    PagedAttention, Kwon et al. 2023). Invariant: all full blocks above a node are indexed too.

    Sequences keep a *cursor*, the node of their last full indexed block (at first `root`), so that indexing the
    next block does not walk from the root. Two sequences that compute the same tokens at the same time hold twin
    blocks; the first is indexed, the other stays unnamed, and its sequence goes on below the first.
    """

    def __init__(
        self, pool: BlockPool, block_size: int, is_whole: Callable[[int], bool] | None = None
    ) -> None:
        """A block that `is_whole` denies makes way for another one with the same tokens."""
        self.on_drop: Callable[[Node], None] | None = None  # is told each node that loses its block
        self._pool = pool
        self._is_whole = is_whole
        self._block_size = block_size
        self._tree: RadixTree[int] = RadixTree()
        self._nodes: list[Node | None] = [None] * pool.num_blocks

    @property
    def root(self) -> Node:
        return self._tree.root

    def match(self, tokens: list[int], namespace: Hashable, limit: int) -> tuple[PrefixMatch, Node]:
        """Find the longest known prefix of tokens[:limit], and the cursor of its last full block. Changes nothing."""
        key: list[Hashable] = [namespace]
        key += tokens[:limit]
        node, length = self._tree.match(key)
        deepest = node
        num_tokens = max(0, length - 1)
        count, tail = divmod(num_tokens, self._block_size)
        source = -1
        if tail:
            below = node
            while below.value is None:
                below = next(iter(below.children.values()))
            source = below.value
        node = node.above(count * self._block_size + 1)
        cursor = node if count else self.root
        blocks: list[int] = []
        while len(blocks) < count:
            assert node.parent is not None
            if node.value is not None and (node.depth - 1) % self._block_size == 0:
                blocks.append(node.value)
            node = node.parent
        blocks.reverse()
        return PrefixMatch(blocks, source, tail, num_tokens, deepest), cursor

    def extend(
        self, cursor: Node, tokens: list[int], blocks: list[int], num_computed: int, namespace: Hashable
    ) -> Node:
        """Index the full blocks of tokens[:num_computed] below `cursor`; returns the new cursor.

        `blocks` is the table that holds them. Partial blocks that a new full one covers are removed.
        """
        size = self._block_size
        if cursor.parent is None:  # evicted meanwhile, or nothing indexed yet
            cursor = self.root
        first = max(0, cursor.depth - 1) // size
        for k in range(first, num_computed // size):
            cursor = self._insert(cursor, tokens[k * size : (k + 1) * size], blocks[k], namespace)
        return cursor

    def extend_tail(
        self, cursor: Node, tokens: list[int], blocks: list[int], num_computed: int, namespace: Hashable
    ) -> Node:
        """Index the partial block at the end of tokens[:num_computed], unless its tokens are known already.

        `cursor` points to the last full block. The partial block must not be written to any more. Returns the deepest
        node.
        """
        full, tail = divmod(num_computed, self._block_size)
        if not tail:
            return cursor
        span: list[Hashable] = [*tokens[num_computed - tail : num_computed]]
        key = span if full else [namespace, *span]
        node, length = self._tree.match(key, cursor)
        if length == len(key):
            return node if node.depth == num_computed + 1 and node.value is not None else cursor
        return self._insert(cursor, tokens[num_computed - tail : num_computed], blocks[full], namespace)

    def _insert(self, cursor: Node, span: list[int], block: int, namespace: Hashable) -> Node:
        key: list[Hashable] = [*span] if cursor is not self.root else [namespace, *span]
        node = self._tree.insert(key, block, cursor)
        old = node.value
        if self._is_whole is not None and old is not None and old != block and not self._is_whole(old):
            self._nodes[old] = None
            self._pool.forget(old)
            node.value = block
        if node.value == block and self._nodes[block] is None:
            self._nodes[block] = node
            self._pool.name(block)
        above = node.parent
        while above is not None and above is not cursor:
            higher = above.parent
            if above.value is not None:
                self._drop(above)
            above = higher
        return node

    def touch(self, cursor: Node) -> None:
        """Make the path to `cursor` most recently used, the root's end last, so that leaves are evicted first."""
        node: Node | None = cursor
        while node is not None:
            if node.value is not None:
                self._pool.touch(node.value)
            node = node.parent

    def evict(self, num_free: int) -> None:
        """Forget least recently used cached blocks until `num_free` are free; that many must be available.

        Blocks in use keep their KV. A cached block may have a block in use below it (a twin's); then everything
        below becomes unreachable and leaves the index too.
        """
        while self._pool.num_free < num_free:
            oldest = self._pool.oldest_cached()
            node = self._nodes[oldest]
            assert node is not None
            if node.children:
                self.forget([oldest])
            else:
                self._drop(node)

    def _drop(self, node: Node) -> None:
        block = node.value
        assert block is not None
        self._nodes[block] = None
        self._pool.forget(block)
        if self.on_drop is not None:
            self.on_drop(node)
        self._tree.remove(node)

    def forget(self, blocks: list[int]) -> None:
        """Forget `blocks` and everything below them."""
        for block in blocks:
            node = self._nodes[block]
            for below in reversed(list(self._tree.walk(node))) if node is not None else ():
                if below.value is not None:
                    self._drop(below)

    def clear(self) -> None:
        """Forget everything. Blocks in use stay in use; cursors start again from the root."""
        self._tree.clear()
        for block, node in enumerate(self._nodes):
            if node is not None:
                if self.on_drop is not None:
                    self.on_drop(node)
                self._nodes[block] = None
                self._pool.forget(block)

    def entries(self) -> list[tuple[list[Hashable], int]]:
        """List every indexed key (namespace first) with its block; for tests and dumps. O(size)."""
        found: list[tuple[list[Hashable], int]] = []
        paths: dict[Node, list[Hashable]] = {}
        for node in self._tree.walk():
            paths[node] = [*(paths[node.parent] if node.parent else ()), *node.edge]
            if node.value is not None:
                found.append((paths[node], node.value))
        return found

    def check(self) -> None:
        """Assert that tree, blocks and pool agree. O(size)."""
        self._tree.check()
        named = 0
        for node in self._tree.walk():
            if node.value is None:
                continue
            named += 1
            assert self._nodes[node.value] is node, f"block {node.value} is indexed twice"
            assert self._pool.is_named(node.value)
            if (node.depth - 1) % self._block_size:
                assert not node.children, "a partial block has something below it"
            above = node.parent
            start = (node.depth - 2) // self._block_size * self._block_size + 1
            while above is not None and above.depth > start:
                assert above.value is None, "two blocks of one path lie at the same place"
                above = above.parent
            assert start == 1 or (above is not None and above.depth == start and above.value is not None)
        assert named == sum(self._pool.is_named(block) for block in range(self._pool.num_blocks))
