"""Samples tokens. The device's sampler holds each slot's sampling parameters and history."""

from __future__ import annotations

from collections.abc import Container, Sequence
from functools import partial
from typing import Protocol

import msgspec

from quire.devices.sampling import (
    NOT_DRAWN,
    NOTHING_ALLOWED,
    Logits,
    Pending,
    Sampler,
    Samples,
    TokenMask,
    takes_largest,
)
from quire.runtime.inputs import StepLayout
from quire.runtime.rows import StepRows
from quire.runtime.slots.protocol import Collect, slot_sampling
from quire.types import NewSeq, StepOutput

Drawn = list[tuple[list[int], Pending[Samples]]]
"""Drawn are calls of the sampler: the slot of each row, and the samples."""


class Draws(msgspec.Struct):
    """Rows to sample: one per slot, after its last token, and one more after each token of its draft.

    `rows` are tokens of the step, `positions` the positions to sample. `drafts` maps a place in these lists to
    the draft token of the slot's next row.
    """

    rows: list[int] = []
    slots: list[int] = []
    positions: list[int] = []
    drafts: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self.rows)

    def only(self, places: Sequence[int]) -> Draws:
        """Keep the rows at `places`, ascending; they must include all earlier rows of the same slots."""
        return Draws(
            [self.rows[i] for i in places],
            [self.slots[i] for i in places],
            [self.positions[i] for i in places],
            {new: self.drafts[old] for new, old in enumerate(places) if old in self.drafts},
        )

    def drafts_of(self, start: int, stop: int) -> list[int]:
        """Give the drafts of rows start..stop-1 in the sampler's form."""
        return [self.drafts.get(i, NOT_DRAWN) for i in range(start, stop)]


def draws_of(step: StepLayout, slots: Container[int]) -> Draws:
    """List the rows to sample in a step for the sequences in `slots`."""
    rows: list[int] = []
    drawn: list[int] = []
    positions: list[int] = []
    drafts: dict[int, int] = {}
    cu_q, ends = step.cu_q, step.ends
    for i, seq in enumerate(step.seqs):
        slot = seq.slot
        if not seq.wants_logits or slot not in slots:
            continue
        stop, end, draft = cu_q[i + 1], ends[i], seq.draft
        if draft:
            count = len(draft)
            drafts.update(enumerate(draft, len(rows)))
            rows += range(stop - 1 - count, stop - 1)
            positions += range(end - count, end)
            drawn += [slot] * count
        rows.append(stop - 1)
        positions.append(end)
        drawn.append(slot)
    return Draws(rows, drawn, positions, drafts)


class Processed(Protocol):
    """Rows to sample after Python has read or changed some of them."""

    logits: Logits

    def finish(self, samples: Samples) -> None:
        """Complete the log-probabilities and errors of the samples."""


class Processors(Protocol):
    """What Python does with rows before they are sampled: see `quire.processors.part`."""

    def begin(self, slots: list[int], logits: Logits, masks_LW: TokenMask | None) -> Processed | None:
        """Change the rows of `slots` that have processors; None if no row needs anything."""


class SamplingPart:
    """Samples every decoding sequence. The grammar part samples constrained ones, through `draw`."""

    def __init__(self, sampler: Sampler) -> None:
        self.sampler = sampler
        self.processors: Processors | None = None
        self._free: set[int] = set()  # slots without a grammar
        self._whole: set[int] = set()  # slots that need more than the largest logit
        self._draws = Draws()

    def set(self, new: NewSeq) -> None:
        request, params = new.request, new.request.sampling
        if request.pooling is not None:
            return
        self.sampler.set(new.slot, slot_sampling(new))
        if not request.constrained:
            self._free.add(new.slot)
        if not takes_largest(params, request.bad_words_token_ids):
            self._whole.add(new.slot)

    def clear(self, slot: int) -> None:
        self.sampler.clear(slot)
        self._free.discard(slot)
        self._whole.discard(slot)

    @property
    def active(self) -> bool:
        return True

    @property
    def greedy(self) -> bool:
        return not self._whole

    @property
    def is_idle(self) -> bool:
        """Tell whether no sequence without a grammar is sampled in this step."""
        return not self._draws

    def rows(self, step: StepLayout) -> list[int]:
        self._draws = draws_of(step, self._free)
        return self._draws.rows

    def launch(self, rows: StepRows, first: int) -> Collect | None:
        draws = self._draws
        return self.draw(draws, rows, range(first, first + len(draws.rows))) if draws.rows else None

    def draw(
        self, draws: Draws, rows: StepRows, numbers: range | list[int], masks_LW: TokenMask | None = None
    ) -> Collect:
        """Sample `draws`, which are rows `numbers` of the result; accept drafts while they equal the samples.

        A failing row fails its slot, unless earlier rows of the slot were sampled: then a later step tries again.
        """
        if draws.drafts:
            return partial(_add_accepted, self._draw_drafts(draws, rows, numbers, masks_LW))
        drawn: Drawn = []
        for part, logits in rows.logits(numbers):
            masks = None if masks_LW is None else masks_LW[part]
            slots = draws.slots[part]
            drawn.append((slots, self._sample(slots, logits, draws.positions[part], None, masks)))
        return partial(_add, drawn)

    def _sample(
        self,
        slots: list[int],
        logits: Logits,
        positions: list[int],
        drafts: list[int] | None,
        masks_LW: TokenMask | None,
    ) -> Pending[Samples]:
        """Sample rows, after the processors of their sequences, if any."""
        work = None if self.processors is None else self.processors.begin(slots, logits, masks_LW)
        if work is None:
            return self.sampler.sample(logits, slots, positions, drafts, masks_LW)
        samples = self.sampler.sample(work.logits, slots, positions, drafts, masks_LW).result()
        work.finish(samples)
        return samples

    def _draw_drafts(
        self, draws: Draws, rows: StepRows, numbers: range | list[int], masks_LW: TokenMask | None
    ) -> Drawn:
        drawn: Drawn = []
        # The last slot of the piece before, and its last draft.
        slot, draft = NOT_DRAWN, NOT_DRAWN
        for part, logits in rows.logits(numbers):
            start, stop = part.start, part.stop
            if drawn and draws.slots[start] == slot:
                # The next row of that slot is sampled if its draft was right.
                last = drawn[-1][1].result().tokens[-1]
                while (last == NOT_DRAWN or last != draft) and start < stop and draws.slots[start] == slot:
                    start += 1
            if start == stop:
                continue
            rest, drafts = slice(start, stop), draws.drafts_of(start, stop)
            masks = None if masks_LW is None else masks_LW[rest]
            if start > part.start:
                logits = logits[start - part.start :]
            slots = draws.slots[rest]
            drawn.append((slots, self._sample(slots, logits, draws.positions[rest], drafts, masks)))
            slot, draft = slots[-1], drafts[-1]
        return drawn


def _add(drawn: Drawn, output: StepOutput) -> None:
    """Add one sampled token per slot."""
    for slots, pending in drawn:
        samples = pending.result()
        for slot, token in zip(slots, samples.tokens, strict=True):
            output.tokens[slot] = [token]
        for row, error in samples.errors.items():
            del output.tokens[slots[row]]
            _fail(slots[row], error, output)
        for row, scores in samples.logprobs.items():
            output.logprobs[slots[row]] = [scores]


def _add_accepted(drawn: Drawn, output: StepOutput) -> None:
    """Add the sampled tokens of each slot: the accepted part of its draft, and the one after it."""
    for slots, pending in drawn:
        samples = pending.result()
        for slot, token in zip(slots, samples.tokens, strict=True):
            if token != NOT_DRAWN:
                output.tokens.setdefault(slot, []).append(token)
        for row, error in samples.errors.items():
            if slots[row] not in output.tokens:
                _fail(slots[row], error, output)
        for row, scores in samples.logprobs.items():
            output.logprobs.setdefault(slots[row], []).append(scores)


def _fail(slot: int, error: str, output: StepOutput) -> None:
    output.errors[slot] = error
    if error == NOTHING_ALLOWED:
        output.refused.add(slot)
