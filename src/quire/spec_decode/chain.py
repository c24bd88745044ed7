"""Drafts by a model, one token after the other: draft models, EAGLE heads, layers that predict further tokens.

A draft model computes token i at position i. A head computes the pair (hidden states of position i, token i + 1) there,
so it is one position behind. Accepted tokens are computed again: a head then reads the target's hidden states instead
of its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from quire.devices.hidden import HiddenRows, join
from quire.spec_decode.blocks import DraftBlocks
from quire.spec_decode.controller import PROBE_SHARE
from quire.spec_decode.draft_pass import KEPT, Feed, Pass, Picker, draft_chain
from quire.spec_decode.head import Head
from quire.spec_decode.proposer import NO_DRAFT, Computed, Draft, Proposer, SpecSequence, StepView

MOST_WAITING = 32
"""MOST_WAITING positions' hidden states wait for the next draft; more are computed at once."""


@dataclass(slots=True)
class Progress:
    """The drafter's state of a sequence: KV up to position `done`, then waiting hidden states [n, F].

    `lost`: hidden states are missing, so this sequence gets no more drafts.
    """

    done: int = -1  # not known yet
    waiting: list[HiddenRows] = field(default_factory=list)
    num_waiting: int = 0
    lost: bool = False


class ChainProposer(Proposer):
    """Batches sequences; computes the new tokens of each, then one drafted token per pass."""

    drafts_freely = False

    def __init__(
        self, head: Head, first: Pass, again: Pass, blocks: DraftBlocks, picker: Picker, max_tokens: int
    ) -> None:
        self._head, self._first, self._again = head, first, again
        self._blocks, self._picker, self._max_tokens = blocks, picker, max_tokens
        self._reads_hidden = bool(head.taps)
        self._progress: dict[int, Progress] = {}  # by slot
        self._skipped = 0  # new sequences since the last one that may be drafted for

    @property
    def may_sleep(self) -> bool:
        """Tell whether steps may be missed: a draft model reads their tokens later, a head needs every hidden state."""
        return not self._reads_hidden or all(progress.lost for progress in self._progress.values())

    def start(self, seq: SpecSequence) -> None:
        self._progress[seq.slot] = Progress()

    def stop(self, seq: SpecSequence) -> None:
        self._progress.pop(seq.slot, None)

    def observe(self, computed: Sequence[Computed], step: StepView) -> None:
        for slot, start in step.starts:
            progress = self._progress.get(slot)
            kept = start if progress is None or progress.done < start else progress.done
            self._blocks.overwritten(step.blocks(slot), kept)
        late = []
        for each in computed:
            progress = self._progress[each.seq.slot]
            if progress.done < 0:
                progress.done = self._blocks.filled(step.blocks(each.seq.slot), each.start)
                progress.lost = self._reads_hidden and (progress.done < each.start or self._skips(step))
            if not self._reads_hidden or progress.lost:
                continue
            self._keep(each, progress, step)
            if progress.num_waiting > MOST_WAITING:
                if step.drafting_pays:
                    late.append(each.seq)
                else:
                    progress.lost, progress.waiting = True, []
        if late:
            self._catch_up(late, step, leave=1)

    def _skips(self, step: StepView) -> bool:
        """Tell whether a new sequence gets no drafts: they have not paid for long, and others measure that."""
        if step.drafting_pays:
            return False
        self._skipped = (self._skipped + 1) % PROBE_SHARE
        return self._skipped > 0

    def _keep(self, each: Computed, progress: Progress, step: StepView) -> None:
        """Keep the hidden states of new positions for the next pass."""
        known = progress.done + progress.num_waiting
        if each.start > known:
            progress.lost, progress.waiting = True, []
            return
        skip = known - each.start
        if skip < len(each.rows):
            features = self._head.features(step.taps, each.rows[skip:])
            progress.waiting.append(features)
            progress.num_waiting += len(features)

    def _feed(self, seq: SpecSequence, most: int, leave: int = 0) -> Feed:
        """Return the next positions that the drafter lacks, at most `most`, without the last `leave`."""
        progress, shift = self._progress[seq.slot], int(self._reads_hidden)
        start, stop = progress.done, len(seq.tokens) - shift - leave
        if self._reads_hidden:
            stop = min(stop, start + progress.num_waiting - leave)
        stop = min(stop, start + most)
        tokens = self._ids(seq.tokens[start + shift : stop + shift].tolist())
        if not self._reads_hidden:
            return Feed(seq, start, tokens)
        if len(progress.waiting) > 1:
            progress.waiting = [join(progress.waiting)]
        hidden = progress.waiting[0][: stop - start] if progress.waiting else np.zeros((0, 1), np.float32)
        return Feed(seq, start, tokens, hidden)

    def _ids(self, tokens: list[int]) -> list[int]:
        """Return the drafter's ids of the target's tokens."""
        ids = self._head.draft_ids
        return tokens if ids is None else ids[tokens].tolist()

    def _done(self, feed: Feed, step: StepView) -> None:
        """Record that the drafter has computed `feed`."""
        progress, stop = self._progress[feed.seq.slot], feed.start + len(feed.tokens)
        progress.done = self._blocks.fill(step.blocks(feed.seq.slot), feed.start, stop)
        if self._reads_hidden and progress.waiting:
            progress.waiting = [progress.waiting[0][progress.done - feed.start :]]
            progress.num_waiting = len(progress.waiting[0])

    def _catch_up(self, seqs: Sequence[SpecSequence], step: StepView, leave: int) -> list[SpecSequence]:
        """Compute the missing positions but the last `leave`, in one pass. Returns the sequences that are done."""
        ready, feeds, room = [], [], self._max_tokens
        for seq in seqs:
            feed = self._feed(seq, room, leave)
            if feed.tokens:
                feeds.append(feed)
                room -= len(feed.tokens)
            rest = len(seq.tokens) - int(self._reads_hidden) - feed.start - len(feed.tokens)
            if rest <= leave:
                ready.append(seq)
        self._lay(feeds, step)
        if feeds:
            self._first.run(feeds, self._blocks.table_SM)
            for feed in feeds:
                self._done(feed, step)
        return ready

    def _lay(self, feeds: Sequence[Feed], step: StepView) -> None:
        for feed in feeds:
            self._blocks.lay_table(feed.seq.slot, step.blocks(feed.seq.slot))

    def propose(self, asks: Sequence[tuple[SpecSequence, int]], step: StepView) -> list[Draft]:
        wanted = [(seq, count) for seq, count in asks if self._can_draft(seq, count)]
        behind = [seq for seq, _ in wanted if self._missing(seq) > MOST_WAITING]
        if behind:
            ready = set(map(id, self._catch_up(behind, step, leave=1)))
            wanted = [(seq, n) for seq, n in wanted if seq not in behind or id(seq) in ready]
        feeds = [self._feed(seq, MOST_WAITING + 1) for seq, _ in wanted]
        while feeds and sum(len(feed.tokens) for feed in feeds) > self._max_tokens:
            feeds.pop()
        wanted = [(seq, n) for (seq, n), feed in zip(wanted, feeds, strict=False) if feed.tokens]
        feeds = [feed for feed in feeds if feed.tokens]
        if not feeds:
            return [NO_DRAFT for _ in asks]
        self._lay(feeds, step)
        runners = itertools.chain([self._first], itertools.repeat(self._again))
        counts = [count for _, count in wanted]
        drafts = draft_chain(runners, feeds, counts, self._blocks.table_SM, self._picker, self._following)
        for feed in feeds:
            self._done(feed, step)
        return [drafts.get(seq.slot, NO_DRAFT) for seq, _ in asks]

    def _following(self, feed: Feed, token: int) -> Feed:
        ids = [KEPT] if token == KEPT else self._ids([token])
        return Feed(feed.seq, feed.start + len(feed.tokens), ids)

    def _missing(self, seq: SpecSequence) -> int:
        return len(seq.tokens) - int(self._reads_hidden) - self._progress[seq.slot].done

    def _can_draft(self, seq: SpecSequence, count: int) -> bool:
        progress = self._progress[seq.slot]
        if progress.lost or progress.done < 0:
            return False
        if self._reads_hidden and progress.num_waiting < self._missing(seq):
            return False
        return self._head.max_len is None or len(seq.tokens) + count <= self._head.max_len
