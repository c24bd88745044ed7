"""Takes failed steps back, and finds the sequence that makes them fail. Ids only."""

from __future__ import annotations

from collections import deque

from quire.sched.plan import Planner
from quire.sched.sequence import FINISHED, RUNNING, Sequence
from quire.sched.step_plan import StepPlan
from quire.sched.tables import BlockTables
from quire.types import StepOutput

SMALLER_STEPS = 64
"""SMALLER_STEPS after a step for which the device had no memory are at most half as large as that one."""


class Suspects:
    """The sequences of a step that failed. Each computes alone up to its next token; the one that fails alone ends."""

    def __init__(self, planner: Planner, tables: BlockTables) -> None:
        self._planner, self._tables = planner, tables
        self._left: deque[Sequence] = deque()
        self._whole_budget, self._smaller = planner.budget, 0  # smaller steps to go

    def first(self) -> Sequence | None:
        """Return the one whose turn it is; None if nobody is suspect."""
        while self._left and self._left[0].status is FINISHED:
            self._left.popleft()
        return self._left[0] if self._left else None

    def undo(self, exhausted: bool = False) -> tuple[Sequence, int] | None:
        """Take back the steps in flight, of which the oldest failed, and send all sequences back to the queue.

        If the failed step computed all that ran, and that is one sequence, returns it, still running, and the first
        position that it computed. If the step `exhausted` the memory, smaller ones follow unless it had one token.
        """
        planner, starts = self._planner, dict[Sequence, int]()
        failed, plans = planner.in_flight[0], list(planner.in_flight)
        planner.in_flight.clear()
        for plan in plans:
            for item, seq in zip(plan.seqs, plan.flight, strict=True):
                starts.setdefault(seq, item.start)
                if item.wants_logits and seq.request.pooling is None:
                    seq.num_unseen -= 1
        if any(seq.status is not RUNNING for seq in starts):
            self._tables.prefix.clear()  # one left, and what it did not compute was indexed
        running, count = planner.running, sum(len(item.tokens) + len(item.draft) for item in failed.seqs)
        if exhausted and count > 1 and not planner.whole_prompts:
            planner.budget, self._smaller = count // 2, SMALLER_STEPS
            planner.preempt_all(starts)
            return None
        if running == failed.flight and len(running) == 1:
            return running[0], starts[running[0]]
        planner.preempt_all(starts)
        self._left = deque(seq for seq in starts if seq.status is not FINISHED)
        return None

    def clear(self, plan: StepPlan, output: StepOutput) -> None:
        """Take note of a step that succeeded: a suspect that has come through it waits until the others have."""
        if self._left and plan.seqs[0].wants_logits and not output.deferred:
            seq = self._left.popleft()
            if self._left and seq.status is RUNNING:
                self._planner.preempt(seq)
        if self._smaller:
            self._smaller -= 1
            if not self._smaller and self._planner.budget < self._whole_budget:
                self._planner.budget = min(2 * self._planner.budget, self._whole_budget)
                self._smaller = SMALLER_STEPS
