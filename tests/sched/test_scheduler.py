"""Each rule of the scheduler alone."""

from __future__ import annotations

import random
from typing import Any

import pytest
from fake_executor import FakeExecutor, Journal, alone, drain, request

from quire.config import SchedulerConfig
from quire.errors import EngineError
from quire.params import OutputKind, RepetitionDetectionParams
from quire.sched import Scheduler
from quire.sched.plan import MOST_ENTRIES
from quire.sched.sequence import VOCABULARY
from quire.types import Delta, FinishReason, Request, ScheduledBatch, StepOutput, TokenLogprobs


class World:
    """A scheduler with its executor; each option has a roomy default."""

    def __init__(
        self, num_blocks: int = 64, block_size: int = 4, max_len: int = 64, **options: object
    ) -> None:
        caching = bool(options.pop("caching", True))
        again = bool(options.pop("recompute_last", False))
        adapters: Any = options.pop("max_adapters", None)
        config = SchedulerConfig(**{"max_num_seqs": 8, "max_num_batched_tokens": 64, **options})  # type: ignore[arg-type]
        self.scheduler = Scheduler(
            config, num_blocks, block_size, max_len, caching, recompute_last=again, max_adapters=adapters
        )
        self.executor = FakeExecutor(num_blocks, block_size, random.Random(0))
        self.journal = Journal()
        self.max_total = min(max_len, num_blocks * block_size)

    def add(self, *args: object, **options: object) -> Request:
        made = request(*args, **options)  # type: ignore[arg-type]
        self.journal.take(self.scheduler.add(made))
        return made

    def plan(self) -> ScheduledBatch:
        batch = self.scheduler.schedule()
        assert batch is not None
        return batch

    def finish(self, batch: ScheduledBatch) -> list[Delta]:
        deltas = self.scheduler.update(batch, self.executor.step(batch))
        self.journal.take(deltas)
        self.scheduler.check()
        return deltas

    def step(self) -> ScheduledBatch:
        batch = self.plan()
        self.finish(batch)
        return batch

    def drain(self) -> list[ScheduledBatch]:
        return drain(self.scheduler, self.executor, self.journal)

    def said(self, made: Request, index: int = 0) -> list[int]:
        return self.journal.tokens[made.id, index]

    def expect(self, *requests: Request) -> None:
        for made in requests:
            for index in range(made.sampling.n):
                tokens, reason, stop_reason = alone(made, index, self.max_total)
                end = self.journal.ends[made.id, index]
                assert (self.said(made, index), end.finish_reason, end.stop_reason) == (
                    tokens,
                    reason,
                    stop_reason,
                )


def scheduled(batch: ScheduledBatch) -> list[tuple[int, int, bool]]:
    return [(item.start, len(item.tokens) + len(item.draft), item.wants_logits) for item in batch.seqs]


# --- the one rule --------------------------------------------------------------------------------------


def test_a_prompt_is_computed_in_chunks_of_the_budget() -> None:
    world = World(max_num_batched_tokens=4)
    made = world.add("a", list(range(10)), 2)
    assert [scheduled(b) for b in world.drain()] == [
        [(0, 4, False)],
        [(4, 4, False)],
        [(8, 2, True)],
        [(10, 1, True)],
    ]
    world.expect(made)


def test_decodes_are_not_starved_by_a_long_prompt_that_is_ahead() -> None:
    world = World(max_num_batched_tokens=6, scheduling_policy="priority")
    world.add("short", [1, 2], 10, priority=1)
    world.step()
    world.add("long", list(range(30)), 2, priority=0)
    assert scheduled(world.step()) == [(2, 1, True), (0, 5, False)]
    for start in (5, 10, 15):
        assert scheduled(world.step()) == [(start // 5 + 2, 1, True), (start, 5, False)]


def test_waiting_requests_share_what_is_left_of_the_budget() -> None:
    world = World(max_num_batched_tokens=10)
    for id in "abc":
        world.add(id, [ord(id)] * 4, 3)
    assert scheduled(world.step()) == [(0, 4, True), (0, 4, True), (0, 2, False)]
    assert scheduled(world.step()) == [(4, 1, True), (4, 1, True), (2, 2, True)]


def test_more_slots_than_budget_never_starves_a_running_sequence() -> None:
    world = World(max_num_batched_tokens=2, max_num_seqs=8)
    requests = [world.add(str(i), [i, i, i], 3) for i in range(6)]
    for batch in world.drain():
        assert len(batch.seqs) <= 2
    world.expect(*requests)


def test_drafts_are_verified_and_never_pass_the_limit() -> None:
    world = World(max_len=20)
    world.executor.draft_rate = 1.0
    made = world.add("a", [1, 2, 3], 40, logprobs=1)
    batches = world.drain()
    world.expect(made)
    assert len(world.said(made)) == 17
    assert len(batches) < 17
    assert all(item.start + len(item.tokens) + len(item.draft) < 20 for b in batches for item in b.seqs)
    assert world.journal.logprobs["a", 0] == world.said(made)


def test_a_draft_is_cut_to_the_budget() -> None:
    world = World(max_num_batched_tokens=3)
    world.add("a", [1], 20)
    world.add("b", [2], 20)
    batch = world.plan()
    output = world.executor.step(batch)
    output.drafts = {slot: [5, 6, 7, 8] for slot in output.tokens}
    world.journal.take(world.scheduler.update(batch, output))
    batch = world.plan()
    assert [(len(i.tokens), len(i.draft), i.wants_logits) for i in batch.seqs] == [(1, 1, True), (1, 0, True)]
    world.finish(batch)
    assert not any(item.draft for item in world.plan().seqs)  # a draft is for one step


# --- ends ----------------------------------------------------------------------------------------------


def feed(world: World, made: Request, *outs: list[int]) -> list[Delta]:
    """Let a request sample what we say, drafts accepted where there is more than one token."""
    world.scheduler.add(made)
    deltas = []
    for i, out in enumerate(outs):
        batch = world.plan()
        slot = batch.seqs[0].slot
        drafts = {slot: outs[i + 1][:-1]} if i + 1 < len(outs) else {}
        logprobs = {slot: [TokenLogprobs(t, 0.0, 1, [], []) for t in out]}
        deltas += world.scheduler.update(batch, StepOutput(batch.step, {slot: out}, logprobs, drafts=drafts))
        world.scheduler.check()
    return deltas


def test_eos_stops_and_is_included() -> None:
    last = feed(World(), request("a", [1], 9, eos_token_ids=(7,), stop_token_ids=[7]), [3], [7])[-1]
    assert (last.tokens, last.finish_reason, last.stop_reason) == ([7], FinishReason.STOP, None)


@pytest.mark.parametrize(
    ("options", "told"), [({}, [1, 4]), ({"logprobs": 0}, [1] * 5), ({"stop": "."}, [1] * 5)]
)
def test_who_wants_the_end_alone_is_told_of_the_first_token_and_the_end(
    options: dict[str, Any], told: list[int]
) -> None:
    """But of every token where the reader looks for stop strings, or log-probabilities come along."""
    world = World()
    made = world.add("a", [1, 2, 3], 5, output_kind=OutputKind.FINAL_ONLY, **options)
    deltas = []
    while world.scheduler.has_work:
        deltas += world.finish(world.plan())
    assert [len(delta.tokens) for delta in deltas] == told
    world.expect(made)


def test_what_was_not_told_comes_with_an_abort() -> None:
    world = World()
    made = world.add("a", [1, 2, 3], 9, output_kind=OutputKind.FINAL_ONLY)
    for _ in range(4):
        world.step()
    (end,) = world.scheduler.abort("a")
    said, _, _ = alone(made, 0, world.max_total)
    assert (end.tokens, end.usage.num_output) == (said[1:4], 4)


def test_a_stop_token_is_the_stop_reason() -> None:
    last = feed(World(), request("a", [1], 9, eos_token_ids=(7,), stop_token_ids=[8]), [8])[-1]
    assert (last.tokens, last.finish_reason, last.stop_reason) == ([8], FinishReason.STOP, 8)


def test_tokens_after_the_end_are_dropped() -> None:
    world = World()
    last = feed(world, request("a", [1], 9, eos_token_ids=(7,)), [3], [4, 7, 5])[-1]
    assert (last.tokens, last.usage.num_output, last.finish_reason) == ([4, 7], 3, FinishReason.STOP)
    assert [entry.token for entry in last.logprobs or []] == [4, 7]
    assert world.scheduler.stats().num_used_blocks == 0
    assert world.scheduler.stats().generation_tokens == 3
    world.scheduler.add(request("b", [1, 3, 4, 7, 5], 1))
    assert scheduled(world.plan()) == [
        (4, 1, True)
    ]  # the KV of the accepted 4 and 7 is known, that of 5 is not


def test_min_tokens_comes_before_stops_and_length_after() -> None:
    made = request("a", [1], 4, eos_token_ids=(7,), min_tokens=3)
    deltas = feed(World(), made, [7], [7], [3], [3])
    assert [d.finish_reason for d in deltas] == [None, None, None, FinishReason.LENGTH]
    made = request("a", [1], 4, eos_token_ids=(7,), min_tokens=3)
    assert feed(World(), made, [7], [7], [7])[-1].finish_reason is FinishReason.STOP


def test_the_model_length_ends_a_sequence() -> None:
    world = World(max_len=8)
    made = world.add("a", [1, 2, 3], 100)
    world.drain()
    assert len(world.said(made)) == 5
    assert world.journal.ends["a", 0].finish_reason is FinishReason.LENGTH


def test_the_pool_length_ends_a_sequence_that_is_alone() -> None:
    world = World(num_blocks=3, block_size=4)
    made = world.add("a", [1, 2, 3], 100)
    world.drain()
    assert len(world.said(made)) == 9
    world.expect(made)


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (request("a", [1] * 16, 1), "max_model_len is 16"),
        (request("a", []), "prompt is empty"),
        (request("live", [1, 2]), "choose another id"),
    ],
)
def test_what_can_never_run_ends_at_once(made: Request, says: str) -> None:
    world = World(max_len=16)
    world.add("live", [1, 2, 3])
    (delta,) = world.scheduler.add(made)
    assert delta.finish_reason is FinishReason.ERROR
    assert says in (delta.error or "")
    world.drain()
    world.scheduler.check()


def test_a_prompt_larger_than_the_pool_ends_at_once_for_each_sample() -> None:
    deltas = World(num_blocks=2, block_size=4).scheduler.add(request("a", [1] * 8, 1, n=2))
    assert [(d.index, d.finish_reason) for d in deltas] == [(0, FinishReason.ERROR), (1, FinishReason.ERROR)]
    assert "--kv-cache-memory-bytes" in (deltas[0].error or "")


def test_an_error_ends_its_sequence_alone_and_its_tail_is_not_cached() -> None:
    world = World(block_size=4)
    world.add("bad", [1, 2, 3, 4, 5])
    good = world.add("good", [6, 7])
    world.step()
    batch = world.plan()
    output = world.executor.step(batch)
    output.errors[batch.seqs[0].slot] = "logits are not finite"
    world.journal.take(world.scheduler.update(batch, output))
    end = world.journal.ends["bad", 0]
    assert (end.finish_reason, end.error, end.tokens) == (FinishReason.ERROR, "logits are not finite", [])
    assert world.scheduler.stats().num_cached_blocks == 1  # the full block of an earlier, good step
    world.drain()
    world.expect(good)


def test_pooling_ends_with_a_vector() -> None:
    world = World(max_num_batched_tokens=4, max_len=8)
    for id in ("first", "again"):
        world.scheduler.add(request(id, [1, 2, 3, 4, 5, 6, 7, 8], pooling="mean"))
        batch = world.plan()
        assert scheduled(batch) == [(0, 4, False)]
        assert world.scheduler.update(batch, StepOutput(batch.step, {})) == []
        batch = world.plan()
        slot = batch.seqs[0].slot
        with_vector = StepOutput(batch.step, {}, embeddings={slot: [0.5, 1.0]})
        (delta,) = world.scheduler.update(batch, with_vector)
        assert (delta.embedding, delta.tokens, delta.finish_reason) == ([0.5, 1.0], [], FinishReason.STOP)
        world.scheduler.check()


# --- slots and blocks ----------------------------------------------------------------------------------


def test_slots_are_announced_as_free_before_they_are_used_again() -> None:
    world = World(max_num_seqs=2)
    requests = [world.add(str(i), [i], 2) for i in range(6)]
    batches = world.drain()
    assert {n.slot for b in batches for n in b.new} == {0, 1}
    assert [sorted(b.freed) for b in batches] == [[], [], [0, 1], [], [0, 1], []]
    world.expect(*requests)
    world.add("later", [9], 1)
    assert sorted(world.plan().freed) == [0, 1]  # no batch followed that could have told


def test_new_blocks_extend_the_table_as_needed() -> None:
    world = World(block_size=4)
    world.add("a", [1, 2, 3], 7)
    assert [len(b.seqs[0].new_blocks) for b in world.drain()] == [1, 0, 1, 0, 0, 0, 1]


def test_nothing_to_do_is_none() -> None:
    world = World()
    assert not world.scheduler.has_work
    assert world.scheduler.schedule() is None


def test_results_come_in_the_order_of_the_steps() -> None:
    world = World()
    world.add("a", [1, 2, 3])
    first, second = world.plan(), world.plan()
    outputs = [world.executor.step(batch) for batch in (first, second)]
    with pytest.raises(EngineError, match="not the oldest in flight"):
        world.scheduler.update(second, outputs[1])
    with pytest.raises(EngineError, match="not the oldest in flight"):
        world.scheduler.update(first, outputs[1])
    world.scheduler.update(first, outputs[0])
    with pytest.raises(EngineError, match="not the oldest in flight"):
        world.scheduler.update(first, outputs[0])
    world.scheduler.update(second, outputs[1])


def test_a_missing_token_is_an_engine_error() -> None:
    world = World()
    world.add("a", [1, 2, 3])
    batch = world.plan()
    with pytest.raises(EngineError, match="sampled tokens of slot 0"):
        world.scheduler.update(batch, StepOutput(batch.step, {}))


# --- order, preemption ---------------------------------------------------------------------------------


def test_when_blocks_run_dry_the_one_that_loses_least_is_preempted_and_resumes() -> None:
    world = World(num_blocks=8, block_size=4, caching=False)
    old = world.add("old", [1] * 7, 12)
    big = world.add("big", [2] * 11, 6)
    small = world.add("small", [3] * 5, 6)
    assert len(world.step().new) == 3
    order = [new.request.id for batch in world.drain() for new in batch.new]
    assert order[0] == "small"
    assert world.scheduler.stats().num_preemptions >= 1
    world.expect(old, big, small)


def test_the_last_in_order_waits_instead_of_taking_from_those_ahead() -> None:
    world = World(num_blocks=4, block_size=4)
    first = world.add("first", [1] * 7, 8)
    second = world.add("second", [2] * 7, 8)
    batches = world.drain()
    assert [new.request.id for b in batches for new in b.new][:2] == ["first", "second"]
    assert world.scheduler.stats().num_preemptions == 1
    ends = list(world.journal.ends)
    assert ends == [("first", 0), ("second", 0)]
    world.expect(first, second)


def test_the_head_of_the_queue_is_not_overtaken() -> None:
    world = World(num_blocks=6, block_size=4)
    world.add("a", [1] * 15, 4)
    world.step()
    world.add("large", [2] * 15, 1)
    world.add("small", [3], 1)
    assert not world.step().new
    batches = world.drain()
    assert [new.request.id for b in batches for new in b.new] == ["large", "small"]


def test_priority_orders_the_queue() -> None:
    world = World(max_num_seqs=1, scheduling_policy="priority")
    for id, priority in (("a", 5), ("b", 5), ("c", -1), ("d", 5)):
        world.add(id, [1], 1, priority=priority)
    assert [new.request.id for b in world.drain() for new in b.new] == ["c", "a", "b", "d"]


def test_fcfs_ignores_priority() -> None:
    world = World(max_num_seqs=1)
    for id, priority in (("a", 5), ("b", 1)):
        world.add(id, [1], 1, priority=priority)
    assert [new.request.id for b in world.drain() for new in b.new] == ["a", "b"]


@pytest.mark.parametrize("options", [{"max_num_seqs": 2}, {"num_blocks": 6}, {"max_num_batched_tokens": 2}])
def test_a_higher_priority_takes_the_place_of_the_lowest(options: dict[str, int]) -> None:
    world = World(scheduling_policy="priority", block_size=4, **options)
    mid = world.add("mid", [1] * 9, 8, priority=1)
    low = world.add("low", [2] * 9, 8, priority=2)
    while len(world.executor.slots) < 2:
        world.step()
    high = world.add("high", [3] * 9, 2, priority=0)
    batch = world.step()
    assert [new.request.id for new in batch.new] == ["high"]
    assert {slot.request.id for slot in world.executor.slots.values()} == {"mid", "high"}
    world.drain()
    world.expect(mid, low, high)


def test_an_equal_priority_preempts_nobody() -> None:
    world = World(scheduling_policy="priority", max_num_seqs=1)
    world.add("a", [1], 8, priority=1)
    world.step()
    world.add("b", [2], 8, priority=1)
    assert not world.step().new
    world.drain()
    assert world.scheduler.stats().num_preemptions == 0


# --- prefix cache --------------------------------------------------------------------------------------


def test_a_second_request_reuses_to_the_token_and_counts_it() -> None:
    world = World(block_size=4)
    first = world.add("a", [1, 2, 3, 4, 5, 6, 7], 1)
    world.drain()
    second = world.add("b", [1, 2, 3, 4, 5, 6, 9, 9], 3)
    batch = world.step()
    assert scheduled(batch) == [(6, 2, True)]
    assert len(batch.copies) == 1
    world.drain()
    world.expect(first, second)
    assert world.journal.ends["b", 0].usage.num_cached == 6
    stats = world.scheduler.stats()
    assert (stats.prefix_queries, stats.prefix_hits, stats.prompt_tokens) == (15, 6, 15)


def test_the_next_turn_reuses_what_was_generated() -> None:
    world = World(block_size=4)
    first = world.add("a", [1, 2, 3], 6)
    world.drain()
    world.add("b", [1, 2, 3, *world.said(first), 5], 2)
    assert scheduled(world.step()) == [(8, 2, True)]  # the last token's KV was never needed


def test_running_sequences_share_their_full_blocks_at_once() -> None:
    world = World(block_size=4)
    world.add("a", [1] * 9, 8)
    world.step()
    world.add("b", [1] * 9, 8)
    assert scheduled(world.step()) == [(9, 1, True), (8, 1, True)]
    assert world.scheduler.stats().num_used_blocks == 4


def test_without_caching_nothing_is_kept() -> None:
    world = World(caching=False)
    world.add("a", [1] * 9, 2)
    world.drain()
    world.add("b", [1] * 9, 2)
    assert scheduled(world.step()) == [(0, 9, True)]
    world.drain()
    stats = world.scheduler.stats()
    assert (stats.num_free_blocks, stats.num_cached_blocks, stats.prefix_queries) == (64, 0, 0)


def test_salts_and_adapters_do_not_share() -> None:
    world = World()
    world.add("a", [1] * 9, 1)
    world.drain()
    for id, options in (("b", {"salt": "x"}), ("c", {"adapter": "x"}), ("d", {"adapter": "", "salt": ""})):
        world.add(id, [1] * 9, 1, **options)
        assert scheduled(world.step()) == [(0, 9, True)]


def test_a_step_has_at_most_so_many_adapters_and_none_is_overtaken() -> None:
    world = World(max_adapters=2)
    made = [
        world.add(str(i), [i + 1] * 3, 4 + i, adapter=name)
        for i, name in enumerate(["a", "b", "c", None, "a", "c"])
    ]
    assert len(world.step().new) == 3, "a, b and the base: c waits, and nothing with an adapter passes it"
    running: set[str | None] = set()
    for _ in range(40):
        batch = world.scheduler.schedule()
        if batch is None:
            break
        world.finish(batch)
        running = {seq.request.adapter for seq in world.scheduler._planner.running} - {None}
        assert len(running) <= 2
    world.expect(*made)


def test_a_copy_that_would_need_the_block_it_reads_is_given_up() -> None:
    world = World(num_blocks=3, block_size=4)
    world.add("a", [1] * 7, 4)
    world.drain()
    made = world.add("b", [1] * 6 + [2] * 5, 1)
    batch = world.step()
    assert not batch.copies
    assert scheduled(batch) == [(4, 7, True)]
    world.expect(made)


# --- parallel samples ----------------------------------------------------------------------------------


@pytest.mark.parametrize("caching", [True, False])
def test_samples_share_the_prompt(caching: bool) -> None:
    world = World(block_size=4, caching=caching, max_num_batched_tokens=8)
    made = world.add("a", [1, 2, 3, 4, 5, 6, 7, 8, 9, 10], 6, n=3)
    assert scheduled(world.step()) == [(0, 8, False)]
    assert scheduled(world.step()) == [(8, 2, True)]
    assert world.scheduler.stats().num_waiting == 2
    batch = world.step()
    assert scheduled(batch) == [(10, 1, True), (9, 1, True), (9, 1, True)]
    assert len(batch.copies) == 2
    assert world.scheduler.stats().num_used_blocks == 5  # two shared, and a last one each
    world.drain()
    world.expect(made)
    assert [world.journal.ends["a", i].usage.num_cached for i in range(3)] == [0, 9, 9]


def test_when_the_leader_is_aborted_another_sample_computes_the_prompt() -> None:
    world = World(max_num_batched_tokens=4, caching=False)
    made = world.add("a", [1, 2, 3, 4, 5, 6], 3, n=3)
    world.step()
    world.journal.take(world.scheduler.abort("a", 0))
    world.scheduler.check()
    assert scheduled(world.step()) == [(0, 4, False)]
    world.drain()
    for index in (1, 2):
        assert world.said(made, index) == alone(made, index, 64)[0]


def test_samples_beyond_the_slots_come_later() -> None:
    world = World(max_num_seqs=2)
    made = world.add("a", [1, 2, 3, 4, 5], 3, n=5)
    world.drain()
    world.expect(made)


# --- prompt logprobs -----------------------------------------------------------------------------------


def test_prompt_logprobs_need_the_whole_prompt_computed() -> None:
    world = World(max_num_batched_tokens=4)
    prompt = [1, 2, 3, 4, 5, 6, 7]
    world.add("a", prompt, 1)
    world.drain()
    made = world.add("b", prompt, 2, prompt_logprobs=0, n=2)
    assert [scheduled(b)[0] for b in world.drain()][:2] == [(0, 4, False), (4, 3, True)]
    assert world.journal.prompt_logprobs["b", 0] == prompt[1:]
    assert world.journal.prompt_logprobs["b", 1] == []
    assert world.scheduler.stats().prefix_queries == 7 + 7  # of a and of b's second sample
    world.expect(made)


@pytest.mark.parametrize("cached", [True, False])
def test_no_sample_speaks_before_the_prompt_has_its_scores(cached: bool) -> None:
    world = World(max_num_batched_tokens=4, target_step_time=1e6)  # so that what is due sooner goes first
    prompt = list(range(1, 14))
    if cached:
        world.add("a", prompt, 1)
        world.drain()
    made = world.add("b", prompt, 3, prompt_logprobs=0, n=3)
    for _ in range(3):
        assert all(item.start < 12 for item in world.step().seqs)
    assert not any(world.journal.tokens.get(("b", index)) for index in (1, 2))
    world.drain()
    world.expect(made)
    other = world.add("c", prompt, 3, prompt_logprobs=0, n=3)
    world.step()
    world.journal.take(world.scheduler.abort("c", 0))  # then nobody has scores to wait for
    world.drain()
    assert [len(world.journal.tokens["c", index]) for index in (1, 2)] == [3, 3]
    assert other.id == "c"


def test_prompt_logprobs_come_once_whatever_is_preempted() -> None:
    world = World(num_blocks=5, block_size=4, scheduling_policy="priority", max_num_batched_tokens=6)
    made = world.add("a", list(range(13)), 2, prompt_logprobs=0, priority=1)
    world.step()
    other = world.add("b", [8] * 12, 4, priority=0)
    world.drain()
    assert world.scheduler.stats().num_preemptions == 1
    assert world.journal.prompt_logprobs["a", 0] == list(range(1, 13))
    world.expect(made, other)


# --- aborts --------------------------------------------------------------------------------------------


def test_abort_while_waiting_running_and_in_flight() -> None:
    world = World(max_num_seqs=2)
    for id in "abc":
        world.add(id, [1, 2, 3], 9)
    batch = world.plan()
    output = world.executor.step(batch)
    (delta,) = world.scheduler.abort("a")
    assert delta.finish_reason is FinishReason.ABORT
    world.scheduler.check()
    assert [d.request_id for d in world.scheduler.update(batch, output)] == ["b"]
    world.scheduler.check()
    assert [d.request_id for d in world.scheduler.abort("c")] == ["c"]
    assert [d.request_id for d in world.scheduler.abort("b")] == ["b"]
    assert world.scheduler.abort("b") == world.scheduler.abort("never seen") == []
    assert not world.scheduler.has_work
    assert world.scheduler.stats().num_used_blocks == world.scheduler.stats().num_waiting_tokens == 0


def test_an_id_can_be_used_again_after_its_end() -> None:
    world = World()
    world.add("a", [1], 1)
    world.drain()
    assert world.scheduler.add(request("a", [1], 1)) == []


def test_reset_forgets_prefixes_but_not_running_sequences() -> None:
    world = World()
    made = world.add("a", [1] * 9, 6)
    world.step()
    world.scheduler.reset_prefix_cache()
    world.scheduler.check()
    world.add("b", [1] * 9, 1)
    assert scheduled(world.step())[1] == (0, 9, True)
    world.drain()
    world.expect(made)


@pytest.mark.parametrize("common", range(1, 12))
def test_the_last_token_of_a_cached_prefix_can_be_computed_again(common: int) -> None:
    """A drafter's KV depends on the next token too. It comes from the block that had the same next token."""
    world = World(recompute_last=True)
    first = list(range(20, 32))
    world.add("a", first, 3)
    world.drain()
    other = [*first[: common - 1], 1, 2]  # a branch that ends one token earlier
    world.add("b", other, 3)
    world.drain()
    world.add("c", [*first[:common], 5, 6, 7], 3)
    batch = world.step()
    assert batch.seqs[0].start == common - 1
    for made in batch.copies:
        assert made[0] >= 0
    world.drain()


@pytest.mark.parametrize("drafted", [False, True])
@pytest.mark.parametrize(
    ("out", "rule", "kept"),
    [
        ([1, 2, 2, 2, 3], {"max_pattern_size": 1, "min_count": 3}, 4),
        ([1, 2, 1, 2, 1, 2, 9], {"max_pattern_size": 2, "min_count": 3}, 6),
        ([2, 2, 2, 1, 2, 1], {"max_pattern_size": 3, "min_pattern_size": 2, "min_count": 2}, 6),
        ([8, 8, 9], {"max_pattern_size": 2, "min_count": 3}, None),  # the prompt does not count
        ([1, 2, 3, 1, 2, 4], {"max_pattern_size": 3, "min_count": 2}, None),
        ([2, 2, 2, 2], {"min_count": 3}, None),
    ],
)
def test_a_repeated_pattern_ends_the_output(
    out: list[int], rule: dict[str, int], kept: int | None, drafted: bool
) -> None:
    made = request("a", [8, 8], 20, repetition_detection=RepetitionDetectionParams(**rule))
    deltas = feed(World(), made, *([out[:1], out[1:]] if drafted else [[token] for token in out[:kept]]))
    assert [token for delta in deltas for token in delta.tokens] == out[:kept]
    assert deltas[-1].finish_reason is (None if kept is None else FinishReason.REPETITION)


def test_a_step_makes_a_bounded_number_of_log_probabilities() -> None:
    world = World(num_blocks=200, max_num_seqs=8)
    scored = world.add("scored", list(range(1, 7)), 4, prompt_logprobs=-1)
    plain = world.add("plain", [7, 8, 9], 4)
    counts = []
    while sum(counts) < 6:
        counts.append(sum(len(seq.tokens) for seq in world.step().seqs if seq.slot == 0))
    assert (max(counts), sum(counts), len(counts)) == (MOST_ENTRIES // (VOCABULARY + 1), 6, 6)
    world.drain()
    world.expect(scored, plain)


def test_few_requests_with_all_log_probabilities_run_at_a_time() -> None:
    world = World(num_blocks=200, max_num_seqs=8)
    wide = [world.add(f"wide {i}", [1, i], 4, logprobs=-1) for i in range(6)]
    plain = [world.add(f"plain {i}", [2, i], 4, logprobs=20) for i in range(4)]
    first = world.step()
    begun = [new.request.id for new in first.new]
    assert sum(name.startswith("wide") for name in begun) <= MOST_ENTRIES // VOCABULARY
    assert sum(name.startswith("plain") for name in begun) == 4
    world.drain()
    world.expect(*wide, *plain)


def test_only_requests_larger_than_the_cache_are_refused_for_memory() -> None:
    world = World(num_blocks=4, block_size=4, max_len=64)
    for number, (length, refused) in enumerate([(15, 0), (16, 1), (40, 2), (64, 2), (0, 2)]):
        world.scheduler.add(request(str(number), [1] * length))
        assert world.scheduler.stats().memory_refusals == refused
