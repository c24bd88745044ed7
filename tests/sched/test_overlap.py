"""Steps in flight: what is planned before results are known, what waits for them, and that results stay the same."""

from __future__ import annotations

import random
from typing import Any

import pytest
from fake_executor import VOCAB, FakeExecutor, Journal, Loop, alone, drain, request

from quire.config import SchedulerConfig
from quire.params import OutputKind
from quire.sched import Scheduler
from quire.types import UNSEEN, Delta, FinishReason, Request


def world(depth: int, **options: Any) -> tuple[Loop, Journal]:
    options = {
        "num_blocks": 64,
        "block_size": 4,
        "max_len": 64,
        "draft_rate": 0.0,
        "caching": True,
        **options,
    }
    limits = {k: options[k] for k in ("max_num_seqs", "max_num_batched_tokens") if k in options}
    scheduler = Scheduler(
        SchedulerConfig(**limits),
        options["num_blocks"],
        options["block_size"],
        options["max_len"],
        options["caching"],
        stages=options.get("stages", 1),
    )
    executor = FakeExecutor(
        options["num_blocks"], options["block_size"], random.Random(0), options["draft_rate"]
    )
    return Loop(scheduler, executor, depth), Journal()


def inputs(batch: Any) -> dict[int, list[int]]:
    return {item.start: item.tokens for item in batch.seqs}


def test_a_step_names_the_token_that_the_step_before_samples() -> None:
    loop, journal = world(3)
    loop.scheduler.add(request("a", [1, 2, 3], 9))
    batches = [loop.plan(), loop.plan(), loop.plan()]
    assert [inputs(batch) for batch in batches] == [{0: [1, 2, 3]}, {3: [UNSEEN]}, {4: [UNSEEN]}]
    journal.take(loop.take())
    said = journal.tokens["a", 0]
    assert inputs(loop.plan()) == {5: [UNSEEN]}
    journal.take(loop.take())
    assert len(said) == 2


def test_no_step_is_planned_beyond_the_last_token() -> None:
    loop, journal = world(3)
    made = request("a", [1, 2, 3], 2)
    loop.scheduler.add(made)
    assert loop.plan()
    assert loop.plan()
    assert loop.plan() is None  # the second step samples the last token
    journal.take(loop.take())
    journal.take(loop.take())
    assert not loop.scheduler.has_work
    assert journal.ends["a", 0].finish_reason is FinishReason.LENGTH


def test_the_result_of_a_step_after_the_end_is_dropped() -> None:
    loop, journal = world(2)
    first = alone(request("a", [1, 2, 3], 9), 0, 64)[0][0]
    loop.scheduler.add(request("a", [1, 2, 3], 9, stop_token_ids=[first]))
    assert loop.plan()
    assert loop.plan()
    journal.take(loop.take())
    assert journal.ends["a", 0].stop_reason == first
    assert loop.scheduler.stats().num_used_blocks == 0
    assert loop.scheduler.has_work  # a result is still to come
    assert loop.take() == []
    assert not loop.scheduler.has_work
    loop.scheduler.add(request("b", [1, 2, 3, first, 5], 1))
    batch = loop.plan()
    assert batch is not None
    assert batch.seqs[0].start == 3  # as without overlap: the KV of the last token is not kept


def test_a_constrained_sequence_waits_for_its_result_and_others_go_on() -> None:
    loop, journal = world(2)
    loop.scheduler.add(request("grammar", [1, 2, 3], 9, grammar="any"))
    loop.scheduler.add(request("free", [4, 5], 9))
    first = loop.plan()
    assert first is not None
    slot = first.seqs[0].slot
    assert [item.slot for item in first.seqs] == [slot, first.seqs[1].slot]
    assert inputs(loop.plan()) == {2: [UNSEEN]}
    journal.take(loop.take())
    third = loop.plan()
    assert third is not None
    assert [(item.slot == slot, UNSEEN in item.tokens) for item in third.seqs] == [
        (True, False),
        (False, True),
    ]


def test_a_draft_in_flight_waits_for_its_result_alone() -> None:
    loop, journal = world(2)
    loop.scheduler.add(request("a", [1, 2, 3], 30))
    loop.scheduler.add(request("b", [4, 5, 6], 30))
    slot = loop.plan().seqs[0].slot  # type: ignore[union-attr]
    loop.plan()
    loop.flight[0][1].drafts[slot] = [7, 7]  # comes too late for the second step, so it is dropped
    journal.take(loop.take())
    batch = loop.plan()
    assert all(item.slot != slot for item in batch.seqs)  # type: ignore[union-attr]
    loop.flight[0][1].drafts[slot] = [7, 7, 7]
    journal.take(loop.take())
    (item,) = [item for item in loop.plan().seqs if item.slot == slot]  # type: ignore[union-attr]
    assert (UNSEEN in item.tokens, item.draft) == (False, [7, 7, 7])
    assert loop.executor.slots[slot].request.id == "a"


def test_a_preempted_sequence_takes_along_the_token_in_flight() -> None:
    loop, journal = world(2, num_blocks=5, caching=False)
    requests = [request("a", [1] * 7, 9), request("b", [2] * 6, 9)]
    for made in requests:
        loop.scheduler.add(made)
    drain(loop.scheduler, loop.executor, journal, depth=2)
    assert loop.scheduler.stats().num_preemptions > 0
    for made in requests:
        assert journal.tokens[made.id, 0] == alone(made, 0, 20)[0]


def test_samples_share_a_prompt_that_is_in_flight() -> None:
    loop, journal = world(2, caching=False)
    made = request("a", [1, 2, 3, 4, 5, 6], 5, n=3)
    loop.scheduler.add(made)
    loop.plan()
    batch = loop.plan()
    assert batch is not None
    assert [item.start for item in batch.seqs] == [6, 5, 5]
    while loop.flight:
        journal.take(loop.take())
        loop.plan()
    for index in range(3):
        assert journal.tokens["a", index] == alone(made, index, 64)[0]
        assert journal.ends["a", index].usage.num_cached == (5 if index else 0)


def traffic(rng: random.Random) -> list[Request]:
    """Requests that arrive together; some begin alike."""
    prompts = [[rng.randrange(VOCAB) for _ in range(rng.randint(3, 30))] for _ in range(3)]
    made = []
    for i in range(12):
        prompt = rng.choice(prompts)
        prompt = prompt[: rng.randint(1, len(prompt))] + [
            rng.randrange(VOCAB) for _ in range(rng.randint(0, 4))
        ]
        made.append(
            request(
                f"r{i}",
                prompt,
                rng.randint(1, 20),
                n=rng.choice([1, 1, 3]),
                seed=rng.randrange(5),
                eos_token_ids=rng.choice([(), (0,)]),
                stop_token_ids=rng.choice([(), (1,)]),
                prompt_logprobs=rng.choice([None, 1]),
                logprobs=rng.choice([None, 1]),
                output_kind=rng.choice(list(OutputKind)),
            )
        )
    return made


def run(requests: list[Request], depth: int, **options: Any) -> dict[tuple[str, int], Delta]:
    """All that is reported of each sample."""
    loop, journal = world(depth, **options)
    for made in requests:
        loop.scheduler.add(made)
    drain(loop.scheduler, loop.executor, journal, depth)
    for first, *others in journal.deltas.values():
        for delta in others:
            first.join(delta)
    return {key: deltas[0] for key, deltas in journal.deltas.items()}


@pytest.mark.parametrize("seed", range(12))
def test_results_are_those_of_the_plain_loop(seed: int) -> None:
    """Cached tokens included, if no request waits for the end of another."""
    requests = traffic(random.Random(seed))
    options = {"num_blocks": 600, "max_num_seqs": 64, "max_num_batched_tokens": 40 + seed}
    plain = run(requests, 1, **options)
    for depth in (2, 3):
        assert run(requests, depth, **options) == plain


def test_stages_have_other_sequences_in_each_batch() -> None:
    loop, journal = world(3, stages=3, max_num_batched_tokens=64)
    made = [request(f"r{i}", [i + 1, 2, 3], 9) for i in range(7)]
    for one in made:
        loop.scheduler.add(one)
    while loop.scheduler.has_work:
        while loop.plan():
            pass
        in_flight = [item.slot for batch, _ in loop.flight for item in batch.seqs]
        assert len(set(in_flight)) == len(in_flight), "a sequence is in two batches"
        if len(loop.scheduler.running_ids) == len(made) and len(journal.tokens) == len(made):
            assert [len(batch.seqs) <= 3 for batch, _ in loop.flight] == [True] * 3
        journal.take(loop.take())
    for one in made:
        assert journal.tokens[one.id, 0] == alone(one, 0, 64)[0]


@pytest.mark.parametrize("draft_rate", [0.0, 0.7])
@pytest.mark.parametrize("seed", range(6))
def test_results_of_stages_are_those_of_the_plain_loop(seed: int, draft_rate: float) -> None:
    requests = traffic(random.Random(seed))
    limits = {"num_blocks": 20, "max_num_seqs": 5, "max_num_batched_tokens": 20}
    found = [run(requests, 1, draft_rate=draft_rate, **limits)]
    found += [
        run(requests, n, draft_rate=draft_rate, stages=stages, **limits) for n, stages in ((2, 2), (4, 3))
    ]
    for deltas in found:
        for delta in deltas.values():
            delta.usage.num_cached = delta.usage.num_accepted = delta.usage.num_rejected = 0
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("draft_rate", [0.0, 0.7])
@pytest.mark.parametrize("seed", range(12))
def test_results_are_those_of_the_plain_loop_when_blocks_and_slots_run_dry(
    seed: int, draft_rate: float
) -> None:
    requests = traffic(random.Random(seed))
    found = []
    for depth in (1, 2, 3):
        limits = {"num_blocks": 20, "max_num_seqs": 5, "max_num_batched_tokens": 20}
        found.append(run(requests, depth, draft_rate=draft_rate, **limits))
        for delta in found[-1].values():
            delta.usage.num_cached = 0  # depends on what has ended when a request is admitted
            delta.usage.num_accepted = delta.usage.num_rejected = 0  # a draft may come too late
    assert found[0] == found[1] == found[2]
