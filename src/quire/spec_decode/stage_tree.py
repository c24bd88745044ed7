"""Trees of drafts by heads without attention: each level's nodes are rows of one stage (Medusa, MLP speculators)."""

from __future__ import annotations

from collections.abc import Sequence

from quire.devices.protocol import FloatArray
from quire.spec_decode.head import Head
from quire.spec_decode.passes import Feed, Pass, Picker
from quire.spec_decode.proposer import Draft
from quire.spec_decode.stages import Ask, StageProposer
from quire.spec_decode.tree import TreeBuilder, TreeShape


class StageTreeProposer(StageProposer):
    """Drafts trees for a few sequences of a step, chains for others and for those with a grammar."""

    def __init__(
        self,
        head: Head,
        stages: Sequence[Pass],
        picker: Picker,
        max_seqs: int,
        shape: TreeShape,
        vocab_size: int,
    ) -> None:
        super().__init__(head, stages, picker, max_seqs)
        self._shape, self._vocab_size = shape, vocab_size

    def _draft(self, left: list[Ask], drafts: dict[int, Draft]) -> None:
        wants = [ask for ask in left if ask[1] > 1 and not ask[0].request.constrained]
        trees = wants[: self._shape.most]
        super()._draft([ask for ask in left if ask not in trees], drafts)
        if trees:
            self._draft_trees(trees, drafts)

    def _draft_trees(self, asks: list[Ask], drafts: dict[int, Draft]) -> None:
        builders = [TreeBuilder(self._shape.top_k, self._vocab_size, self._head.target_ids) for _ in asks]
        feeds = [[Feed(seq, 0, [seq.tokens[-1]], self._last[seq.slot][1])] for seq, _ in asks]
        for level, stage in enumerate(self._stages, 1):
            growing = [i for i, (_, count) in enumerate(asks) if level <= count]
            if not growing:
                break
            joined = [feed for i in growing for feed in feeds[i]]
            logits, states = self._run_stage(stage, joined, False)
            scores, at = stage.values(logits, len(joined)), 0
            for i in growing:
                count = len(feeds[i])
                own = None if states is None else states[at : at + count]
                feeds[i] = self._next(builders[i], asks[i], scores[at : at + count], own)
                at += count
        for (seq, count), builder in zip(asks, builders, strict=True):
            drafts[seq.slot] = builder.draft(self._shape.size(count))

    def _next(
        self, builder: TreeBuilder, ask: Ask, scores: FloatArray, states: FloatArray | None
    ) -> list[Feed]:
        """Add a level to a tree. Returns what its nodes feed the next stage."""
        seq, feeds, parents = ask[0], [], builder.grow(scores)
        for node, parent in zip(builder.frontier, parents, strict=True):
            own = self._last[seq.slot][1] if states is None else states[parent : parent + 1]
            feeds.append(Feed(seq, 0, [builder.tokens[node]], own))
        return feeds
