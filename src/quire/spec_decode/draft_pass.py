"""Runs the graphs of drafters: lays tokens of several sequences out as one step, and picks tokens from its logits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, chain
from typing import Any

import numpy as np

from quire.devices.drafts import KeepsDraws
from quire.devices.hidden import HiddenRows, join
from quire.devices.protocol import Executable, IntArray, ModelInput
from quire.devices.sampling import NOT_DRAWN, Logits, Sampler, takes_largest
from quire.spec_decode.head import Head
from quire.spec_decode.proposer import Draft, SpecSequence

KEPT = -2
"""KEPT stands for a token that the device keeps: the one drawn last for its slot. The next pass takes it there."""


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
        self,
        feeds: Sequence[Feed],
        table_SM: IntArray,
        rows: Sequence[int] = (),
        greedy: bool = True,
        hidden: HiddenRows | None = None,
    ) -> Logits:
        """Compute the feeds, and the logits of the tokens `rows` of all feeds in a row. Returns the first of them.

        `hidden` replaces the feeds' own.
        """
        if hidden is None and feeds[0].hidden is not None:
            hidden = join([feed.hidden for feed in feeds if feed.hidden is not None])
        tokens = [token for feed in feeds for token in feed.tokens]
        ends = [feed.start + len(feed.tokens) for feed in feeds]
        positions = [at for feed, end in zip(feeds, ends, strict=True) for at in range(feed.start, end)]
        slots, unseen_U2 = [feed.seq.slot for feed in feeds], None
        if tokens[0] == KEPT:  # then all are
            tokens, unseen_U2 = [0] * len(slots), np.array([*enumerate(slots)], np.int32)
        parts = tokens, positions, [0, *accumulate(len(feed.tokens) for feed in feeds)], ends, slots, rows
        # One conversion for all lists, because each takes longer than the numbers of a small step.
        every = np.array([*chain.from_iterable(parts)], np.int32)
        arrays = (
            every[end - len(p) : end] for p, end in zip(parts, accumulate(map(len, parts)), strict=True)
        )
        tokens_T, positions_T, cu_q_B1, kv_len_B, slots_B, rows_L = arrays
        return self._executable.run(ModelInput(
            tokens_T, positions_T, cu_q_B1, kv_len_B, slots_B, table_SM, rows_L, greedy, hidden, unseen_U2=unseen_U2,
        ))  # fmt: skip

    def draw(
        self,
        feeds: Sequence[Feed],
        table_SM: IntArray,
        rows: Sequence[int],
        picker: Picker,
        owners: Sequence[SpecSequence],
        depths: Sequence[int],
        hidden: HiddenRows | None = None,
    ) -> list[int]:
        """Compute the feeds, and pick a token from each of `rows`, for `owners` whose drafts have `depths` tokens."""
        greedy, kept = picker.needs_largest(owners), picker.keeps(owners)
        logits, tokens = self.run(feeds, table_SM, rows, greedy, hidden), list[int]()
        # A sampler draws one row of a slot at a time.
        alone = not (greedy or kept) and len({seq.slot for seq in owners}) < len(owners)
        pick = partial(picker.pick, kept=True) if kept else picker.pick
        while True:
            for first in range(0, len(logits), 1 if alone else len(logits)):
                own = logits[first : first + 1] if alone else logits
                some = slice(len(tokens), len(tokens) + len(own))
                tokens += pick(own, owners[some], depths[some])
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
    target's tokens if their logits are alike. The draws are taken back when the draft is made. A device that can keeps
    its tokens until all are read.
    """

    def __init__(self, sampler: Sampler, vocab_size: int, head: Head, largest: bool) -> None:
        self._sampler, self._vocab_size, self._largest = sampler, vocab_size, largest
        self._target_ids, width = head.target_ids, head.graphs[-1].vocab_size
        self._width = vocab_size if head.target_ids is None else width
        mapped = head.target_ids is not None or width != vocab_size
        self._places = _places(head.target_ids, width, vocab_size) if mapped else None
        self._drawn: dict[int, int] = {}  # by slot
        self._device = None
        if isinstance(sampler, KeepsDraws):
            self._device = sampler.keep_draws(self._width, head.target_ids, head.draft_ids)
        self._kept: list[tuple[Sequence[SpecSequence], Any]] = []  # owners of tokens that the device keeps

    def needs_largest(self, seqs: Sequence[SpecSequence]) -> bool:
        """Tell whether the largest logit of each row decides."""
        return self._largest or all(
            takes_largest(seq.request.sampling, seq.request.bad_words_token_ids) for seq in seqs
        )

    def keeps(self, seqs: Sequence[SpecSequence]) -> bool:
        """Tell whether the device can keep the tokens: no token of a draft changes the logits of the next."""
        device = self._device
        return device is not None and (self._largest or device.draws([seq.slot for seq in seqs]))

    def pick(
        self, logits: Logits, seqs: Sequence[SpecSequence], ahead: Sequence[int], kept: bool = False
    ) -> list[int]:
        """Choose the target's id of a token per row, or NOT_DRAWN if none can be. `ahead`: tokens drafted before.

        `kept`: the device keeps them until they are read, and all are KEPT.
        """
        largest = self.needs_largest(seqs)
        if largest and not kept:
            ids = logits.largest(self._width)
            best: list[int] = (ids if self._target_ids is None else self._target_ids[ids]).tolist()
            return best
        rows, slots = logits if largest else self._widened(logits), [seq.slot for seq in seqs]
        positions = [len(seq.tokens) + n for seq, n in zip(seqs, ahead, strict=True)]
        if kept and self._device is not None:
            self._kept.append((seqs, self._device.draw(rows, slots, None if largest else positions)))
            return [KEPT] * len(slots)
        tokens = self._sampler.sample(rows, slots, positions).result().tokens
        for seq, token in zip(seqs, tokens, strict=True):
            if token != NOT_DRAWN:
                self._drawn[seq.slot] = self._drawn.get(seq.slot, 0) + 1
        return tokens

    def read(self, drafts: Mapping[int, Draft]) -> None:
        """Add the tokens that the device keeps to the drafts of their slots."""
        if self._kept and self._device is not None:
            tokens = self._device.read([found for _, found in self._kept])
            extend(drafts, [seq for owners, _ in self._kept for seq in owners], tokens)

    def take_back(self) -> None:
        """Make the sampler forget its draws for drafts."""
        for slot, count in self._drawn.items():
            self._sampler.retract(slot, count)
        self._drawn.clear()
        self._kept.clear()

    def _widened(self, logits: Logits) -> Logits:
        """Rows over the target's vocabulary: tokens that the drafter lacks cannot be drawn."""
        return logits if self._places is None else logits.widened(*self._places, self._vocab_size)


def _places(target_ids: IntArray | None, width: int, vocab_size: int) -> tuple[IntArray, IntArray]:
    """Return the columns of a drafter's logits that stand for tokens of the target, and the ids of those."""
    ids: Any = np.arange(width) if target_ids is None else target_ids
    columns = np.flatnonzero((ids >= 0) & (ids < vocab_size))
    last = dict(zip(ids[columns].tolist(), columns.tolist(), strict=True))
    return np.array([*last.values()], np.int32), np.array([*last], np.int32)


def extend(drafts: Mapping[int, Draft], owners: Sequence[SpecSequence], tokens: Sequence[int]) -> None:
    """Add tokens to the drafts of their owners' slots, each up to the first that was not drawn."""
    ended: set[int] = set()
    for seq, token in zip(owners, tokens, strict=True):
        if token == NOT_DRAWN:
            ended.add(seq.slot)
        elif token != KEPT and seq.slot not in ended:
            drafts[seq.slot].tokens.append(token)


def draft_chain(
    runners: Iterable[Pass],
    feeds: list[Feed],
    counts: Sequence[int],
    table_SM: IntArray,
    picker: Picker,
    follow: Callable[[Feed, int], Feed],
) -> dict[int, Draft]:
    """Draft `counts[i]` tokens after `feeds[i]`, one with each of `runners`. Returns the drafts by slot.

    `follow` makes the next feed of a feed and its token. If the graphs tap a state, it is the input of the next pass.
    """
    drafts, states = {feed.seq.slot: Draft() for feed in feeds}, None
    try:
        for depth, runner in enumerate(runners):
            rows = [end - 1 for end in accumulate(len(feed.tokens) for feed in feeds)]
            owners = [feed.seq for feed in feeds]
            tokens = runner.draw(feeds, table_SM, rows, picker, owners, [depth] * len(feeds), states)
            extend(drafts, owners, tokens)
            going = [
                place
                for place, (token, count) in enumerate(zip(tokens, counts, strict=True))
                if token != NOT_DRAWN and count > depth + 1
            ]
            if not going:
                break
            states = runner.states([rows[place] for place in going])
            feeds, counts = [follow(feeds[i], tokens[i]) for i in going], [counts[i] for i in going]
        picker.read(drafts)
    finally:
        picker.take_back()
    return drafts
