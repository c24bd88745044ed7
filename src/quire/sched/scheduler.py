"""Continuous batching over one block pool: requests arrive, are planned step by step, and end. Ids only, no arrays.

`plan` chooses which sequence computes what (and shows why nothing starves), `results` takes in results, `queue` holds
waiting sequences, `tables` their blocks.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from quire.config import SchedulerConfig
from quire.errors import EngineError
from quire.lazy import Lazy
from quire.sched.pace import Pace
from quire.sched.plan import Planner
from quire.sched.prefix import PrefixMatch
from quire.sched.queue import WaitingQueue
from quire.sched.results import Results
from quire.sched.sequence import (
    RUNNING,
    Group,
    Sequence,
    active_repetition,
    refusal,
    report_interval,
    width_of,
)
from quire.sched.tables import BlockTables
from quire.sched.times import StepRates
from quire.shapes import WHOLE_BLOCK, BlockShape
from quire.types import Delta, EngineStats, FinishReason, Made, Request, ScheduledBatch, StepOutput, ends

if TYPE_CHECKING:
    from quire.sched import suspects
    from quire.sched.suspects import Suspects
    from quire.state_rows import StateRows
else:
    suspects = Lazy("quire.sched.suspects")


NOTHING_MADE = Made()


class Scheduler:
    """Plan steps with `schedule()`; call `update()` with the results of each, in the same order.

    Any number of steps may be scheduled before the first result, if they are computed in order. `add`, `fork` and
    `abort` may be called at any time. A sequence is limited to `max_model_len` tokens and to the tokens that the
    whole pool holds. With `whole_prompts` every prompt is computed in one step: the budget must be at least
    `max_model_len`. With pipeline `stages`, as many steps are meant to be in flight. `rates` predict what steps cost
    before any is measured; `clock` gives seconds. `shape` is the shape of a block, for models with windowed layers,
    and `rows` are those of the recurrent states of models that have such.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        num_blocks: int,
        block_size: int,
        max_model_len: int,
        enable_prefix_caching: bool,
        whole_prompts: bool = False,
        recompute_last: bool = False,
        max_adapters: int | None = None,
        stages: int = 1,
        rates: StepRates | None = None,
        clock: Callable[[], float] = time.monotonic,
        shape: BlockShape = WHOLE_BLOCK,
        rows: StateRows | None = None,
    ) -> None:
        self._by_priority = config.scheduling_policy == "priority"
        self._stream_interval = config.stream_interval
        self._max_model_len = max_model_len
        self._arrivals = 0
        rates = rates or StepRates()
        self._stats = EngineStats(num_blocks=num_blocks, limits=rates.limits)
        about = enable_prefix_caching, recompute_last, shape, config.max_num_batched_tokens, rows
        self._tables = BlockTables(num_blocks, block_size, *about)
        self._max_total = min(max_model_len, self._tables.most_tokens)
        self._queue = WaitingQueue(self._tables)
        self.pace = Pace(config, rates, max_model_len, clock)
        self._planner = Planner(
            config, self._tables, self._queue, self._stats, self.pace, whole_prompts, max_adapters, stages
        )
        self.prompt_seconds = 0.0  # that prompts took of the step updated last
        self._suspects: Suspects | None = None  # once a step has failed
        self._results = Results(self._planner, self._tables, self._queue, self._stats)

    @property
    def has_work(self) -> bool:
        """Tell whether there is something to compute, or a result under way."""
        return bool(self._planner.running or self._queue.seqs or self._planner.in_flight)

    # --- requests ------------------------------------------------------------------------------------

    def add(self, request: Request) -> list[Delta]:
        """Queue all samples of `request`. If it can never run, each ends at once with an error.

        Samples of a resumed request go on as after a preemption: what they have made is not reported again.
        """
        error = self._queue.request_in_use(request) or refusal(request, self._max_model_len, self._max_total)
        for made in request.made:
            error = error or (None if made.ended else self._full(request, len(made.tokens)))
        if error is not None:
            self._stats.memory_refusals += self._max_total <= len(request.tokens) < self._max_model_len
            return ends(request, FinishReason.ERROR, error)
        group = Group(request)
        for index in request.open_samples:
            tokens, made = request.tokens, request.made[index] if request.made else NOTHING_MADE
            seq = self._sequence(group, index, [*tokens, *made.tokens] if made.tokens else tokens, None)
            if made.tokens:
                seq.num_preemptions, seq.num_cached = 1, made.num_cached
                seq.num_accepted, seq.num_rejected = made.num_accepted, made.num_rejected
            self._join(seq)
        return []

    def _full(self, request: Request, num_output: int) -> str | None:
        """Return the error for a sequence with `num_output` tokens of output that has no room for one more."""
        total, num_prompt = len(request.tokens) + num_output, len(request.tokens)
        if total < min(num_prompt + request.max_tokens, self._max_total):
            return None
        return f"a sequence of {total} tokens has no room for one more; raise max_tokens or --max-model-len"

    def fork(self, request_id: str, index: int, request: Request, output: list[int]) -> list[Delta]:
        """Queue `request` as a continuation of a live sample; both share the KV up to their first difference.

        The new sequence begins with `request.tokens` and `output`. Penalties, limits and usage count `output` as its
        own tokens, but they are not reported. The fork holds the shared blocks at once, so the sample may be dropped;
        while it waits, they are released if blocks run out. If the sample has ended, the fork starts from the prefix
        cache like any request; its tokens are the same either way. If it can never run, it ends at once with an error.
        """
        error = self._queue.request_in_use(request) or refusal(request, self._max_model_len, self._max_total)
        if error is None and request.sampling.n != 1:
            error = f"a fork is one sample, but its request asks for n={request.sampling.n}; fork n times"
        error = error or self._full(request, len(output))
        if error is not None:
            return ends(request, FinishReason.ERROR, error)
        group, tokens = Group(request), [*request.tokens, *output]
        base = self._common(request_id, index, group, tokens)
        seq = self._sequence(group, 0, tokens, base)
        seq.output_width = 0  # it waits for no other: its program waits for it
        self._join(seq)
        return []

    def abort(self, request_id: str, index: int | None = None) -> list[Delta]:
        """End sample `index` of a request, or all its samples. Returns [] for unknown or ended requests."""
        group = self._queue.groups.get(request_id)
        if group is None:
            return []
        deltas = []
        for seq in [s for s in group.live if index is None or s.index == index]:
            if seq.status is RUNNING:
                self._planner.running.remove(seq)
            self._results.end(seq)
            deltas.append(seq.delta(FinishReason.ABORT))
        return deltas

    def keep(self, key: str, request: Request, tokens: list[int]) -> int:
        """Hold the blocks of the cached prefix of `tokens` under `key`; `request` says whose cache it is.

        Returns the number of blocks. They are given up by `let_go`, by `keep` of the same key, when all kept prefixes
        hold more than half of the pool, and when running sequences need them.
        """
        if not self._tables.caching:
            return 0
        match, _ = self._tables.find(tokens, Group(request).namespace, len(tokens))
        return self._queue.keep(key, match, request.owner)

    def let_go(self, key: str) -> None:
        """Give up a kept prefix, if it is still there."""
        self._queue.let_go(key)

    def _join(self, seq: Sequence) -> None:
        if self.pace.target:
            self.pace.arrive(seq, self._tables.count_cached(seq))
        self._queue.join(seq)

    def _sequence(self, group: Group, index: int, tokens: list[int], base: PrefixMatch | None) -> Sequence:
        request, num_prompt = group.request, len(group.request.tokens)
        sampling = request.sampling
        prompt_width = width_of(sampling.prompt_logprobs, sampling.prompt_logprob_token_ids) * (not index)
        self._arrivals += 1
        return Sequence(
            request=request,
            index=index,
            tokens=tokens,
            group=group,
            key=(request.priority if self._by_priority else 0, 0.0, self._arrivals),
            cursor=self._tables.prefix.root,
            num_prompt_tokens=num_prompt,
            max_total=min(num_prompt + request.max_tokens, self._max_total),
            min_total=num_prompt + sampling.min_tokens,
            end_ids=frozenset(request.eos_token_ids).union(sampling.stop_token_ids or ()),
            num_reported=len(tokens),
            report_every=report_interval(request, self._stream_interval),
            constrained=request.constrained,
            num_prompt_logprobs=request.scored_from,
            base=base,
            repetition=active_repetition(sampling),
            prompt_width=prompt_width,
            output_width=width_of(sampling.logprobs, sampling.logprob_token_ids),
        )

    def _common(self, request_id: str, index: int, group: Group, tokens: list[int]) -> PrefixMatch | None:
        """Find the KV that a new sequence with `tokens` can share with a live sample of `group`."""
        parents = self._queue.groups.get(request_id)
        for seq in parents.live if parents is not None else ():
            if seq.index == index and seq.status is RUNNING and seq.group.namespace == group.namespace:
                limit = min(seq.num_settled, len(tokens) - 1)
                common = next((i for i in range(limit) if seq.tokens[i] != tokens[i]), limit)
                return self._tables.fork(seq, common, live=True) if common else None
        return None

    # --- steps ----------------------------------------------------------------------------------------

    def schedule(self) -> ScheduledBatch | None:
        """Plan the next step. None: nothing can be computed until results of steps in flight arrive.

        Free slots that no batch has announced yet are announced in the next one.
        """
        suspect = None if self._suspects is None else self._suspects.first()
        plan = None
        if suspect is None or not self._planner.in_flight:
            plan = self._planner.plan(suspect)
        if plan is None:
            return None
        slabs, states = self._tables.slabs, self._tables.states
        mapped = [] if slabs is None else slabs.take_mapped()
        copied = [] if states is None else states.take_copies()
        freed = self._planner.take_freed()
        return ScheduledBatch(plan.step, plan.new, plan.seqs, freed, plan.copies, mapped, copied)

    def update(self, batch: ScheduledBatch, output: StepOutput, seconds: float = 0.0) -> list[Delta]:
        """Take in the result of `batch`, the oldest one in flight; returns the deltas of its sequences.

        The step took `seconds` (0: unknown), of which `prompt_seconds` went to prompts.
        EngineError if `output` belongs to another batch or lacks a token.
        """
        in_flight = self._planner.in_flight
        if not in_flight or not batch.step == output.step == in_flight[0].step:
            raise EngineError(
                f"update of step {batch.step} with output of step {output.step}: not the oldest in flight"
            )
        plan = in_flight.popleft()
        self.prompt_seconds = self.pace.took(plan, seconds)
        read, computed = self.pace.times.rates.counts(plan.work)
        stats = self._stats
        stats.read_bytes += read
        stats.operations += computed
        stats.step_seconds += seconds
        deltas = self._results.take(plan, output)
        if self._suspects is not None:
            self._suspects.clear(plan, output)
        return deltas

    def undo(self, error: str, exhausted: bool = False) -> list[Delta]:
        """Take back all steps in flight, of which the oldest failed with `error`: as if they had not been planned.

        Their sequences go on as after a preemption, each alone up to its next token. One that fails alone ends. If the
        step `exhausted` the device's memory, they go on together in smaller steps, and one ends that has no memory for
        one token.
        """
        self._stats.num_oom += exhausted
        if self._suspects is None:
            self._suspects = suspects.Suspects(self._planner, self._tables)
        blamed = self._suspects.undo(exhausted)
        if blamed is None:
            return []
        seq, start = blamed
        delta = seq.delta(FinishReason.ERROR, error)
        delta.exhausted = exhausted
        self._planner.running.remove(seq)
        self._results.end(seq, start)
        return [delta]

    # --- inspection ----------------------------------------------------------------------------------

    @property
    def request_ids(self) -> list[str]:
        """Return the requests that wait or run."""
        return list(self._queue.groups)

    @property
    def running_ids(self) -> list[str]:
        return [seq.request.id for seq in self._planner.running]

    @property
    def block_tables(self) -> list[list[int]]:
        """Return the blocks of each running sequence; shared ones are in several tables."""
        return [list(seq.blocks) for seq in self._planner.running]

    def preempt_all(self) -> None:
        """Take slots and blocks from all sequences; they go on later. No step may be in flight."""
        self._planner.preempt_all()

    def reset_prefix_cache(self) -> None:
        """Forget all cached and kept prefixes; running sequences keep their blocks."""
        self._queue.let_go_all()
        self._tables.prefix.clear()

    def stats(self) -> EngineStats:
        """Take a snapshot. Prefix queries and hits count prompt tokens of first admissions only."""
        stats, pool, states = self._stats, self._tables.pool, self._tables.states
        stats.num_running = len(self._planner.running)
        stats.num_waiting = len(self._queue.seqs) + self._queue.num_held
        stats.num_waiting_tokens = self._queue.num_tokens
        free, available = self._tables.num_free, self._tables.num_available
        stats.num_used_blocks = self._tables.num_blocks - available
        stats.num_shared_blocks = pool.num_shared
        stats.num_cached_blocks = available - free
        stats.num_free_blocks = free
        stats.num_kept_blocks = self._queue.num_kept_blocks
        if states is not None:
            stats.num_snapshots, stats.snapshots_taken = states.num_snapshots, states.num_taken
            stats.snapshot_bytes = states.num_snapshots * states.rows.nbytes
            stats.snapshot_hits, stats.snapshots_evicted = states.num_hits, states.num_evicted
        copies = {"spec_accepted_per_pos": list(stats.spec_accepted_per_pos), "longest_stays": {}}
        return EngineStats(**{**stats.as_dict(), **copies})

    def check(self) -> None:
        """Assert the invariants of queue, slots, tables, pool and index. O(state); when idle and in tests."""
        self._planner.check(self._queue.check())
