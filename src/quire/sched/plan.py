"""Plans a step: which sequences compute which tokens, with which slots and blocks. Knows ids only, no arrays.

One rule: a sequence has len(tokens) + num_unseen + len(draft) - num_computed pending tokens, and each step
computes as many of them as the token budget allows, running sequences first. Chunked prefill (Agrawal et al.
2023, Sarathi), prefix hits, decoding, verification of drafts and resuming after preemption all follow this rule; there
are no phases.

Steps overlap: a step may be planned while earlier ones are computed. It names a token that is not known yet by
`UNSEEN`, and the executor fills it in. A sequence waits for its own result, while others go on, if its next
step depends on more than that token: a grammar may force tokens or ask for the last one again, and a draft may be
accepted in part.

Nothing starves or livelocks, for three reasons. Sequences have a fixed total order (`key`: priority if that is
the policy, then order of arrival). (1) There are never more running sequences than tokens in the budget, and each
gets at least one, so a long prompt delays no decode. (2) A sequence that finds no block takes it from
sequences behind it in the order, never from one ahead. Hence the first running sequence gets all it needs:
at worst all others are preempted, and a sequence never needs more than the whole pool (`refusal` and
`max_total` ensure it). So it advances with each step, or waits for a result that is under way; in finitely many
steps it ends, and the next becomes first. (3) Waiting sequences are admitted in order, those first whose turn it is
(`turns`), and only when there are blocks for all their known tokens. So nothing overtakes the head of the queue but
the first sample of a request, and a victim does not come back only to be preempted at once.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from dataclasses import dataclass, field
from itertools import pairwise

from quire.config import SchedulerConfig
from quire.sched.queue import WaitingQueue, key_of
from quire.sched.sequence import RUNNING, Sequence
from quire.sched.tables import BlockTables
from quire.sched.turns import Turns
from quire.types import UNSEEN, EngineStats, NewSeq, ScheduledSeq


@dataclass(slots=True)
class Plan:
    """A step in the making: `seqs[i]` is the batch entry of `flight[i]`. `short`: blocks ran out, so admit nothing."""

    step: int
    budget: int
    seqs: list[ScheduledSeq] = field(default_factory=list)
    flight: list[Sequence] = field(default_factory=list)
    new: list[NewSeq] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    short: bool = False

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


class Planner:
    """The running sequences with their slots, and the choice of each step's tokens.

    With `whole_prompts` every prompt is computed in one step: the budget must be at least the longest prompt.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        tables: BlockTables,
        queue: WaitingQueue,
        stats: EngineStats,
        whole_prompts: bool,
    ) -> None:
        self._budget = config.max_num_batched_tokens
        self._max_running = min(config.max_num_seqs, config.max_num_batched_tokens)
        self._by_priority = config.scheduling_policy == "priority"
        self._whole_prompts = whole_prompts
        self._tables = tables
        self._queue = queue
        self._turns = Turns(queue)
        self._stats = stats
        self._slots = list(range(self._max_running - 1, -1, -1))
        self._freed: list[int] = []  # free slots that no batch has announced yet
        self.running: list[Sequence] = []  # sorted by key
        self.in_flight: deque[Plan] = deque()

    def plan(self) -> Plan | None:
        """Plan the next step; None if there is nothing to compute now. Takes slots and blocks."""
        if not self.running and not self._queue.seqs:
            return None
        plan = Plan(self._stats.num_steps + 1, self._budget)
        if self._by_priority and self._queue.seqs:
            self._make_way()
        if self._queue.seqs and self._turns.pressing:
            self._take_turns()
        self._continue_running(plan)
        if self._queue.seqs and not plan.short:
            self._admit(plan)
        self._tables.unpin(plan.copies)
        if not plan.seqs:
            return None
        self._stats.num_steps += 1
        self._commit(plan)
        return plan

    def take_freed(self) -> list[int]:
        freed, self._freed = self._freed, []
        return freed

    def release(self, seq: Sequence, failed_from: int | None = None) -> None:
        """Take slot and blocks from a sequence that stops running; steps in flight may still compute it."""
        self._tables.close(seq, failed_from)
        self._turns.stopped(seq)
        self._slots.append(seq.slot)
        self._freed.append(seq.slot)
        seq.slot = -1

    def _continue_running(self, plan: Plan) -> None:
        running, size = self.running, self._tables.block_size
        place, flight = plan.seqs.append, plan.flight.append
        i = 0
        while i < len(running):  # _grow may preempt sequences from i on
            seq = running[i]
            i += 1
            start, tokens, draft, have = seq.num_computed, seq.tokens, seq.draft, len(seq.blocks)
            unseen = seq.num_unseen
            if unseen and _must_wait(seq):
                continue
            count = pending = len(tokens) + unseen - start + len(draft)
            room = plan.budget - len(running) + i  # keep one token for each sequence behind
            if count > room:
                count = room
            if start + count > have * size:
                count = self._grow(seq, count, i, plan)
            if count == pending and count:  # as plan.place does; this is the path of every decode
                plan.budget -= count
                new_blocks = seq.blocks[have:] if len(seq.blocks) > have else []
                chunk = tokens[start:]
                if unseen:
                    chunk.append(UNSEEN)
                place(ScheduledSeq(seq.slot, start, chunk, draft, new_blocks, True))
                flight(seq)
            elif count:
                plan.place(seq, count, seq.blocks[have:])

    def _grow(self, seq: Sequence, count: int, behind: int, plan: Plan) -> int:
        """Make room for `count` more tokens at the expense of running[behind:]; returns how many fit."""
        tables, pool = self._tables, self._tables.pool
        start, have = seq.num_computed, len(seq.blocks)
        need = tables.count(start + count) - have
        if need > pool.num_available and seq.draft:  # a guess never preempts a sequence
            count = min(count, len(seq.tokens) - start)
            need = tables.count(start + count) - have
        while need > pool.num_available:
            plan.short = True
            if self._queue.drop_bases():
                continue
            if len(self.running) == behind:  # the last in order: keep what it has, compute what fits
                count = min(count, (have + pool.num_available) * tables.block_size - start)
                need = tables.count(start + count) - have
                break
            self._preempt(self._victim(behind))
        seq.blocks += tables.allocate(need)
        return count

    def _victim(self, behind: int) -> Sequence:
        """The sequence of running[behind:] that loses least; lower priorities first, later arrivals among equals.

        Blocks shared with others stay; those it holds alone will be overwritten, cached or not.
        """
        best, best_rank = self.running[-1], None
        for seq in self.running[behind:]:
            loss = self._tables.loss(seq)
            if loss is not None:
                rank = (-seq.key[0], loss, -seq.key[1])
                if best_rank is None or rank < best_rank:
                    best, best_rank = seq, rank
        return best

    def _preempt(self, seq: Sequence) -> None:
        self.running.remove(seq)
        self.release(seq)
        seq.num_preemptions += 1
        self._stats.num_preemptions += 1
        self._queue.push(seq)

    def preempt_all(self) -> None:
        """Send all running sequences back to the queue, and give up the blocks of those that wait."""
        for seq in list(self.running):
            self._preempt(seq)
        while self._queue.drop_bases():
            pass

    def _make_way(self) -> None:
        """Preempt sequences of lower priority, last ones first, if that makes room for the head of the queue."""
        head = self._queue.seqs[0]
        lower = [s for s in self.running if s.key[0] > head.key[0]]
        while lower and not self._is_in_flight(head):
            found = self._tables.match(head)
            if found is None:
                return
            if self._tables.fit(head, found[0]) is not None:
                if len(self.running) < self._max_running:
                    return
            else:
                gain = sum(len(s.blocks) for s in lower) + self._tables.pool.num_available
                if gain < self._tables.count(len(head.tokens)) - len(found[0].blocks):
                    return
            self._preempt(lower.pop())

    def _take_turns(self) -> None:
        """Displace further samples of others if that makes room for a request that has none running."""
        tables, seq = self._tables, self._turns.next()
        while not self._is_in_flight(seq):
            other = self._turns.displaced(seq, self.running)
            found = tables.match(seq) if other is not None else None
            if other is None or found is None:
                return
            if tables.fit(seq, found[0]) is not None:
                if len(self.running) < self._max_running:
                    return
            elif self._turns.gain(self.running) + tables.pool.num_available < tables.count(len(seq.tokens)):
                return
            self._preempt(other)

    def _is_in_flight(self, seq: Sequence) -> bool:
        """Whether a preempted sequence still awaits results; until they come, its tokens are not all known."""
        return seq.num_preemptions > 0 and any(seq in plan.flight for plan in self.in_flight)

    def _admit(self, plan: Plan) -> None:
        """Admit waiting sequences, by turns and in order, while there are slots, tokens, and blocks for all they have.

        Call it when every running sequence that may go on has all its pending tokens and their blocks.
        """
        tables, queue = self._tables, self._queue
        while queue.seqs and plan.budget > 0 and len(self.running) < self._max_running:
            seq = self._turns.next()
            if self._is_in_flight(seq):
                return
            if not tables.pool.num_available and not queue.drop_bases(spare=seq):
                return
            found = tables.match(seq)
            if found is None:
                queue.hold(seq)
                continue
            match = tables.fit(seq, found[0])
            if match is None:
                if queue.drop_bases(spare=seq):
                    continue
                return
            if self._whole_prompts and plan.budget < len(seq.tokens):
                return
            queue.take(seq)
            count = min(len(seq.tokens) - match.num_tokens, plan.budget)
            plan.copies += tables.open(seq, match, found[1], match.num_tokens + count)
            queue.drop_base(seq)
            self._start(seq, plan)
            plan.place(seq, count, list(seq.blocks))

    def _start(self, seq: Sequence, plan: Plan) -> None:
        seq.slot = self._slots.pop()
        seq.status = RUNNING
        self._turns.started(seq)
        insort(self.running, seq, key=key_of)
        if seq.tokens is seq.request.tokens:
            seq.tokens = list(seq.tokens)
        if seq.num_preemptions == 0:
            seq.num_cached = seq.num_computed
            if self._tables.caching and seq.match_limit == len(seq.tokens) - 1:
                self._stats.prefix_queries += seq.num_prompt_tokens
                self._stats.prefix_hits += min(seq.num_computed, seq.num_prompt_tokens)
        plan.new.append(NewSeq(seq.slot, seq.request, seq.index, list(seq.tokens)))

    def _commit(self, plan: Plan) -> None:
        """Count the planned tokens as computed: later steps may read their KV.

        Blocks enter the index as soon as their tokens are known, so that a prompt is shared while it is computed.
        """
        self.in_flight.append(plan)
        for item, seq in zip(plan.seqs, plan.flight, strict=True):
            seq.num_computed = item.start + len(item.tokens) + len(item.draft)
            if item.wants_logits and seq.request.pooling is None:
                seq.num_unseen += 1
            if seq.num_computed >= seq.index_at:
                self._tables.index(seq)
            if seq.group.held and seq.num_settled >= seq.num_prompt_tokens:
                self._queue.requeue_held(seq.group)

    def check(self, idle: list[Sequence]) -> None:
        """Assert the invariants of slots and running sequences; `idle` are those that wait."""
        self._tables.check(self.running, self._queue.bases)
        self._turns.check(self.running)
        slots = [seq.slot for seq in self.running]
        assert sorted(slots + self._slots) == list(range(self._max_running)), "slots are lost or used twice"
        assert len(set(self._freed)) == len(self._freed), "a slot is announced as free twice"
        assert all(a.key < b.key for a, b in pairwise(self.running)), "running sequences are out of order"
        assert all(seq.status is RUNNING for seq in self.running)
        live = {seq for group in self._queue.groups.values() for seq in group.live}
        assert live == {*self.running, *idle}
        for seq in live:
            sampled = [
                item
                for plan in self.in_flight
                for item, other in zip(plan.seqs, plan.flight, strict=True)
                if other is seq and item.wants_logits and seq.request.pooling is None
            ]
            assert seq.num_unseen == len(sampled), "unseen tokens are not those in flight"


def _must_wait(seq: Sequence) -> bool:
    """Whether a sequence with a token in flight must wait for it: see the module's docstring."""
    return seq.constrained or seq.drafting or len(seq.tokens) + seq.num_unseen >= seq.max_total
