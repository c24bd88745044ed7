"""Drafts of a whole block in one pass (DFlash): the newest token, then masks whose rows give the tokens after it."""

from __future__ import annotations

from collections.abc import Sequence

from quire.spec_decode.blocks import DraftBlocks
from quire.spec_decode.chain import ChainProposer
from quire.spec_decode.draft_pass import Feed, Pass, Picker, extend
from quire.spec_decode.head import Head
from quire.spec_decode.proposer import Draft, SpecSequence, StepView


class BlockProposer(ChainProposer):
    """Catches the context up as a head does; then each sequence adds a block to one pass."""

    def __init__(
        self, head: Head, context: Pass, block: Pass, blocks: DraftBlocks, picker: Picker, max_tokens: int
    ) -> None:
        super().__init__(head, context, block, blocks, picker, max_tokens)
        self._block, self._size = block, head.most + 1

    def propose(self, asks: Sequence[tuple[SpecSequence, int]], step: StepView) -> list[Draft]:
        drafts = {seq.slot: Draft() for seq, _ in asks}
        wanted = [(seq, count) for seq, count in asks if self._can_draft(seq, count)]
        ready = set(map(id, self._catch_up([seq for seq, _ in wanted], step, leave=0)))
        wanted = [(seq, count) for seq, count in wanted if id(seq) in ready]
        most = max(1, self._max_tokens // self._size)
        try:
            for start in range(0, len(wanted), most):
                self._blocks_of(wanted[start : start + most], drafts, step)
            self._picker.read(drafts)
        finally:
            self._picker.take_back()
        return [drafts[seq.slot] for seq, _ in asks]

    def _blocks_of(
        self, wanted: list[tuple[SpecSequence, int]], drafts: dict[int, Draft], step: StepView
    ) -> None:
        """Draft for as many sequences as one pass takes."""
        masks = [self._head.mask_token] * (self._size - 1)
        feeds = [Feed(seq, len(seq.tokens) - 1, [seq.tokens[-1], *masks]) for seq, _ in wanted]
        self._lay(feeds, step)
        owners = [seq for seq, count in wanted for _ in range(count)]
        depths = [depth for _, count in wanted for depth in range(count)]
        rows = [
            number * self._size + 1 + depth
            for number, (_, count) in enumerate(wanted)
            for depth in range(count)
        ]
        tokens = self._block.draw(feeds, self._blocks.table_SM, rows, self._picker, owners, depths)
        extend(drafts, owners, tokens)
