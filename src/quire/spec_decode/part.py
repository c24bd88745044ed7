"""Drafts for running sequences: reports each step to a proposer, and asks it for the drafts that pay."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Sequence
from functools import partial

from quire.devices.shared import Shared
from quire.runtime.inputs import InputBuilder, StepLayout
from quire.runtime.rows import StepRows
from quire.spec_decode.acceptance import Odds, Tally
from quire.spec_decode.controller import PROBE_SHARE, Controller
from quire.spec_decode.lookup import PredictionProposer
from quire.spec_decode.proposer import NO_DRAFT, Computed, Draft, Proposer, SpecSequence, StepView, Taps
from quire.types import NewSeq, StepOutput

MOST_PREDICTED = 64
"""MOST_PREDICTED tokens of a prediction are verified in a step."""
PREDICTED = 0.95
"""PREDICTED is the acceptance of predictions before any is measured: a client sends one that it expects to be right."""
FADE_OF_ALL = 0.99
HOLD = 4
"""HOLD steps without a draft end the wait of a sequence for one."""
DECODE_TOKENS = 2
"""DECODE_TOKENS: a step measures the cost of rows if no sequence computes more besides its draft."""
IN_FLIGHT = 4
"""IN_FLIGHT steps later, a draft has been computed or dropped."""

Ask = tuple[SpecSequence, int]


class SpeculationPart:
    """Keeps the tokens of sequences that may get drafts. Reads no logits and samples nothing.

    `proposer` None: only requests that predict their output get drafts. `limit` is the most tokens of a draft;
    `count_allowed` returns the number of a slot's drafted tokens that its grammar allows.
    """

    greedy = True

    def __init__(
        self,
        proposer: Proposer | None,
        limit: int,
        controller: Controller,
        inputs: InputBuilder,
        count_allowed: Callable[[int, list[int]], int],
    ) -> None:
        self.controller = controller
        self._proposer, self._limit = proposer, limit
        self._predictions = PredictionProposer()
        self._inputs = inputs
        self._count_allowed = count_allowed
        self._tallies = {"drafts": Tally(FADE_OF_ALL), "predictions": Tally(FADE_OF_ALL, PREDICTED)}
        self._seqs: dict[int, SpecSequence] = {}
        self._prompts: Shared[array[int]] = Shared()
        self._looks_only = proposer is None or proposer.drafts_freely
        self._late: list[dict[int, list[int]]] = []  # tokens of steps without planning, by slot
        self._slept: dict[int, int] = {}  # by slot, the first position computed in them
        self._turn = 0
        self._quiet = 0  # steps since the last drafts
        self._step: StepLayout | None = None
        self._began: float | None = None  # when the step began; None: it plans no drafts

    @property
    def active(self) -> bool:
        return bool(self._seqs) or not self._looks_only

    def set(self, new: NewSeq) -> None:
        self._wake()
        request = new.request
        predicts = bool(request.prediction)
        wanted = request.sampling.speculative_decoding and (self._proposer is not None or predicts)
        if request.pooling is not None or not wanted:
            return
        tally = self._tallies["predictions" if predicts else "drafts"]
        prompt = self._prompts.take(
            new.slot, id(request.tokens), request.tokens, lambda given: array("i", given)
        )
        tokens = prompt + array("i", new.tokens[len(prompt) :])
        seq = SpecSequence(new.slot, request, new.index, tokens, Odds(tally))
        self._seqs[new.slot] = seq
        if predicts:
            self._predictions.start(seq)
        if self._proposer is not None:
            self._proposer.start(seq)

    def clear(self, slot: int) -> None:
        self._wake()
        seq = self._seqs.pop(slot, None)
        if seq is None:
            return
        self._prompts.clear(slot)
        self._predictions.stop(seq)
        if self._proposer is not None:
            self._proposer.stop(seq)

    def rows(self, step: StepLayout) -> list[int]:
        self._step = step
        self._began = None if self.controller.asleep(len(step.seqs)) else time.perf_counter()
        self._quiet += 1
        return []

    def launch(self, rows: StepRows, first: int) -> partial[None]:
        assert self._step is not None
        return partial(self._collect, self._step, self._began, () if self._looks_only else rows.taps())

    def _collect(self, step: StepLayout, began: float | None, taps: Taps, output: StepOutput) -> None:
        """Record the drawn tokens, and add drafts to `output`."""
        if began is None and self._quiet > IN_FLIGHT and (self._proposer is None or self._proposer.may_sleep):
            tokens, moved = output.tokens, output.moved
            self._late.append({slot: tokens[slot] for slot in tokens.keys() - moved} if moved else tokens)
            if not self._looks_only:
                for item in step.seqs:
                    if item.slot not in moved:
                        self._slept.setdefault(item.slot, item.start)
            return
        num_seqs, taken = len(output.tokens), time.perf_counter()
        if began is not None:
            self._measure(step, taken - began)
        self._wake()
        computed, drawing = self._take_tokens(step, output)
        view = self._view(step, taps, output)
        if self._proposer is not None:
            self._proposer.observe(computed, view)
        if drawing and began is not None:
            drafting = self._draft(drawing, num_seqs, view, output)
            self._quiet = 0 if output.drafts else self._quiet
            self.controller.record_overhead(time.perf_counter() - taken - drafting)

    def _wake(self) -> None:
        """Record the tokens and positions of steps without planning."""
        for tokens in self._late:
            for slot, new in tokens.items():
                seq = self._seqs.get(slot)
                if seq is not None:
                    seq.tokens.extend(new)
        self._late.clear()
        if self._slept and self._proposer is not None:
            inputs, starts = self._inputs, list(self._slept.items())
            self._slept = {}
            self._proposer.observe([], StepView(inputs.block_table_SM, inputs.num_blocks, starts))

    def _view(self, step: StepLayout, taps: Taps, output: StepOutput) -> StepView:
        inputs = self._inputs
        pays = not self.controller.rests
        if self._looks_only:
            return StepView(inputs.block_table_SM, drafting_pays=pays)
        starts = [(seq.slot, seq.start) for seq in step.seqs if seq.slot not in output.moved]
        return StepView(inputs.block_table_SM, inputs.num_blocks, starts, taps, pays)

    def _measure(self, step: StepLayout, seconds: float) -> None:
        if all(seq.wants_logits and len(seq.tokens) <= DECODE_TOKENS for seq in step.seqs):
            self.controller.steps.record(len(step.tokens), seconds)

    def _take_tokens(self, step: StepLayout, output: StepOutput) -> tuple[list[Computed], list[SpecSequence]]:
        """Return the positions computed for speculating sequences, and the sequences that go on."""
        computed, drawing = [], []
        for item, row in zip(step.seqs, step.cu_q, strict=False):
            seq = self._seqs.get(item.slot)
            if seq is None or item.slot in output.errors or item.slot in output.moved:
                continue
            new = output.tokens.get(item.slot, [])
            accepted = max(0, len(new) - output.forced.get(item.slot, 0) - 1)
            if item.draft and new:
                seq.odds.record(len(item.draft), accepted)
            seq.tokens.extend(new)
            computed.append(Computed(seq, item.start, range(row, row + len(item.tokens) + accepted)))
            if new and item.slot not in output.ended and not _has_end(seq, new):
                drawing.append(seq)
        return computed, drawing

    def _draft(self, drawing: list[SpecSequence], num_seqs: int, view: StepView, output: StepOutput) -> float:
        """Add drafts of the length that pays to `output`. Returns the seconds in which a model made some."""
        if self.controller.rests and self._looks_only:
            self._turn += 1
            drawing = drawing[self._turn % PROBE_SHARE :: PROBE_SHARE] or drawing[:1]
        proposer, able = self._proposer, [seq for seq in drawing if seq.room > 0]
        predicted = [(seq, min(MOST_PREDICTED, seq.room)) for seq in able if seq.request.prediction]
        drafts = self._ask(self._predictions, predicted, view)
        asks = [(seq, min(self._limit, seq.room)) for seq in able if proposer and seq.slot not in drafts]
        if proposer is not None and proposer.drafts_freely:
            drafts |= self._ask(proposer, asks, view)
            asks = []
        limits = {seq.slot: count for seq, count in asks}
        chances = []
        for seq in drawing:
            draft = drafts.get(seq.slot)
            count = limits.get(seq.slot, 0) if draft is None else len(draft.tokens)
            chances.append((draft and draft.probabilities) or seq.odds.cumulative(count))
        counts = self.controller.plan(chances, num_seqs)
        wanted, seconds = list[Ask](), 0.0
        for seq, count in zip(drawing, counts, strict=True):
            if count and (seq.slot in drafts or seq.slot in output.ahead):
                # None if its next step is launched: then it waits for that result.
                output.drafts[seq.slot] = drafts.get(seq.slot, NO_DRAFT).tokens[:count]
            elif count:
                wanted.append((seq, count))
        if wanted and proposer is not None:
            began = time.perf_counter()
            for slot, draft in self._ask(proposer, wanted, view).items():
                output.drafts[slot] = draft.tokens
            seconds = time.perf_counter() - began
            self.controller.drafting.record(max(count for _, count in wanted), seconds)
        self._hold(drawing, output)
        return seconds

    def _ask(self, proposer: Proposer, asks: Sequence[Ask], view: StepView) -> dict[int, Draft]:
        """Return the drafts by slot, as far as grammars allow their tokens; none that are empty."""
        found = {}
        for (seq, _), draft in zip(asks, proposer.propose(asks, view), strict=True):
            if seq.request.grammar is not None and draft.tokens:
                count = self._count_allowed(seq.slot, draft.tokens)
                del draft.tokens[count:]
                if draft.probabilities is not None:
                    del draft.probabilities[count:]
            if draft.tokens:
                found[seq.slot] = draft
        return found

    def _hold(self, drawing: list[SpecSequence], output: StepOutput) -> None:
        """Give sequences that had a draft lately an empty one.

        With overlapped steps such a sequence waits for its result, so that its next draft is not too late.
        """
        for seq in drawing:
            seq.since_draft = 0 if seq.slot in output.drafts else seq.since_draft + 1
            if 0 < seq.since_draft <= HOLD:
                output.drafts[seq.slot] = []


def _has_end(seq: SpecSequence, new: list[int]) -> bool:
    """Tell whether a token of `new` may end the sequence."""
    return not set(seq.request.eos_token_ids).isdisjoint(new)
