"""Selecting a choice by its log-probability: equal to scoring each by hand, offline and over the scheduler's events."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from quire import LLM, SamplingParams
from quire.errors import RequestError
from quire.params import StructuredOutputsParams
from quire.program.selection import MAX_LIVE
from quire.types import FinishReason

CHOICES = ["the park", " a big red ball", " sad", "purple elephants of the night"]
PROMPT = "Once upon a time, there was a little girl named Lily. She found"


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM()


def selecting(choices: list[str], **more: object) -> SamplingParams:
    return SamplingParams(structured_outputs=StructuredOutputsParams(choice=choices, select=True), **more)  # type: ignore[arg-type]


def by_hand(llm: LLM, prompt: str, choices: list[str]) -> tuple[str, list[float]]:
    """Each choice behind the prompt in a request of its own, its tokens' log-probabilities averaged."""
    tokenizer = llm.get_tokenizer()
    assert tokenizer is not None
    start, means = tokenizer.encode(prompt), []
    for choice in choices:
        tokens = [*start, *tokenizer.encode(choice, add_special_tokens=False)]
        params = SamplingParams(max_tokens=1, prompt_logprobs=0)
        (output,) = llm.generate({"prompt_token_ids": tokens}, params, use_tqdm=False)
        rows = list(zip(tokens, output.prompt_logprobs or [], strict=True))[len(start) :]
        scores = [row[token].logprob for token, row in rows if row is not None]
        means.append(sum(scores) / len(scores))
    return choices[means.index(max(means))], means


def test_the_likeliest_choice_wins(llm: LLM) -> None:
    best, means = by_hand(llm, PROMPT, CHOICES)
    (output,) = llm.generate(PROMPT, selecting(CHOICES, logprobs=1), use_tqdm=False)
    (sample,) = output.outputs
    assert sample.text == best
    assert sample.finish_reason == "stop"
    assert sample.cumulative_logprob is not None
    assert sample.cumulative_logprob / len(sample.token_ids) == pytest.approx(max(means), abs=1e-6)


@pytest.mark.parametrize("order", [CHOICES, CHOICES[::-1]], ids=["given", "reversed"])
def test_order_company_and_a_warm_cache_do_not_matter(llm: LLM, order: list[str]) -> None:
    best, _ = by_hand(llm, PROMPT, CHOICES)
    params = [selecting(order), SamplingParams(max_tokens=20, temperature=0), selecting(order)]
    outputs = llm.generate([PROMPT] * 3, params, use_tqdm=False)
    assert [o.outputs[0].text for o in (outputs[0], outputs[2])] == [best, best]
    assert len(outputs[1].outputs[0].token_ids) == 20
    assert llm.stats().num_used_blocks == 0


def test_one_choice_and_equal_choices(llm: LLM) -> None:
    for choices in ([" sad"], [" sad", " sad"]):
        (output,) = llm.generate(PROMPT, selecting(choices), use_tqdm=False)
        assert output.outputs[0].text == " sad"


def test_the_prompt_is_computed_once(llm: LLM) -> None:
    llm.reset_prefix_cache()
    scheduled: list[int] = []
    llm._core.on_batch = lambda batch: scheduled.extend(len(seq.tokens) for seq in batch.seqs)
    (output,) = llm.generate(PROMPT * 5, selecting(CHOICES), use_tqdm=False)
    llm._core.on_batch = None
    assert sum(scheduled) < 2 * len(output.prompt_token_ids)


def test_many_choices_leave_slots_to_others(llm: LLM) -> None:
    core = llm._core
    core.add(llm._front.request("select", PROMPT, selecting([f" choice {i}" for i in range(40)])))
    most, ended = 0, False
    while not ended:
        ended = any(delta.finish_reason is not None for delta in core.step())
        most = max(most, core.stats().num_running + core.stats().num_waiting)
    assert 1 < most <= MAX_LIVE


def test_an_abort_ends_all_readers(llm: LLM) -> None:
    core = llm._core
    request = llm._front.request("select", PROMPT, selecting(CHOICES))
    for steps in range(2):
        core.add(request)
        for _ in range(steps):
            assert core.step() == []
        core.abort("select")
        ends = [delta for delta in core.step() if delta.finish_reason is not None]
        assert [(d.request_id, d.finish_reason) for d in ends] == [("select", FinishReason.ABORT)]
        while core.has_work:
            assert core.step() == []
        assert llm.stats().num_used_blocks == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda: selecting(["a"], n=2), "n must be 1"),
        (lambda: selecting([" sad " * 600]), "fit into"),
    ],
)
def test_refused(llm: LLM, change: Callable[[], SamplingParams], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        llm.generate(PROMPT, change(), use_tqdm=False)
