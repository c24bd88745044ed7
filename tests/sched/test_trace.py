"""Random traces: whatever is mixed, each sequence reads its own KV, ends, and says what it says alone."""

from __future__ import annotations

import itertools
import random

import msgspec
import pytest
from fake_executor import VOCAB, FakeExecutor, Journal, Loop, alone, embedding, request

from quire.config import SchedulerConfig
from quire.params import OutputKind
from quire.sched import Scheduler
from quire.sched.tables import BlockTables
from quire.shapes import WHOLE_BLOCK, BlockShape
from quire.state_rows import StateRows
from quire.types import FinishReason, Request


class Trace:
    """One random world: its configuration, traffic and faults come from one seed."""

    def __init__(
        self, seed: int, faults: bool, depth: int, windowed: bool = False, recurrent: bool = False
    ) -> None:
        rng = self.rng = random.Random(seed)
        self.block_size = rng.choice([1, 2, 3, 4, 8])
        self.num_blocks = rng.randint(5, 40)
        self.max_model_len = rng.randint(8, 60)
        self.caching = rng.random() < 0.7
        self.max_total = min(self.max_model_len, self.num_blocks * self.block_size)
        config = SchedulerConfig(
            max_num_seqs=rng.randint(1, 9),
            max_num_batched_tokens=rng.choice([1, 3, 7, 20, 64]),
            scheduling_policy=rng.choice(["fcfs", "priority"]),
            target_step_time=rng.choice([None, 1.0, 40.0, 100.0]),
            max_num_partial_prefills=rng.randint(2, 4),
            max_long_partial_prefills=rng.randint(1, 2),
            long_prefill_token_threshold=rng.choice([0, 5, 20]),
        )
        self.budget = config.max_num_batched_tokens
        shape = WHOLE_BLOCK
        if windowed:
            shape = BlockShape(
                rng.randint(1, 3), rng.randint(1, 6), rng.randint(1, 12), rng.choice([1, 2, 4])
            )
            tables = BlockTables(self.num_blocks, self.block_size, False, shape=shape, budget=self.budget)
            self.max_total = min(self.max_model_len, tables.most_tokens)
        rows = None
        if recurrent:
            running = rng.randint(1, 6)
            others = rng.choice([0, 1, 2, 5, 12, 40])
            grid = rng.choice([1, 4, 8])
            rows = StateRows(
                running + others,
                running,
                rng.randint(1, 6),
                rng.random() < 0.3,
                grid,
                grid * rng.randint(1, 4),
            )
        clock = itertools.count()
        self.scheduler = Scheduler(
            config,
            self.num_blocks,
            self.block_size,
            self.max_model_len,
            self.caching,
            recompute_last=seed % 3 == 0,
            clock=lambda: 0.05 * next(clock),
            shape=shape,
            rows=rows,
        )
        draft_rate = rng.choice([0.0, 0.7])
        self.executor = FakeExecutor(self.num_blocks, self.block_size, rng, draft_rate, shape, rows)
        self.loop = Loop(self.scheduler, self.executor, depth)
        self.faults, self.recurrent = faults, recurrent
        self.executor.error_rate = 0.01 if faults else 0.0
        self.journal = Journal()
        self.requests: dict[str, Request] = {}
        self.told: list[list[int]] = [[]]

    def prompt(self) -> list[int]:
        """Often the beginning of something said before, then something new."""
        rng = self.rng
        seen = rng.choice(self.told) if rng.random() < 0.8 else []
        tokens = seen[: rng.randint(0, len(seen))]
        tokens = tokens + [rng.randrange(VOCAB) for _ in range(rng.randint(1, 8))]
        return tokens[: self.max_total - 1]

    def arrive(self) -> None:
        rng = self.rng
        max_tokens = rng.randint(1, 20)
        made = request(
            f"r{len(self.requests)}",
            self.prompt(),
            max_tokens,
            n=rng.choice([1, 1, 1, 2, 4]),
            seed=rng.randrange(3),
            salt=rng.choice(["", "", "tenant"]),
            adapter=rng.choice([None, None, "adapter"]),
            owner=rng.choice(["", "", "other"]),
            priority=rng.randint(-2, 2),
            eos_token_ids=rng.choice([(), (0,)]),
            stop_token_ids=rng.choice([(), (1,)]),
            min_tokens=rng.choice([0, min(5, max_tokens)]),
            prompt_logprobs=rng.choice([None, None, 1]),
            logprobs=rng.choice([None, 1]),
            output_kind=rng.choice(list(OutputKind)),
            grammar=rng.choice([None, None, None, "any"]),
            pooling=rng.choice([None] * 7 + ["mean", "last"]),
        )
        self.requests[made.id] = made
        if self.executor.break_rate and (not self.executor.poison or rng.random() < 0.2):
            self.executor.poison.add(made.id)
        self.journal.take(self.scheduler.add(made))

    def fork(self) -> None:
        """Go on from a live sample, from a part of what it said or with something else, and perhaps drop it."""
        rng, journal = self.rng, self.journal
        live = [
            key for key in journal.tokens if key not in journal.ends and self.requests[key[0]].pooling is None
        ]
        if not live:
            return
        id, index = rng.choice(live)
        source = self.requests[id]
        output = [*journal.before.get(id, ()), *journal.tokens[id, index]]
        output = output[: rng.randint(0, len(output))] + [rng.randrange(VOCAB)] * rng.choice([0, 0, 1])
        sampling = msgspec.structs.replace(source.sampling, n=1, prompt_logprobs=None, min_tokens=0)
        made = msgspec.structs.replace(
            source,
            id=f"r{len(self.requests)}",
            sampling=sampling,
            max_tokens=len(output) + rng.randint(1, 9),
            seed=rng.randrange(9),
        )
        if len(made.tokens) + len(output) >= self.max_total:
            return
        self.requests[made.id] = made
        journal.before[made.id] = output
        journal.take(self.scheduler.fork(id, index, made, output))
        if rng.random() < 0.5:
            (end,) = self.scheduler.abort(id, index)
            journal.take([end])
        self.loop.check()

    def keep(self) -> None:
        """Hold what is cached of something said, or let it go."""
        made = self.rng.choice(list(self.requests.values()))
        key = self.rng.choice("abc")
        if self.rng.random() < 0.6:
            self.scheduler.keep(key, made, self.rng.choice(self.told))
        else:
            self.scheduler.let_go(key)
        self.loop.check()

    def maybe_abort(self, rate: float) -> None:
        if self.faults and self.requests and self.rng.random() < rate:
            id = self.rng.choice(list(self.requests))
            self.journal.take(self.scheduler.abort(id, self.rng.choice([None, 0, 1])))
            self.scheduler.check()

    def step(self) -> None:
        loop = self.loop
        if len(loop.flight) < loop.depth and self.rng.random() < 0.8:
            batch = loop.plan()
            assert batch is not None or loop.flight or not self.scheduler.has_work, "nothing can go on"
            assert batch is None or 0 < batch.num_tokens <= self.budget
        self.maybe_abort(0.1)
        if loop.flight and (len(loop.flight) == loop.depth or self.rng.random() < 0.5):
            self.journal.take(loop.take())

    def run(self, total: int = 0) -> int:
        """Run until all requests have ended; the steps."""
        rng = self.rng
        total, steps = total or rng.randint(5, 25), 0
        arrivals = rng.choice([0.1, 0.5, 1.0])
        while len(self.requests) < total or self.scheduler.has_work:
            while len(self.requests) < total and rng.random() < arrivals:
                self.arrive()
            self.maybe_abort(0.05)
            if rng.random() < 0.1:
                self.fork()
            if rng.random() < 0.02:
                self.scheduler.reset_prefix_cache()
            if self.recurrent and self.requests and rng.random() < 0.1:
                self.keep()
            self.step()
            for slot in list(self.executor.slots.values())[:1]:
                self.told = [*self.told[-20:], list(slot.tokens)]
            steps += 1
            assert steps < 20_000, "livelock"
        for key in "abc":
            self.scheduler.let_go(key)
        return steps

    def verify(self) -> None:
        for made in self.requests.values():
            for index in range(made.sampling.n):
                key = (made.id, index)
                end = self.journal.ends[key]
                said = self.journal.tokens[key]
                if made.pooling is not None:
                    blamed = made.id in self.executor.poison
                    assert self.faults or blamed or end.embedding == embedding(made.tokens)
                    continue
                before = self.journal.before.get(made.id, [])
                tokens, reason, stop_reason = alone(made, index, self.max_total, before)
                if end.finish_reason in (FinishReason.ABORT, FinishReason.ERROR):
                    blamed = made.id in self.executor.poison
                    assert self.faults or blamed or end.finish_reason is FinishReason.ABORT
                    assert said == tokens[: len(said)]
                    assert (end.error == "made to fail") == (end.finish_reason is FinishReason.ERROR)
                else:
                    assert (said, end.finish_reason, end.stop_reason) == (tokens, reason, stop_reason)
                    if made.sampling.prompt_logprobs is not None and index == 0:
                        assert self.journal.prompt_logprobs[key] == made.tokens[1:]
                if made.sampling.logprobs is not None:
                    assert self.journal.logprobs[key] == said
        stats = self.scheduler.stats()
        assert (stats.num_used_blocks, stats.num_running, stats.num_waiting, stats.num_waiting_tokens) == (
            0,
        ) * 4
        assert stats.generation_tokens == sum(map(len, self.journal.tokens.values()))
        assert 0 <= stats.prefix_hits <= stats.prefix_queries
        self.scheduler.reset_prefix_cache()
        self.scheduler.check()
        if self.recurrent:
            states = self.scheduler._tables.states
            assert states is not None
            assert len(states._free) == states.rows.num_rows, "a row is lost"
        assert self.scheduler.stats().num_free_blocks == self.num_blocks


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("seed", range(40))
def test_without_faults_every_sequence_says_what_it_says_alone(seed: int, depth: int) -> None:
    trace = Trace(seed, faults=False, depth=depth)
    trace.run()
    trace.verify()


@pytest.mark.parametrize("faults", [False, True])
@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("seed", range(40))
def test_windowed_layers_read_only_what_is_stored(seed: int, depth: int, faults: bool) -> None:
    trace = Trace(2000 + seed, faults, depth, windowed=True)
    trace.run()
    trace.verify()


@pytest.mark.parametrize("faults", [False, True])
@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("seed", range(80))
def test_recurrent_states_are_those_of_the_tokens_before(seed: int, depth: int, faults: bool) -> None:
    """Whatever copies, marks, open rows and evictions there are; rows that nobody has are poisoned."""
    trace = Trace(4000 + seed, faults, depth, windowed=seed % 5 == 0, recurrent=True)
    trace.executor.break_rate = 0.1 if seed % 4 == 1 else 0.0
    trace.run()
    trace.verify()


@pytest.mark.parametrize("seed", [5000, 5003, 5028, 5055])
def test_one_world_of_states_lives_through_thousands_of_steps(seed: int) -> None:
    """These worlds come to everything often: forks, preemptions, failed steps; snapshots taken, hit and evicted."""
    trace = Trace(seed, faults=True, depth=2, recurrent=True)
    trace.executor.break_rate = 0.02
    steps = trace.run(250)
    stats = trace.scheduler.stats()
    assert steps > 1000
    assert (
        min(stats.snapshots_taken, stats.snapshot_hits, stats.snapshots_evicted, stats.num_preemptions) > 20
    )
    assert len(trace.journal.before) > 20
    trace.verify()


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("seed", range(40))
def test_with_aborts_and_errors_the_others_are_untouched(seed: int, depth: int) -> None:
    trace = Trace(1000 + seed, faults=True, depth=depth)
    trace.run()
    trace.verify()


@pytest.mark.parametrize("faults", [False, True])
@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("seed", range(40))
def test_a_step_that_fails_ends_the_request_that_makes_it_fail(seed: int, depth: int, faults: bool) -> None:
    """All others say what they say alone, whichever steps fail with them."""
    trace = Trace(seed, faults, depth, windowed=seed % 4 == 0)
    trace.executor.break_rate = 0.1
    trace.run()
    trace.verify()
    ends = trace.journal.ends
    assert trace.executor.poison
    for made in trace.executor.poison:
        reasons = {ends[made, i].finish_reason for i in range(trace.requests[made].sampling.n)}
        assert reasons <= {FinishReason.ERROR, FinishReason.ABORT}
