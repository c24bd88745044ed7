"""Runs the graphs of drafters: lays tokens of several sequences out as one step, and picks tokens from its logits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from quire.devices.hidden import HiddenRows, join
from quire.devices.host import HostLogits
from quire.devices.protocol import Executable, IntArray, ModelInput
from quire.devices.sampling import NOT_DRAWN, Logits, Sampler, takes_largest
from quire.spec_decode.proposer import Draft, SpecSequence


@dataclass(slots=True)
class Feed:
    """Tokens of one sequence at positions start, start + 1, ..., and the graph's input for each [n, F]."""

    seq: SpecSequence
    start: int
    tokens: list[int]
    hidden: HiddenRows | None = None


class Pass:
    """An executable and its limits. `max_logit_rows` rows of logits are held at a time."""

    def __init__(self, executable: Executable, max_logit_rows: int) -> None:
        self._executable = executable
        self._max_logit_rows = max_logit_rows

    def run(
        self, feeds: Sequence[Feed], table_SM: IntArray, rows: Sequence[int] = (), greedy: bool = True
    ) -> Logits:
        """Compute the feeds, and the logits of the tokens `rows` of all feeds in a row. Returns the first of them."""
        counts = [len(feed.tokens) for feed in feeds]
        ends = [feed.start + count for feed, count in zip(feeds, counts, strict=True)]
        positions = np.concatenate(
            [np.arange(feed.start, end, dtype=np.int32) for feed, end in zip(feeds, ends, strict=True)]
        )
        states = [feed.hidden for feed in feeds if feed.hidden is not None]
        hidden = join(states) if states else None
        return self._executable.run(
            ModelInput(
                np.array([token for feed in feeds for token in feed.tokens], np.int32),
                positions,
                np.concatenate([[0], np.cumsum(counts)]).astype(np.int32),
                np.array(ends, np.int32),
                np.array([feed.seq.slot for feed in feeds], np.int32),
                table_SM,
                np.array(rows, np.int32),
                greedy,
                hidden,
            )
        )

    def draw(
        self,
        feeds: Sequence[Feed],
        table_SM: IntArray,
        rows: Sequence[int],
        picker: Picker,
        owners: Sequence[SpecSequence],
        depths: Sequence[int],
    ) -> list[int]:
        """Compute the feeds, and pick a token from each of `rows`, for `owners` whose drafts have `depths` tokens."""
        greedy = picker.needs_largest(owners)
        logits, tokens = self.run(feeds, table_SM, rows, greedy), list[int]()
        repeats = len({seq.slot for seq in owners}) < len(owners)
        while True:
            # A sampler draws one row of a slot at a time.
            stride = 1 if repeats and not greedy else len(logits)
            for first in range(0, len(logits), stride):
                some = slice(len(tokens), len(tokens) + stride)
                tokens += picker.pick(logits[first : first + stride], owners[some], depths[some])
            if len(tokens) == len(rows):
                return tokens
            end = min(len(tokens) + self._max_logit_rows, len(rows))
            logits = self._executable.logits(len(tokens), end)

    def states(self, rows: Sequence[int]) -> HiddenRows | None:
        """Copy `rows` of the tapped layer's output, if the graph taps one."""
        taps = self._executable.taps()
        return taps[0][rows] if taps else None


class Picker:
    """Chooses the tokens of drafts: the likeliest ones, or those that the target's own sampler draws from the logits.

    The sampler has the noise of each position, and the penalties and limits of each request, so that it draws the
    target's tokens if their logits are alike. The draws are taken back when the draft is made.
    """

    def __init__(self, sampler: Sampler, vocab_size: int, target_ids: IntArray | None, largest: bool) -> None:
        self._sampler, self._vocab_size = sampler, vocab_size
        self._target_ids, self._largest = target_ids, largest
        self._drawn: dict[int, int] = {}  # by slot

    def needs_largest(self, seqs: Sequence[SpecSequence]) -> bool:
        """Tell whether the largest logit of each row decides."""
        return self._largest or all(
            takes_largest(seq.request.sampling, seq.request.bad_words_token_ids) for seq in seqs
        )

    def pick(self, logits: Logits, seqs: Sequence[SpecSequence], ahead: Sequence[int]) -> list[int]:
        """Choose the target's id of a token per row, or NOT_DRAWN if none can be. `ahead`: tokens drafted before."""
        if self.needs_largest(seqs):
            ids = self._best(logits)
            return ids if self._target_ids is None else self._target_ids[ids].tolist()
        slots = [seq.slot for seq in seqs]
        positions = [len(seq.tokens) + n for seq, n in zip(seqs, ahead, strict=True)]
        tokens = self._sampler.sample(self._widened(logits), slots, positions).result().tokens
        for seq, token in zip(seqs, tokens, strict=True):
            if token != NOT_DRAWN:
                self._drawn[seq.slot] = self._drawn.get(seq.slot, 0) + 1
        return tokens

    def take_back(self) -> None:
        """Make the sampler forget its draws for drafts."""
        for slot, count in self._drawn.items():
            self._sampler.retract(slot, count)
        self._drawn.clear()

    def _best(self, logits: Logits) -> list[int]:
        if isinstance(logits, HostLogits) and logits.best is not None and (logits.best >= 0).all():
            best: list[int] = logits.best.tolist()
            return best
        values, width = logits.numpy(), None if self._target_ids is not None else self._vocab_size
        best = values[:, :width].argmax(1).tolist()
        return best

    def _widened(self, logits: Logits) -> Logits:
        """Rows over the target's vocabulary: tokens that the drafter lacks cannot be drawn."""
        values = logits.numpy()
        if self._target_ids is None and values.shape[1] == self._vocab_size:
            return logits
        wide = np.full((len(values), self._vocab_size), -np.inf, np.float32)
        ids = np.arange(values.shape[1]) if self._target_ids is None else self._target_ids
        known = (ids >= 0) & (ids < self._vocab_size)
        wide[:, ids[known]] = values[:, known]
        return HostLogits(wide)


def draft_chain(
    runners: Iterable[Pass],
    feeds: list[Feed],
    counts: Sequence[int],
    table_SM: IntArray,
    picker: Picker,
    follow: Callable[[Feed, int, HiddenRows | None], Feed],
) -> dict[int, Draft]:
    """Draft `counts[i]` tokens after `feeds[i]`, one with each of `runners`. Returns the drafts by slot.

    `follow` makes the next feed of a feed, its token and its tapped state.
    """
    drafts = {feed.seq.slot: Draft() for feed in feeds}
    try:
        for depth, runner in enumerate(runners):
            if not feeds:
                break
            rows = (np.cumsum([len(feed.tokens) for feed in feeds]) - 1).tolist()
            owners = [feed.seq for feed in feeds]
            tokens = runner.draw(feeds, table_SM, rows, picker, owners, [depth] * len(feeds))
            states = runner.states(rows)
            ahead, left = [], []
            for row, (feed, token, count) in enumerate(zip(feeds, tokens, counts, strict=True)):
                if token == NOT_DRAWN:
                    continue
                drafts[feed.seq.slot].tokens.append(token)
                if count > depth + 1:
                    ahead.append(follow(feed, token, None if states is None else states[row : row + 1]))
                    left.append(count)
            feeds, counts = ahead, left
    finally:
        picker.take_back()
    return drafts
