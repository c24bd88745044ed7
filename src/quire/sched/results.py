"""Takes in the result of a step: appends sampled tokens, detects ends, makes deltas. Ids only."""

from __future__ import annotations

import sys

from quire.errors import EngineError
from quire.sched.plan import Planner
from quire.sched.queue import WaitingQueue
from quire.sched.sequence import FINISHED, RUNNING, WAITING, Sequence
from quire.sched.step_plan import StepPlan
from quire.sched.tables import BlockTables
from quire.types import Delta, EngineStats, FinishReason, ScheduledSeq, StepOutput


class Results:
    """Results arrive in the order of the steps, after later steps have been planned.

    So a sequence may have ended by the time a result for it arrives: that result is dropped. A preempted sequence
    takes in its tokens while it waits.
    """

    def __init__(
        self, planner: Planner, tables: BlockTables, queue: WaitingQueue, stats: EngineStats
    ) -> None:
        self._planner = planner
        self._tables = tables
        self._queue = queue
        self._stats = stats
        states = tables.states
        self._most_draft = sys.maxsize if states is None else states.rows.num_open - 1

    def take(self, plan: StepPlan, output: StepOutput) -> list[Delta]:
        """Return the deltas of a step. EngineError if `output` lacks a token that was asked for."""
        deltas = []
        ended = False
        errors, tables = output.errors, self._tables
        for item, seq in zip(plan.seqs, plan.flight, strict=True):
            if seq.status is FINISHED:
                continue
            if errors and item.slot in errors:
                delta: Delta | None = seq.delta(FinishReason.ERROR, errors[item.slot])
                assert delta is not None
                delta.refused = item.slot in output.refused
            elif item.wants_logits:
                delta = self._sampled(seq, item, output)
                if seq.num_computed >= seq.index_at and seq.status is RUNNING:
                    tables.index(seq)
            else:
                delta = None
            if item.start < seq.num_prompt_tokens:
                delta = self._in_prompt(seq, item, output, delta)
            if delta is not None:
                deltas.append(delta)
                if delta.finish_reason is not None:
                    ended = ended or seq.status is RUNNING
                    self.end(seq, item.start if delta.finish_reason is FinishReason.ERROR else None)
        if ended:
            planner = self._planner
            planner.running = [seq for seq in planner.running if seq.status is RUNNING]
        return deltas

    def end(self, seq: Sequence, failed_from: int | None = None) -> None:
        """End a sequence, whose KV from position `failed_from` on is not to be trusted."""
        if seq.status is RUNNING:
            self._planner.release(seq, failed_from)
        else:
            self._queue.remove(seq)
        seq.status = FINISHED
        self._queue.leave(seq)

    def _sampled(self, seq: Sequence, item: ScheduledSeq, output: StepOutput) -> Delta | None:
        """Append the sampled tokens that stay, and undo what was counted as computed too early."""
        slot = item.slot
        if seq.request.pooling is not None:
            return self._pooled(seq, item, output)
        running = seq.status is RUNNING
        seq.num_unseen -= 1
        if output.deferred and slot in output.deferred:
            if running:
                seq.num_computed, seq.draft = item.start + len(item.tokens) - 1, []
            return None
        out = output.tokens.get(slot, [])
        forced = output.forced.get(slot, 0) if output.forced else 0
        drawn = len(out) - forced
        if not 0 < drawn <= len(item.draft) + 1:
            raise EngineError(f"step {output.step}: {out!r} are not the sampled tokens of slot {slot}")
        logprobs = output.logprobs.get(slot) if output.logprobs else None
        tokens = seq.tokens
        if item.draft:
            self._count_draft(seq, len(item.draft), drawn - 1)
            if running:
                seq.num_computed = item.start + len(item.tokens) + drawn - 1
        tokens += out
        reason = stop_reason = None
        complete = slot in output.ended
        if len(tokens) >= seq.max_total or seq.repetition is not None or not seq.end_ids.isdisjoint(out):
            kept, reason, stop_reason = seq.cut(len(out))
            if kept < len(out):
                out, logprobs, complete = out[:kept], logprobs and logprobs[:kept], False
        if complete and (complete := reason in (None, FinishReason.LENGTH)):
            reason = FinishReason.STOP
        if reason is not None and running:
            seq.num_computed = min(item.start + len(item.tokens) + drawn - 1, len(tokens))
            if seq.state is not None and seq.num_computed < seq.state.committed <= len(tokens):
                seq.num_computed = seq.state.committed  # a step in flight takes the last token in
        if not running:
            self._queue.num_tokens += len(out)
        elif seq.drafting or output.drafts:
            self._take_draft(seq, output.drafts.get(slot))
        self._stats.generation_tokens += len(out)
        self._stats.jump_forward_tokens += max(0, len(out) - drawn)
        if seq.report_every > 1:
            seq.held += logprobs or ()
            fresh = len(tokens) - seq.num_reported
            if reason is None and fresh < seq.report_every and seq.num_reported > seq.num_prompt_tokens:
                return None
            out = tokens[seq.num_reported :]
            logprobs, seq.held = seq.held or None, []
        seq.num_reported = len(tokens)
        delta = Delta(seq.request.id, seq.index, out, seq.usage(), logprobs, None, reason, stop_reason)
        delta.complete = complete
        return delta

    def _count_draft(self, seq: Sequence, drafted: int, accepted: int) -> None:
        """Count a draft of `drafted` tokens, of which the first `accepted` are right."""
        stats = self._stats
        seq.num_accepted += accepted
        seq.num_rejected += drafted - accepted
        stats.spec_drafts += 1
        stats.spec_draft_tokens += drafted
        stats.spec_accepted_tokens += accepted
        by_position = stats.spec_accepted_per_pos
        by_position.extend([0] * (drafted - len(by_position)))
        for position in range(accepted):
            by_position[position] += 1

    def _take_draft(self, seq: Sequence, draft: list[int] | None) -> None:
        """Take a draft for the next step. If that step is in flight, drop the draft and wait for its result."""
        seq.drafting = draft is not None
        seq.draft = []
        if draft is not None and not seq.num_unseen:
            seq.draft = draft[: max(0, min(seq.max_total - len(seq.tokens) - 1, self._most_draft))]

    def _pooled(self, seq: Sequence, item: ScheduledSeq, output: StepOutput) -> Delta:
        if item.slot not in output.embeddings:
            raise EngineError(f"step {output.step}: the embedding of slot {item.slot} is missing")
        delta = seq.delta(FinishReason.STOP)
        delta.embedding = output.embeddings[item.slot]
        return delta

    def _in_prompt(
        self, seq: Sequence, item: ScheduledSeq, output: StepOutput, delta: Delta | None
    ) -> Delta | None:
        """After a chunk that began in the prompt: add prompt log-probabilities and progress, count the prompt."""
        begins = delta is None and len(seq.tokens) == seq.num_prompt_tokens and not seq.index
        if begins and seq.request.sampling.return_progress:
            delta = seq.delta()
            delta.usage.num_computed = item.start + len(item.tokens)
        entries = output.prompt_logprobs.get(item.slot)
        if entries is not None and seq.index == 0:
            fresh = seq.take_prompt_logprobs(item.start, entries)
            if fresh:
                delta = delta or seq.delta()
                delta.prompt_logprobs = fresh
        group = seq.group
        if item.start + len(item.tokens) >= seq.num_prompt_tokens and item.slot not in output.deferred:
            if not group.prompt_counted:
                group.prompt_counted = True
                self._stats.prompt_tokens += seq.num_prompt_tokens
            if group.held and seq.status is WAITING:
                self._queue.requeue_held(group)
        if group.held and seq.status is RUNNING and seq.num_settled >= seq.num_prompt_tokens:
            self._queue.requeue_held(group)
        return delta
