"""Drafts by heads without attention: they read the hidden state behind the newest known token, and nothing else."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from quire.devices.hidden import HiddenRows
from quire.spec_decode.draft_pass import Feed, Pass, Picker, draft_chain
from quire.spec_decode.head import Head
from quire.spec_decode.proposer import NO_DRAFT, Computed, Draft, Proposer, SpecSequence, StepView


class StageProposer(Proposer):
    """Drafts by one graph per token. If the graphs tap a state, each gets the state of the one before (an MLP
    speculator), else all get the target's (Medusa).
    """

    drafts_freely = False

    def __init__(self, head: Head, stages: Sequence[Pass], picker: Picker, max_seqs: int) -> None:
        self._head, self._stages, self._picker = head, stages, picker
        self._table_SM = np.zeros((max_seqs, 1), np.int32)  # nothing is cached
        self._last: dict[int, tuple[int, HiddenRows]] = {}  # by slot: a position, and its features [1, F]

    def stop(self, seq: SpecSequence) -> None:
        self._last.pop(seq.slot, None)

    def observe(self, computed: Sequence[Computed], step: StepView) -> None:
        for each in computed:
            self._last[each.seq.slot] = (
                each.start + len(each.rows) - 1,
                self._head.features(step.taps, each.rows[-1:]),
            )

    def propose(self, asks: Sequence[tuple[SpecSequence, int]], step: StepView) -> list[Draft]:
        feeds, counts = [], []
        for seq, count in asks:
            position, features = self._last.get(seq.slot, (-1, None))
            if position == len(seq.tokens) - 2:
                feeds.append(Feed(seq, 0, [seq.tokens[-1]], features))
                counts.append(count)
        if not feeds:
            return [NO_DRAFT for _ in asks]
        drafts = draft_chain(self._stages, feeds, counts, self._table_SM, self._picker, _following)
        return [drafts.get(seq.slot, NO_DRAFT) for seq, _ in asks]


def _following(feed: Feed, token: int) -> Feed:
    return Feed(feed.seq, 0, [token], feed.hidden)
