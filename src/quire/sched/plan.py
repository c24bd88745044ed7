"""Plans a step: which sequences compute which tokens, with which slots and blocks. Knows ids only, no arrays.

One rule: a sequence has len(tokens) + num_unseen + len(draft) - num_computed pending tokens, and each step
computes as many of them as the budget allows: decoding sequences first, then prompts, in the order and the chunks of
`pace`. Chunked prefill (Agrawal et al. 2023, Sarathi), prefix hits, decoding, verification of drafts and resuming after
preemption all follow this rule; there are no phases.

Steps overlap: a step may be planned while earlier ones are computed. It names a token that is not known yet by
`UNSEEN`, and the executor fills it in. A sequence waits for its own result, while others go on, if its next
step depends on more than that token: a grammar may force tokens or ask for the last one again, and a draft may be
accepted in part.

With pipeline stages, as many batches are in flight, and each stage computes another one. A decoding sequence is in one
of them at a time, because the first stage needs its token; so each step takes a share of the decoding sequences.

Nothing starves or livelocks, for three reasons. Sequences have a fixed total order (`key`: priority if that is
the policy, then due time, then order of arrival), in which each has finitely many before it. (1) There are never more
running sequences than tokens in the budget, and each decoding one gets at least one, so a long prompt delays no
decode. (2) A sequence that finds no block takes it from sequences behind it in the order that are not part of the
step yet, never from one ahead. Those in the step need a block themselves soon, and then they are not. Hence the first
running sequence gets all it needs: at worst all others are preempted, and a sequence never needs more than the whole
pool (`refusal` and `max_total` ensure it). So it advances, or waits for a result that is under way, or for its turn
among the prompts; in finitely many steps it ends, and the next becomes first. (3) Waiting sequences are admitted in
order, those first whose turn it is (`turns`), and only when there are blocks for all their known tokens beside those
that prompts ahead of them still need. So nothing overtakes the head of the queue but the first sample of a request,
and a victim does not come back only to be preempted at once. Only a prompt that `pace` holds back, because too many
are partly computed, lets others pass.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import deque
from collections.abc import Mapping
from itertools import chain, pairwise
from types import MappingProxyType

from quire.config import SchedulerConfig
from quire.sched.pace import Pace
from quire.sched.prefix import PrefixMatch
from quire.sched.queue import WaitingQueue, key_of
from quire.sched.sequence import RUNNING, Sequence
from quire.sched.step_plan import StepPlan
from quire.sched.tables import BlockTables
from quire.sched.times import StepWork
from quire.sched.turns import Turns
from quire.types import UNSEEN, EngineStats, NewSeq, ScheduledSeq

CLOSED = ""
"""CLOSED stands among a step's adapters once one found no room; it equals no digest."""

MOST_ENTRIES = 1 << 18
"""MOST_ENTRIES of the lists of requests become tables in a step, and as many log-probabilities are made: some ms each.

One request alone may have more.
"""
WIDE = 1024
"""WIDE requests ask for more log-probabilities per token: only a few run at a time."""

MOST_PASSED = 64
"""A step looks beyond at most MOST_PASSED waiting prompts that `pace` holds back."""


class Planner:
    """The running sequences with their slots, and the choice of each step's tokens.

    With `whole_prompts` every prompt is computed in one step: the budget must be at least the longest prompt. At most
    `max_adapters` adapters run at once (None: any number). The model has `stages` pipeline stages.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        tables: BlockTables,
        queue: WaitingQueue,
        stats: EngineStats,
        pace: Pace,
        whole_prompts: bool,
        max_adapters: int | None = None,
        stages: int = 1,
    ) -> None:
        self._stages = stages
        self._max_adapters = max_adapters
        self.budget = config.max_num_batched_tokens  # of a step
        self._max_running = min(config.max_num_seqs, config.max_num_batched_tokens)
        if tables.states is not None:
            self._max_running = min(self._max_running, tables.states.rows.num_running)
        self._by_priority = config.scheduling_policy == "priority"
        self.whole_prompts = whole_prompts
        self._tables = tables
        self._queue = queue
        self._turns = Turns(queue)
        self._stats = stats
        self._pace = pace
        self._slots = list(range(self._max_running - 1, -1, -1))
        self._freed: list[int] = []  # free slots that no batch has announced yet
        self.running: list[Sequence] = []  # sorted by key
        self.in_flight: deque[StepPlan] = deque()

    def plan(self, alone: Sequence | None = None) -> StepPlan | None:
        """Plan the next step; None if there is nothing to compute now. Takes slots and blocks.

        With `alone` nothing else runs, and nothing else joins it.
        """
        if not self.running and not self._queue.seqs:
            return None
        plan = StepPlan(self._stats.num_steps + 1, self.budget)
        if alone is None and self._queue.seqs:
            if self._by_priority:
                self._make_way()
            if self._turns.pressing:
                self._take_turns()
        partial = self._continue_running(plan)
        if alone is not None:
            if alone.status is not RUNNING:
                self._admit(alone, plan, [])
            elif partial:
                self._continue_prompt(alone, plan)
        elif partial or (self._queue.seqs and not plan.short):
            self._serve_prompts(plan, partial)
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

    def _continue_running(self, plan: StepPlan) -> list[Sequence]:
        """Place all decoding sequences; return the partly computed prompts, in order."""
        running, size = self.running, self._tables.block_size
        place, flight = plan.seqs.append, plan.flight.append
        partial: list[Sequence] = []
        spare: int | None = None  # tokens of drafts that the step has time for
        context = i = 0
        staged = self._stages > 1
        share = self._share() if staged else 0
        while i < len(running):  # _grow may preempt sequences from i on
            seq = running[i]
            i += 1
            start, tokens, draft, have = seq.num_computed, seq.tokens, seq.draft, len(seq.blocks)
            unseen = seq.num_unseen
            if unseen and (staged or _must_wait(seq)):
                continue
            count = pending = len(tokens) + unseen - start + len(draft)
            if count > 1:
                if start + 1 < seq.prefill_end:
                    partial.append(seq)
                    continue
                if draft and len(running) > 1:
                    spare = self._time_for_drafts() if spare is None else spare
                    count -= max(0, len(draft) - spare)
                    spare = max(0, spare - len(draft))
            if staged and len(plan.seqs) >= share:
                continue
            room = plan.budget - len(running) + i  # one token stays for each sequence behind
            if count > room:
                count = room
            if start + count > have * size:
                count = self._grow(seq, count, i, plan)
            if count == pending and count:  # as plan.place does; every decode takes this path
                plan.budget -= count
                new_blocks = seq.blocks[have:] if len(seq.blocks) > have else []
                chunk = tokens[start:]
                if unseen:
                    chunk.append(UNSEEN)
                place(ScheduledSeq(seq.slot, start, chunk, draft, new_blocks, True))
                flight(seq)
                context += start
            elif count:
                plan.place(seq, count, seq.blocks[have:])
                context += start
        plan.awaited = len(partial) < len(running)
        count = self.budget - plan.budget
        plan.work = StepWork(count, count, 0.0, context)
        return partial

    def _share(self) -> int:
        """Count the decoding sequences that each batch in flight takes."""
        count = sum(seq.num_computed + 1 >= seq.prefill_end for seq in self.running)
        return -(-count // self._stages)

    def _time_for_drafts(self) -> int:
        """Count the draft tokens that fit in the step beside one token of each running sequence."""
        count = len(self.running)
        context = sum(seq.num_computed for seq in self.running)
        return self._pace.spare(StepWork(count, count, 0.0, context), self.budget - count)

    def _grow(self, seq: Sequence, count: int, behind: int, plan: StepPlan) -> int:
        """Make room for `count` more tokens at the expense of running[behind:]; returns how many fit."""
        tables = self._tables
        start, have = seq.num_computed, len(seq.blocks)
        need = tables.count(start + count) - have
        if need > tables.num_available and seq.draft:  # a guess never preempts a sequence
            count = min(count, len(seq.tokens) - start)
            need = tables.count(start + count) - have
        while need > tables.num_available:
            plan.short = True
            if self._queue.drop_bases():
                continue
            victim = self._victim(behind, plan)
            if victim is None:  # keep what it has, compute what fits
                count = min(count, (have + tables.num_available) * tables.block_size - start)
                need = tables.count(start + count) - have
                break
            self.preempt(victim)
        seq.blocks += tables.allocate(need)
        return count

    def _victim(self, behind: int, plan: StepPlan) -> Sequence | None:
        """Pick the sequence of running[behind:] that loses least; lower priorities first, later ones among equals.

        Sequences that the step already computes are spared. Blocks shared with others stay; the blocks that it holds
        alone are about to be overwritten, cached or not.
        """
        placed = set(plan.flight)
        found = [seq for seq in self.running[behind:] if seq not in placed]
        best, best_rank = found[-1] if found else None, None
        for seq in found:
            loss = self._tables.loss(seq)
            if loss is not None:
                rank = (-seq.key[0], loss, -seq.key[1], -seq.key[2])
                if best_rank is None or rank < best_rank:
                    best, best_rank = seq, rank
        return best

    def preempt(self, seq: Sequence, failed_from: int | None = None) -> None:
        self.running.remove(seq)
        self.release(seq, failed_from)
        seq.num_preemptions += 1
        self._stats.num_preemptions += 1
        self._queue.push(seq)

    def preempt_all(self, failed_from: Mapping[Sequence, int] = MappingProxyType({})) -> None:
        """Send all running sequences back to the queue, and give up the blocks that waiting ones hold."""
        for seq in list(self.running):
            self.preempt(seq, failed_from.get(seq))
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
                if not self._tables.can_gain(sum(map(self._tables.gain, lower)), head, found[0]):
                    return
            self.preempt(lower.pop())

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
            elif not tables.can_gain(self._turns.gain(self.running, tables.gain), seq, PrefixMatch()):
                return
            self.preempt(other)

    def _is_in_flight(self, seq: Sequence) -> bool:
        """Tell whether a preempted sequence still awaits results; until they come, its tokens are not all known."""
        return seq.num_preemptions > 0 and any(seq in plan.flight for plan in self.in_flight)

    def _serve_prompts(self, plan: StepPlan, partial: list[Sequence]) -> None:
        """Share what is left of the step among prompts, partly computed and waiting ones, in the order of `pace`."""
        pace, queue = self._pace, self._queue
        plan.decoding = pace.times.seconds(plan.work)
        making = [seq for seq in partial if seq.status is RUNNING]
        going = deque(pace.order(making))
        num_partial, num_long = len(making), sum(map(pace.is_long, making))
        # A sequence that gave way to others waits for its turn in order, or they would displace each other for ever.
        fresh = (seq for seq in queue.seqs if not seq.num_preemptions)
        first = pace.oldest(making if self._next_waiting(plan, 0) is None else chain(making, fresh))
        passed = 0
        adapters = self._running_adapters()
        while plan.budget > 0:
            head = self._next_waiting(plan, passed)
            if first is not None:
                seq, first = first, None
                if seq.status is RUNNING:
                    going.remove(seq)
            elif going and (head is None or pace.rank(going[0]) < head.key):
                seq = going.popleft()
                if seq.status is not RUNNING:  # it gave its blocks to another one
                    continue
            elif head is not None:
                seq = head
            else:
                return
            if seq.status is RUNNING:
                if not self._continue_prompt(seq, plan):
                    return
            elif (adapters is not None and not self._has_room(seq, adapters)) or self._scores_much(seq):
                passed += 1
            elif pace.may_start(seq, num_partial, num_long):
                if not self._admit(seq, plan, making):
                    passed = MOST_PASSED + 1
                elif seq.status is RUNNING and not plan.seqs[-1].wants_logits:
                    num_partial, num_long = num_partial + 1, num_long + pace.is_long(seq)
                if adapters is not None and seq.status is RUNNING and seq.request.adapter is not None:
                    adapters.add(seq.request.adapter)
            else:
                passed += 1

    def _running_adapters(self) -> set[str] | None:
        """Return the adapters of running sequences, if their number is limited."""
        if self._max_adapters is None:
            return None
        return {seq.request.adapter for seq in self.running if seq.request.adapter is not None}

    def _has_room(self, seq: Sequence, adapters: set[str]) -> bool:
        """Tell whether the adapter of `seq` may join `adapters`. If not, no other sequence with an adapter passes it.

        Else requests of running adapters could keep it waiting for ever.
        """
        adapter = seq.request.adapter
        if adapter is None:
            return True
        assert self._max_adapters is not None
        if CLOSED in adapters or (adapter not in adapters and len(adapters) >= self._max_adapters):
            adapters.add(CLOSED)
            return False
        return True

    def _scores_much(self, seq: Sequence) -> bool:
        """Tell whether a step with `seq` would make more than MOST_ENTRIES log-probabilities of output."""
        width = seq.output_width
        return width > WIDE and MOST_ENTRIES - width < sum(other.output_width for other in self.running) > 0

    def _next_waiting(self, plan: StepPlan, passed: int) -> Sequence | None:
        """Pick the next sequence to admit, after `passed` ones that `pace` holds back; None if there is no room."""
        seqs = self._queue.seqs
        most = min(self._max_running, self.budget)
        if plan.short or len(self.running) >= most or passed > min(len(seqs), MOST_PASSED):
            return None
        if passed:
            return seqs[passed - 1]
        return self._turns.next() if seqs else None

    def _continue_prompt(self, seq: Sequence, plan: StepPlan) -> bool:
        """Place the next chunk of a running sequence; False if the step has no time for it."""
        start, have = seq.num_computed, len(seq.blocks)
        count = self._chunk(plan, seq, start, len(seq.tokens) + seq.num_unseen - start)
        if not count:
            return False
        if start + count > have * self._tables.block_size:
            behind = bisect_right(self.running, seq.key, key=key_of)
            count = self._grow(seq, count, behind, plan)
        if count:
            self._place_prompt(plan, seq, count, seq.blocks[have:])
        return True

    def _chunk(self, plan: StepPlan, seq: Sequence, start: int, pending: int) -> int:
        """Count how many of a prompt's pending tokens the step computes. The first prompt always gets some."""
        most = min(pending, plan.budget)
        if seq.prompt_width:
            left = (MOST_ENTRIES - plan.num_scores) // seq.prompt_width
            most = min(most, max(0 if plan.num_scores else 1, left))
        if self.whole_prompts:
            fits = most == pending and (not plan.seqs or self._pace.chunk(plan, start, most, True) == most)
            return most if fits else 0
        count = self._pace.chunk(plan, start, most, most == pending)
        return count if plan.seqs else max(count, 1)

    def _place_prompt(self, plan: StepPlan, seq: Sequence, count: int, new_blocks: list[int]) -> None:
        start = seq.num_computed
        plan.place(seq, count, new_blocks)
        ends = plan.seqs[-1].wants_logits
        plan.work = self._pace.times.with_prompt(plan.work, start, count, ends)
        plan.num_prompt_tokens += count
        plan.num_scores += count * seq.prompt_width

    def _admit(self, seq: Sequence, plan: StepPlan, making: list[Sequence]) -> bool:
        """Give a waiting sequence a slot, blocks and its first chunk; hold it if another sample computes its prompt.

        False: it has to wait, and so has everything behind it. It waits until there are blocks for all its tokens
        beside the blocks that prompts ahead of it in `making` still need, and time for its first chunk.
        """
        tables, queue, entries = self._tables, self._queue, seq.group.list_entries
        if plan.list_entries and entries and plan.list_entries + entries > MOST_ENTRIES:
            return False
        while not self._is_in_flight(seq):
            if not tables.num_available and not queue.drop_bases(spare=seq):
                return False
            found = tables.match(seq)
            if found is None:
                queue.hold(seq)
                return True
            owed = sum(tables.owed(other) for other in making if other.key < seq.key)
            match = tables.fit(seq, found[0], owed)
            if match is None:
                if queue.drop_bases(spare=seq):
                    continue
                return False
            if match.tail and any(match.source == target for _, target in plan.copies):
                return False  # the block that it would copy is a copy itself, made in this step
            count = self._chunk(plan, seq, match.num_tokens, len(seq.tokens) - match.num_tokens)
            if not count:
                return False
            queue.take(seq)
            plan.copies += tables.open(seq, match, found[1], match.num_tokens + count)
            queue.drop_base(seq)
            self._start(seq, plan)
            self._place_prompt(plan, seq, count, list(seq.blocks))
            return True
        return False

    def _start(self, seq: Sequence, plan: StepPlan) -> None:
        seq.slot = self._slots.pop()
        seq.status = RUNNING
        if not self._turns.runs(seq.request.id):
            plan.list_entries += seq.group.list_entries
        self._turns.started(seq)
        insort(self.running, seq, key=key_of)
        if seq.tokens is seq.request.tokens:
            seq.tokens = list(seq.tokens)
        seq.prefill_end = len(seq.tokens)
        if seq.num_preemptions == 0:
            seq.num_cached = seq.num_computed
            if self._tables.caching and seq.match_limit == len(seq.tokens) - 1:
                self._stats.prefix_queries += seq.num_prompt_tokens
                self._stats.prefix_hits += min(seq.num_computed, seq.num_prompt_tokens)
        plan.new.append(NewSeq(seq.slot, seq.request, seq.index, list(seq.tokens)))

    def _commit(self, plan: StepPlan) -> None:
        """Count the planned tokens as computed: later steps may read their KV.

        Blocks enter the index as soon as their tokens are known, so that a prompt is shared while it is computed.
        """
        self.in_flight.append(plan)
        windowed = self._tables.slabs is not None
        for item, seq in zip(plan.seqs, plan.flight, strict=True):
            seq.num_computed = item.start + len(item.tokens) + len(item.draft)
            if item.wants_logits and seq.request.pooling is None:
                seq.num_unseen += 1
            if seq.num_computed >= seq.index_at:
                self._tables.index(seq)
            if windowed:
                self._tables.pass_by(seq, item.start)  # a draft that is refused goes back to there at most
            if seq.group.held and seq.num_settled >= seq.num_prompt_tokens:
                self._queue.requeue_held(seq.group)
        if self._tables.states is not None:
            self._tables.states.commit(plan)

    def check(self, idle: list[Sequence]) -> None:
        """Assert the invariants of slots and running sequences; `idle` ones wait."""
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
    """Tell whether a sequence with a token in flight must wait for it: see the module's docstring."""
    return seq.constrained or seq.drafting or len(seq.tokens) + seq.num_unseen >= seq.max_total
