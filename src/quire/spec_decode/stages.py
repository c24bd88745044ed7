"""Drafts by heads without attention: they read the hidden state behind the newest known token, and nothing else."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from quire.devices.protocol import FloatArray
from quire.devices.sampling import NOT_DRAWN
from quire.spec_decode.draft_pass import Feed, Pass, Picker
from quire.spec_decode.head import Head
from quire.spec_decode.proposer import Computed, Draft, SpecSequence, StepView

Ask = tuple[SpecSequence, int]


class StageProposer:
    """Drafts by one graph per token. If the graphs tap a state, each gets the state of the one before (an MLP
    speculator), else all get the target's (Medusa).
    """

    drafts_freely = False
    may_sleep = True

    def __init__(self, head: Head, stages: Sequence[Pass], picker: Picker, max_seqs: int) -> None:
        self._head, self._stages, self._picker = head, stages, picker
        self._recurs = bool(head.stages[0].taps)
        self._table_SM = np.zeros((max_seqs, 1), np.int32)  # nothing is cached
        self._last: dict[int, tuple[int, FloatArray]] = {}  # by slot: a position, and its features [1, F]

    def start(self, seq: SpecSequence) -> None: ...

    def stop(self, seq: SpecSequence) -> None:
        self._last.pop(seq.slot, None)

    def observe(self, computed: Sequence[Computed], step: StepView) -> None:
        for each in computed:
            self._last[each.seq.slot] = (
                each.start + len(each.rows) - 1,
                self._head.features(step.taps, each.rows[-1:]),
            )

    def propose(self, asks: Sequence[Ask], step: StepView) -> list[Draft]:
        drafts = {seq.slot: Draft() for seq, _ in asks}
        left = [ask for ask in asks if self._last.get(ask[0].slot, (-1,))[0] == len(ask[0].tokens) - 2]
        hidden = [self._last[seq.slot][1] for seq, _ in left]
        newest = [seq.tokens[-1] for seq, _ in left]
        try:
            for depth, stage in enumerate(self._stages):
                if not left:
                    break
                feeds = [
                    Feed(seq, 0, [token], own)
                    for (seq, _), token, own in zip(left, newest, hidden, strict=True)
                ]
                left, newest, hidden = self._one(depth, stage, feeds, [n for _, n in left], drafts)
        finally:
            self._picker.take_back()
        return [drafts[seq.slot] for seq, _ in asks]

    def _one(
        self, depth: int, stage: Pass, feeds: list[Feed], counts: list[int], drafts: dict[int, Draft]
    ) -> tuple[list[Ask], list[int], list[FloatArray]]:
        """Draft one more token for each feed. Returns the sequences that go on, their tokens, and their inputs."""
        seqs = [feed.seq for feed in feeds]
        greedy = self._picker.needs_largest(seqs)
        logits = stage.run(feeds, self._table_SM, list(range(len(feeds))), greedy)
        states = stage.tap().copy() if self._recurs else None
        tokens: list[int] = []
        for start, piece in stage.pieces(logits, len(feeds)):
            some = seqs[start : start + len(piece)]
            tokens += self._picker.pick(piece, some, [depth] * len(some))
        left, newest, hidden = [], [], []
        for row, (feed, token, count) in enumerate(zip(feeds, tokens, counts, strict=True)):
            if token == NOT_DRAWN:
                continue
            drafts[feed.seq.slot].tokens.append(token)
            if count > depth + 1:
                left.append((feed.seq, count))
                newest.append(token)
                assert feed.hidden is not None
                hidden.append(feed.hidden if states is None else states[row : row + 1])
        return left, newest, hidden
