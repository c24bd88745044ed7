"""Owns which sequence computes which tokens in a step, with which slot and blocks. Knows ids only, no arrays.

One rule: a sequence has len(tokens) + len(draft) - num_computed tokens pending, and each step computes as
many of them as the token budget allows, running sequences first. Chunked prefill (Agrawal et al. 2023,
Sarathi), prefix hits, decoding, verification of drafts and resuming after preemption are this rule; there
are no phases.

Why nothing starves or livelocks. Sequences have a fixed total order (`key`: priority if that is the policy,
then order of arrival). (1) There are never more running sequences than tokens in the budget, and each is
left at least one, so a long prompt delays no decode. (2) A sequence that finds no block takes it from
sequences behind it in the order, never from one ahead. Hence the first running sequence gets all it needs:
at worst all others are preempted, and a sequence never needs more than the whole pool (`add` and
`max_total` see to it). So each step the first one advances, in finitely many steps it ends, and the next
becomes first. (3) Waiting sequences are admitted in order and only when the blocks of all their known
tokens are at hand, so the head of the queue is not overtaken, and a victim does not come back to be
preempted at once.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field
from itertools import pairwise

from quire.config import SchedulerConfig
from quire.errors import EngineError
from quire.params import OutputKind
from quire.sched.live import Group, LiveSequence, refusal
from quire.sched.table import BlockTables
from quire.types import (
    Delta,
    EngineStats,
    FinishReason,
    NewSeq,
    Request,
    ScheduledBatch,
    ScheduledSeq,
    SequenceStatus,
    StepOutput,
    Usage,
)

WAITING, RUNNING, FINISHED = SequenceStatus.WAITING, SequenceStatus.RUNNING, SequenceStatus.FINISHED


def _key(seq: LiveSequence) -> tuple[int, int]:
    return seq.key


@dataclass(slots=True)
class _Plan:
    """A step in the making. `short`: blocks ran dry, so nobody new is let in."""

    budget: int
    seqs: list[ScheduledSeq] = field(default_factory=list)
    flight: list[LiveSequence] = field(default_factory=list)
    new: list[NewSeq] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    short: bool = False

    def place(self, seq: LiveSequence, count: int, new_blocks: list[int]) -> None:
        """Let `seq` compute its next `count` tokens; a draft goes along as far as it fits."""
        start, tokens, draft = seq.num_computed, seq.tokens, seq.draft
        known = len(tokens) - start
        if count >= known:
            if draft and count < known + len(draft):
                draft = draft[: count - known]
            item = ScheduledSeq(seq.slot, start, tokens[start:], draft, new_blocks, True)
        else:
            item = ScheduledSeq(seq.slot, start, tokens[start : start + count], [], new_blocks, False)
        self.budget -= count
        self.seqs.append(item)
        self.flight.append(seq)


class Scheduler:
    """Continuous batching over one block pool. One step is `schedule()`, then `update()` with what came out.

    `add` and `abort` may be called at any time, also between the two. A sequence is limited to
    `max_model_len` tokens and to what the whole pool holds. With `whole_prompts` no prompt is computed in parts: the
    budget must be at least `max_model_len`.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        num_blocks: int,
        block_size: int,
        max_model_len: int,
        enable_prefix_caching: bool,
        whole_prompts: bool = False,
    ) -> None:
        self._budget = config.max_num_batched_tokens
        self._max_running = min(config.max_num_seqs, config.max_num_batched_tokens)
        self._by_priority = config.scheduling_policy == "priority"
        self._whole_prompts = whole_prompts
        self._max_model_len = max_model_len
        self._max_total = min(max_model_len, num_blocks * block_size)
        self._tables = BlockTables(num_blocks, block_size, enable_prefix_caching)
        self._groups: dict[str, Group] = {}
        self._waiting: list[LiveSequence] = []  # sorted by key
        self._running: list[LiveSequence] = []  # sorted by key
        self._flight: list[LiveSequence] | None = None
        self._aborted: list[LiveSequence] = []  # while in flight: keep slot and blocks until update
        self._slots = list(range(self._max_running - 1, -1, -1))
        self._freed: list[int] = []
        self._arrivals = 0
        self._num_held = 0
        self._waiting_tokens = 0
        self._stats = EngineStats(num_blocks=num_blocks)

    @property
    def has_work(self) -> bool:
        """Whether `schedule` has something to compute, or a batch is in flight."""
        return bool(self._running or self._waiting or self._flight is not None)

    # --- requests come and go -------------------------------------------------------------------------

    def add(self, request: Request) -> list[Delta]:
        """Queue all samples of `request`. If it can never run, each ends at once with an error."""
        num_prompt = len(request.tokens)
        error = refusal(request, self._max_model_len, self._max_total)
        if request.id in self._groups:
            error = f"request id {request.id!r} is in use by a request that has not ended; choose another id"
        if error is not None:
            usage = Usage(num_prompt, 0, 0)
            reason = FinishReason.ERROR
            samples = range(request.sampling.n)
            return [Delta(request.id, i, [], usage, finish_reason=reason, error=error) for i in samples]
        group = Group(request)
        self._groups[request.id] = group
        sampling = request.sampling
        end_ids = frozenset(request.eos_token_ids).union(sampling.stop_token_ids or ())
        # What has a stop string, or log-probabilities beside its tokens, is told of as it comes.
        whole = sampling.output_kind is OutputKind.FINAL_ONLY
        quiet = whole and not sampling.stop and sampling.logprobs is None
        for index in range(sampling.n):
            seq = LiveSequence(
                request,
                index,
                request.tokens,
                arrival_order=self._arrivals,
                group=group,
                key=(request.priority if self._by_priority else 0, self._arrivals),
                cursor=self._tables.prefix.root,
                num_prompt_tokens=num_prompt,
                max_total=min(num_prompt + request.max_tokens, self._max_total),
                min_total=num_prompt + sampling.min_tokens,
                end_ids=end_ids,
                num_told=num_prompt,
                quiet=quiet,
                num_prompt_logprobs=request.scored_from,
            )
            self._arrivals += 1
            group.live.append(seq)
            self._enqueue(seq)
        return []

    def abort(self, request_id: str, index: int | None = None) -> list[Delta]:
        """End sample `index` of a request, or all its samples. Unknown or ended ones are no error: []."""
        group = self._groups.get(request_id)
        if group is None:
            return []
        deltas = []
        for seq in [s for s in group.live if index is None or s.index == index]:
            if seq.status is RUNNING:
                self._running.remove(seq)
                if self._flight is None:
                    self._release(seq)
                else:
                    self._aborted.append(seq)
            elif seq in group.held:
                group.held.remove(seq)
                self._num_held -= 1
                self._waiting_tokens -= len(seq.tokens)
            else:
                del self._waiting[bisect_left(self._waiting, seq.key, key=_key)]
                self._waiting_tokens -= len(seq.tokens)
            self._leave(seq)
            deltas.append(seq.delta(FinishReason.ABORT))
        return deltas

    def _leave(self, seq: LiveSequence) -> None:
        """`seq` has ended; samples that waited for it look again."""
        seq.status = FINISHED
        group = seq.group
        group.live.remove(seq)
        if group.held:
            self._requeue_held(group)
        if not group.live:
            del self._groups[group.request.id]

    def _enqueue(self, seq: LiveSequence) -> None:
        seq.status = WAITING
        insort(self._waiting, seq, key=_key)
        self._waiting_tokens += len(seq.tokens)

    def _requeue_held(self, group: Group) -> None:
        for seq in group.held:
            insort(self._waiting, seq, key=_key)
        self._num_held -= len(group.held)
        group.held = []

    # --- planning a step ------------------------------------------------------------------------------

    def schedule(self) -> ScheduledBatch | None:
        """Plan the next step; None if nothing is to be computed. Takes and frees slots and blocks.

        Freed slots that no batch has announced yet go with the next one.
        """
        if self._flight is not None:
            raise EngineError("schedule() was called before update() of the step in flight")
        if not self._running and not self._waiting:
            return None
        plan = _Plan(self._budget)
        if self._by_priority and self._waiting:
            self._make_way()
        self._continue_running(plan)
        if self._waiting and not plan.short:
            self._admit(plan)
        self._tables.unpin(plan.copies)
        if not plan.seqs:
            return None
        self._stats.num_steps += 1
        self._flight = plan.flight
        freed, self._freed = self._freed, []
        return ScheduledBatch(self._stats.num_steps, plan.new, plan.seqs, freed, plan.copies)

    def _continue_running(self, plan: _Plan) -> None:
        running, size = self._running, self._tables.block_size
        place, flight = plan.seqs.append, plan.flight.append
        i = 0
        while i < len(running):  # _grow may preempt sequences from i on
            seq = running[i]
            i += 1
            start, tokens, draft, have = seq.num_computed, seq.tokens, seq.draft, len(seq.blocks)
            count = pending = len(tokens) - start + len(draft)
            room = plan.budget - len(running) + i  # one token stays for each sequence behind
            if count > room:
                count = room
            if start + count > have * size:
                count = self._grow(seq, count, i, plan)
            if count == pending:  # as plan.place does; this is the path of every decode
                plan.budget -= count
                new_blocks = seq.blocks[have:] if len(seq.blocks) > have else []
                place(ScheduledSeq(seq.slot, start, tokens[start:], draft, new_blocks, True))
                flight(seq)
            elif count:
                plan.place(seq, count, seq.blocks[have:])

    def _grow(self, seq: LiveSequence, count: int, behind: int, plan: _Plan) -> int:
        """Make room for `count` more tokens, at the cost of running[behind:]; returns how many fit."""
        tables, pool = self._tables, self._tables.pool
        start, have = seq.num_computed, len(seq.blocks)
        need = tables.count(start + count) - have
        if need > pool.num_available and seq.draft:  # no one is preempted for a guess
            count = min(count, len(seq.tokens) - start)
            need = tables.count(start + count) - have
        while need > pool.num_available and len(self._running) > behind:
            plan.short = True
            self._preempt(self._victim(behind))
        if need > pool.num_available:  # the last in order: does what it can, and keeps what it has
            plan.short = True
            count = min(count, (have + pool.num_available) * tables.block_size - start)
            need = tables.count(start + count) - have
        seq.blocks += tables.allocate(need)
        return count

    def _victim(self, behind: int) -> LiveSequence:
        """Of running[behind:] the one that loses least; later priorities first, later arrivals among equals.

        What it shares with others stays; what it holds alone is about to be overwritten, cached or not.
        """
        best, best_rank = self._running[-1], None
        for seq in self._running[behind:]:
            loss = self._tables.loss(seq)
            if loss is not None:
                rank = (-seq.key[0], loss, -seq.key[1])
                if best_rank is None or rank < best_rank:
                    best, best_rank = seq, rank
        return best

    def _preempt(self, seq: LiveSequence) -> None:
        self._running.remove(seq)
        self._release(seq)
        seq.num_preemptions += 1
        self._stats.num_preemptions += 1
        self._enqueue(seq)

    def _make_way(self) -> None:
        """Preempt sequences of later priority, last ones first, if that lets the head of the queue in."""
        head = self._waiting[0]
        lower = [s for s in self._running if s.key[0] > head.key[0]]
        while lower:
            found = self._tables.match(head)
            if found is None:
                return
            if self._tables.fit(head, found[0]) is not None:
                if len(self._running) < self._max_running:
                    return
            else:
                gain = sum(len(s.blocks) for s in lower) + self._tables.pool.num_available
                if gain < self._tables.count(len(head.tokens)) - len(found[0].blocks):
                    return
            self._preempt(lower.pop())

    def _admit(self, plan: _Plan) -> None:
        """Let waiting sequences in, in order, while there are slots, tokens, and blocks for all they have.

        Where tokens are left, every running sequence got all it has pending, blocks included: none are owed.
        """
        tables, waiting = self._tables, self._waiting
        while waiting and plan.budget > 0 and len(self._running) < self._max_running:
            if not tables.pool.num_available:
                return
            seq = waiting[0]
            found = tables.match(seq)
            if found is None:
                del waiting[0]
                seq.group.held.append(seq)
                self._num_held += 1
                continue
            match = tables.fit(seq, found[0])
            if match is None or (self._whole_prompts and plan.budget < len(seq.tokens)):
                return
            del waiting[0]
            self._waiting_tokens -= len(seq.tokens)
            count = min(len(seq.tokens) - match.num_tokens, plan.budget)
            plan.copies += tables.open(seq, match, found[1], match.num_tokens + count)
            self._start(seq, plan)
            plan.place(seq, count, list(seq.blocks))

    def _start(self, seq: LiveSequence, plan: _Plan) -> None:
        seq.slot = self._slots.pop()
        seq.status = RUNNING
        insort(self._running, seq, key=_key)
        if seq.tokens is seq.request.tokens:
            seq.tokens = list(seq.tokens)
        if seq.num_preemptions == 0:
            seq.num_cached = seq.num_computed
            if self._tables.caching and seq.match_limit == len(seq.tokens) - 1:
                self._stats.prefix_queries += seq.num_prompt_tokens
                self._stats.prefix_hits += seq.num_computed
        plan.new.append(NewSeq(seq.slot, seq.request, seq.index, list(seq.tokens)))

    def _release(self, seq: LiveSequence, failed: bool = False) -> None:
        self._tables.close(seq, failed)
        self._slots.append(seq.slot)
        self._freed.append(seq.slot)
        seq.slot = -1

    # --- taking in a step's result --------------------------------------------------------------------

    def update(self, batch: ScheduledBatch, output: StepOutput) -> list[Delta]:
        """Take in the result of `batch`, the last one scheduled: news of each sequence that has some.

        Raises EngineError where `output` is not of this batch or lacks a token that was asked for.
        """
        flight = self._flight
        if flight is None or not batch.step == output.step == self._stats.num_steps:
            raise EngineError(
                f"update of step {batch.step} with output of step {output.step}: not the one in flight"
            )
        self._flight = None
        deltas = []
        ended = False
        errors, aborted = output.errors, self._aborted
        for item, seq in zip(batch.seqs, flight, strict=True):
            if aborted and seq.status is not RUNNING:
                continue
            if errors and item.slot in errors:
                delta: Delta | None = seq.delta(FinishReason.ERROR, errors[item.slot])
            elif item.wants_logits:
                delta = self._sampled(seq, item, output)
            else:
                delta = None
                seq.num_computed = item.start + len(item.tokens)
            if seq.num_computed >= seq.index_at:
                self._tables.index(seq)
            if item.start < seq.num_prompt_tokens:
                delta = self._in_prompt(seq, item, output, delta)
            if delta is not None:
                deltas.append(delta)
                if delta.finish_reason is not None:
                    ended = True
                    self._release(seq, failed=delta.finish_reason is FinishReason.ERROR)
                    self._leave(seq)
        if ended:
            self._running = [seq for seq in self._running if seq.status is RUNNING]
        for seq in aborted:
            self._release(seq)
        aborted.clear()
        return deltas

    def _sampled(self, seq: LiveSequence, item: ScheduledSeq, output: StepOutput) -> Delta | None:
        """Append what was sampled, as far as it is kept, and move past it and the accepted draft."""
        slot = item.slot
        if seq.request.pooling is not None:
            return self._pooled(seq, item, output)
        if output.deferred and slot in output.deferred:
            seq.num_computed, seq.draft = item.start + len(item.tokens) - 1, []
            return None
        out = output.tokens.get(slot, [])
        forced = output.forced.get(slot, 0) if output.forced else 0
        drawn = len(out) - forced
        if not 0 < drawn <= len(item.draft) + 1:
            raise EngineError(f"step {output.step}: {out!r} are not the sampled tokens of slot {slot}")
        logprobs = output.logprobs.get(slot) if output.logprobs else None
        tokens = seq.tokens
        seq.num_computed = item.start + len(item.tokens) + drawn - 1
        tokens += out
        reason = stop_reason = None
        complete = slot in output.ended
        if len(tokens) >= seq.max_total or not seq.end_ids.isdisjoint(out):
            kept, reason, stop_reason = seq.cut(len(out))
            if kept < len(out):
                out, logprobs, complete = out[:kept], logprobs and logprobs[:kept], False
                seq.num_computed = min(seq.num_computed, len(tokens))
        if complete and (complete := reason is not FinishReason.STOP):
            reason = FinishReason.STOP
        if output.drafts and slot in output.drafts:
            seq.draft = output.drafts[slot][: max(0, seq.max_total - len(tokens) - 1)]
        elif seq.draft:
            seq.draft = []
        self._stats.generation_tokens += len(out)
        self._stats.jump_forward_tokens += max(0, len(out) - drawn)
        if seq.quiet:
            if reason is None and seq.num_told > seq.num_prompt_tokens:
                return None
            out = tokens[seq.num_told :]
        seq.num_told = len(tokens)
        usage = Usage(seq.num_prompt_tokens, seq.num_cached, len(tokens) - seq.num_prompt_tokens)
        delta = Delta(seq.request.id, seq.index, out, usage, logprobs, None, reason, stop_reason)
        delta.complete = complete
        return delta

    def _pooled(self, seq: LiveSequence, item: ScheduledSeq, output: StepOutput) -> Delta:
        if item.slot not in output.embeddings:
            raise EngineError(f"step {output.step}: the embedding of slot {item.slot} is missing")
        seq.num_computed = len(seq.tokens)
        delta = seq.delta(FinishReason.STOP)
        delta.embedding = output.embeddings[item.slot]
        return delta

    def _in_prompt(
        self, seq: LiveSequence, item: ScheduledSeq, output: StepOutput, delta: Delta | None
    ) -> Delta | None:
        """After a chunk that began in the prompt: add prompt logprobs to `delta`, tell waiting siblings."""
        entries = output.prompt_logprobs.get(item.slot)
        if entries is not None and seq.index == 0:
            fresh = seq.take_prompt_logprobs(item.start, entries)
            if fresh:
                delta = delta or seq.delta()
                delta.prompt_logprobs = fresh
        if seq.num_computed >= seq.num_prompt_tokens:
            self._prompt_computed(seq.group)
        return delta

    def _prompt_computed(self, group: Group) -> None:
        if not group.prompt_counted:
            group.prompt_counted = True
            self._stats.prompt_tokens += len(group.request.tokens)
        if group.held:
            self._requeue_held(group)

    # --- looking at it --------------------------------------------------------------------------------

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes; running sequences keep their blocks."""
        self._tables.prefix.clear()

    def stats(self) -> EngineStats:
        """A snapshot. Prefix queries and hits are in prompt tokens, of first admissions only."""
        stats, pool = self._stats, self._tables.pool
        stats.num_running = len(self._running)
        stats.num_waiting = len(self._waiting) + self._num_held
        stats.num_waiting_tokens = self._waiting_tokens
        stats.num_used_blocks = pool.num_used
        stats.num_shared_blocks = pool.num_shared
        stats.num_cached_blocks = pool.num_cached
        stats.num_free_blocks = pool.num_free
        return EngineStats(**stats.as_dict())

    def check(self) -> None:
        """Assert the invariants of scheduler, tables, pool and index. O(state); when idle and in tests."""
        holders = self._running + self._aborted
        self._tables.check(holders)
        slots = [seq.slot for seq in holders]
        assert sorted(slots + self._slots) == list(range(self._max_running)), "slots are lost or used twice"
        assert len(set(self._freed)) == len(self._freed), "a slot is announced as free twice"
        for queue, status in ((self._running, RUNNING), (self._waiting, WAITING)):
            assert all(a.key < b.key for a, b in pairwise(queue)), "a queue is out of order"
            assert all(seq.status is status and seq in seq.group.live for seq in queue)
        held = [seq for group in self._groups.values() for seq in group.held]
        assert self._num_held == len(held)
        assert all(set(seq.group.live) - set(seq.group.held) for seq in held), "samples wait for nobody"
        idle = self._waiting + held
        assert self._waiting_tokens == sum(len(seq.tokens) for seq in idle)
        assert all(seq.slot < 0 and not seq.blocks for seq in idle)
        assert {s for g in self._groups.values() for s in g.live} == {*self._running, *idle}
