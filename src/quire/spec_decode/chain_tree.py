"""Trees of drafts by a model that runs one pass per level, as EAGLE-2 does; for all drafters with a KV cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from quire.devices.protocol import FloatArray
from quire.spec_decode.blocks import DraftBlocks
from quire.spec_decode.chain import ChainProposer
from quire.spec_decode.head import Head
from quire.spec_decode.passes import Feed, Pass, Picker
from quire.spec_decode.proposer import Draft, SpecSequence, StepView
from quire.spec_decode.tree import TreeBuilder, TreeShape


@dataclass(slots=True)
class Growing:
    """A sequence's tree: the position of its first drafted token, how deep it may get, and its nodes' table rows."""

    seq: SpecSequence
    start: int
    depth: int
    builder: TreeBuilder
    rows: list[int]


class ChainTreeProposer(ChainProposer):
    """Drafts trees for a few sequences of a step, chains for others and for those with a grammar.

    Nodes of two levels are in use at a time, each with the blocks of its own path.
    """

    def __init__(
        self,
        head: Head,
        first: Pass,
        again: Pass,
        blocks: DraftBlocks,
        picker: Picker,
        max_tokens: int,
        shape: TreeShape,
        first_row: int,
        vocab_size: int,
    ) -> None:
        """Nodes have the rows of the blocks' table from `first_row` on."""
        super().__init__(head, first, again, blocks, picker, max_tokens)
        self._shape, self._first_row, self._vocab_size = shape, first_row, vocab_size

    def _draft(self, feeds: list[Feed], counts: list[int], drafts: dict[int, Draft], step: StepView) -> None:
        wants = [
            count > 1 and not feed.seq.request.constrained for feed, count in zip(feeds, counts, strict=True)
        ]
        trees = [i for i, want in enumerate(wants) if want][: self._shape.most]
        chains = [i for i in range(len(feeds)) if i not in trees]
        if chains:
            super()._draft([feeds[i] for i in chains], [counts[i] for i in chains], drafts, step)
        if trees:
            self._draft_trees([feeds[i] for i in trees], [counts[i] for i in trees], drafts, step)

    def _draft_trees(
        self, feeds: list[Feed], counts: list[int], drafts: dict[int, Draft], step: StepView
    ) -> None:
        self._lay(feeds, step)
        rows = (np.cumsum([len(feed.tokens) for feed in feeds]) - 1).tolist()
        logits = self._first.run(feeds, self._blocks.table_SM, rows, False)
        scores = self._first.values(logits, len(rows))
        hidden = self._first.tap()[rows].copy() if self._reads_hidden else None
        for feed in feeds:
            self._done(feed, step)
        growing = []
        for feed, count in zip(feeds, counts, strict=True):
            builder = TreeBuilder(self._shape.top_k, self._vocab_size, self._head.target_ids)
            growing.append(Growing(feed.seq, feed.start + len(feed.tokens), count, builder, [feed.seq.slot]))
        for level in range(1, max(counts) + 1):
            nodes = self._grow(growing, level, scores, hidden)
            if not nodes:
                break
            logits = self._again.run(nodes, self._blocks.table_SM, list(range(len(nodes))), False)
            scores = self._again.values(logits, len(nodes))
            hidden = self._again.tap().copy() if self._reads_hidden else None
        for tree in growing:
            drafts[tree.seq.slot] = tree.builder.draft(self._shape.size(tree.depth))

    def _grow(
        self, growing: Sequence[Growing], level: int, scores: FloatArray, hidden: FloatArray | None
    ) -> list[Feed]:
        """Add level `level` to the trees that want one. Returns the nodes to compute for the next level."""
        at, feeds = 0, []
        copies: list[tuple[int, int]] = []
        for number, tree in enumerate(growing):
            if level > tree.depth:
                continue
            count = len(tree.rows)
            parents = tree.builder.grow(scores[at : at + count])
            if level < tree.depth:
                first = self._first_row + (2 * number + level % 2) * self._shape.top_k
                rows = list(range(first, first + len(parents)))
                tokens = self._ids([tree.builder.tokens[node] for node in tree.builder.frontier])
                for row, parent, token in zip(rows, parents, tokens, strict=True):
                    copies += self._blocks.lay_node(row, tree.rows[parent], tree.seq.slot, tree.start)
                    own = None if hidden is None else hidden[at + parent : at + parent + 1]
                    feeds.append(Feed(tree.seq, tree.start + level - 1, [token], own, row))
                tree.rows = rows
            at += count
        self._blocks.kv.copy_blocks(copies)
        return feeds
