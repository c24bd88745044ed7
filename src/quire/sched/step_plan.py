"""StepPlan: a step being planned. Knows ids only."""

from __future__ import annotations

import msgspec

from quire.sched.sequence import Sequence
from quire.sched.times import StepWork
from quire.types import UNSEEN, NewSeq, ScheduledSeq


class StepPlan(msgspec.Struct):
    """A step being planned: `seqs[i]` is the batch entry of `flight[i]`.

    `short`: blocks ran out, so admit nothing. `awaited`: a decoding sequence waits for the step. `decoding`: seconds
    that the step is expected to take without its prompts.
    """

    step: int
    budget: int
    seqs: list[ScheduledSeq] = []
    flight: list[Sequence] = []
    new: list[NewSeq] = []
    copies: list[tuple[int, int]] = []
    short: bool = False
    awaited: bool = False
    work: StepWork = StepWork()
    decoding: float = 0.0
    num_prompt_tokens: int = 0
    list_entries: int = 0  # of requests whose first sample starts
    num_scores: int = 0  # log-probabilities of prompts

    def place(self, seq: Sequence, count: int, new_blocks: list[int]) -> None:
        """Let `seq` compute its next `count` tokens. If fewer than pending, cut the draft first."""
        start, tokens, draft = seq.num_computed, seq.tokens, seq.draft
        known = len(tokens) + seq.num_unseen - start
        if count >= known:
            if draft and count < known + len(draft):
                draft = draft[: count - known]
            chunk = tokens[start:] + [UNSEEN] if seq.num_unseen else tokens[start:]
            item = ScheduledSeq(seq.slot, start, chunk, draft, new_blocks, True)
        else:
            item = ScheduledSeq(seq.slot, start, tokens[start : start + count], [], new_blocks, False)
        self.budget -= count
        self.seqs.append(item)
        self.flight.append(seq)
