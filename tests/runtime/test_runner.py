"""Steps given to a runner one by one and ahead of their results."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.errors import EngineError
from quire.runtime.runner import Runner
from quire.types import UNSEEN, NewSeq, Request, ScheduledBatch, ScheduledSeq, StepOutput

PROMPTS = [[5, 6, 7, 8, 9], [40, 41, 42]]
PARAMS = [SamplingParams(temperature=0, max_tokens=9), SamplingParams(repetition_penalty=1.3, logprobs=2)]


@pytest.fixture
def runner(tiny_model: Callable[..., str]) -> Iterator[Runner]:
    runner = LLM(tiny_model("llama"), max_model_len=64, block_size=16)._core._executor
    yield runner
    runner.shutdown()


def start(step: int = 1, slots: tuple[int, ...] = (0, 1), **more: Any) -> ScheduledBatch:
    """A batch that computes the prompts and samples."""
    new = [
        NewSeq(
            slot,
            Request(id=str(i), tokens=prompt, sampling=params, seed=3, max_tokens=40, **more),
            0,
            list(prompt),
        )
        for i, (slot, prompt, params) in enumerate(zip(slots, PROMPTS, PARAMS, strict=False))
    ]
    seqs = [ScheduledSeq(n.slot, 0, n.tokens, [], [2 * n.slot, 2 * n.slot + 1], True) for n in new]
    return ScheduledBatch(step, new, seqs, [], [])


def decode(step: int, ends: dict[int, int], tokens: dict[int, int], freed: list[int]) -> ScheduledBatch:
    """A batch that computes one token of each slot, at position `ends`."""
    seqs = [ScheduledSeq(slot, end, [tokens[slot]], [], [], True) for slot, end in ends.items()]
    return ScheduledBatch(step, [], seqs, freed, [])


def plain(runner: Runner, steps: int) -> list[StepOutput]:
    outputs = [runner.execute(start())]
    for step in range(steps):
        ends = {slot: len(prompt) + step for slot, prompt in enumerate(PROMPTS)}
        tokens = {slot: sampled[-1] for slot, sampled in outputs[-1].tokens.items()}
        outputs.append(runner.execute(decode(step + 2, ends, tokens, [])))
    return outputs


def test_unseen_tokens_are_those_that_were_sampled(runner: Runner, tiny_model: Callable[..., str]) -> None:
    ahead = [runner.submit(start())]
    for step in range(6):
        ends = {slot: len(prompt) + step for slot, prompt in enumerate(PROMPTS)}
        ahead.append(runner.submit(decode(step + 2, ends, {0: UNSEEN, 1: UNSEEN}, [])))
    found = [future.result() for future in ahead]
    other = LLM(tiny_model("llama"), max_model_len=64, block_size=16)._core._executor
    assert found == plain(other, 6)
    assert len({output.tokens[1][0] for output in found}) > 1


def test_a_reader_may_change_what_it_was_given(runner: Runner) -> None:
    output = runner.submit(start()).result()
    wanted = output.tokens[0][0]
    output.tokens[0] += [1, 2, 3]
    ends = {0: 5, 1: 3}
    first = runner.submit(decode(2, ends, {0: UNSEEN, 1: UNSEEN}, [])).result()
    assert first.tokens == runner_after(runner, wanted, output.tokens[1][0])


def runner_after(runner: Runner, *tokens: int) -> dict[int, list[int]]:
    """The second step's tokens, by the plain loop in other slots."""
    runner.execute(start(slots=(2, 3)))
    output = runner.execute(decode(2, {2: 5, 3: 3}, dict(zip((2, 3), tokens, strict=True)), []))
    return {slot - 2: sampled for slot, sampled in output.tokens.items()}


def test_what_was_never_sampled_cannot_be_filled_in(runner: Runner) -> None:
    batch = start()
    unseen = ScheduledSeq(0, 0, [5, UNSEEN], [], [0, 1], True)
    future = runner.submit(ScheduledBatch(1, batch.new, [unseen], [], []))
    with pytest.raises(EngineError, match="1 unseen tokens"):
        future.result()


def test_a_slot_that_failed_goes_on_without_harm_to_others(runner: Runner) -> None:
    """Its next step was scheduled before the error was seen; then the slot is freed and used again."""
    batch = start()
    batch.new[0] = NewSeq(
        0,
        Request(
            id="0",
            tokens=PROMPTS[0],
            sampling=SamplingParams(allowed_token_ids=[7], logit_bias={7: 1.0}),
            seed=3,
            max_tokens=9,
            bad_words_token_ids=((7,),),
        ),
        0,
        list(PROMPTS[0]),
    )
    futures = [runner.submit(batch)]
    futures.append(runner.submit(decode(2, {0: 5, 1: 3}, {0: UNSEEN, 1: UNSEEN}, [])))
    again = ScheduledBatch(3, start().new[:1], start().seqs[:1], [0], [])
    futures.append(runner.submit(again))
    first, second, third = (future.result() for future in futures)
    assert "every token is forbidden" in first.errors[0]
    assert first.errors == second.errors
    assert 0 not in first.tokens
    assert 0 not in second.tokens
    assert len(second.tokens[1]) == 1
    assert not third.errors
    assert len(third.tokens[0]) == 1


def test_an_exception_goes_into_the_future_and_shutdown_ends_the_thread(runner: Runner) -> None:
    beyond = ScheduledBatch(1, start().new, [ScheduledSeq(0, 0, [10**6], [], [0], True)], [], [])
    with pytest.raises(EngineError, match="token id"):
        runner.submit(beyond).result()
    runner.shutdown()
    runner.shutdown()
    with pytest.raises(RuntimeError):
        runner.submit(start())
