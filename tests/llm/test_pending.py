"""Requests that run while their caller goes on, and outputs as arrays of token ids."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from threading import Event

import numpy as np
import pytest

from quire import LLM, BeamSearchParams, RequestError, SamplingParams
from quire.errors import EngineError, QuireError

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
PROMPTS = [[5, 6, 7, 8], [9, 10]]


@pytest.fixture(scope="module")
def llm(tiny_model: Callable[..., str]) -> Iterator[LLM]:
    with LLM(tiny_model(), max_model_len=64, max_num_seqs=8) as engine:
        yield engine


def waiting(go: Event, **params: object) -> SamplingParams:
    """A request whose second token waits for `go`, so that it runs for as long as a test needs it."""

    def wait(tokens: list[int], logits: object) -> object:
        assert not tokens or go.wait(60)
        return logits

    return SamplingParams(ignore_eos=True, logits_processors=[wait], **params)


def slowly(tokens: list[int], logits: object) -> object:
    time.sleep(0.05)
    return logits


def test_a_pending_output_is_the_whole_one(llm: LLM) -> None:
    wanted = [one.outputs[0].token_ids for one in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]
    pending = [llm.submit(prompt, GREEDY) for prompt in PROMPTS]
    assert [one.result(60).outputs[0].token_ids for one in pending] == wanted
    assert all(one.finished for one in pending)
    updates, go = [], Event()
    for output in llm.submit(PROMPTS[0], waiting(go, temperature=0, max_tokens=8)):
        updates.append(list(output.outputs[0].token_ids))
        go.set()
    assert updates[-1] == wanted[0]
    assert len(updates) > 1
    assert all(a == b[: len(a)] for a, b in pairwise(updates))

    async def both() -> tuple[list[int], list[list[int]]]:
        awaited = await llm.submit(PROMPTS[1], GREEDY)
        seen = [list(output.outputs[0].token_ids) async for output in llm.submit(PROMPTS[1], GREEDY)]
        return awaited.outputs[0].token_ids, seen

    awaited, seen = asyncio.run(both())
    assert awaited == seen[-1] == wanted[1]


def test_a_pending_output_is_refused_or_ended_early(llm: LLM) -> None:
    with pytest.raises(RequestError, match="prompt"):
        llm.submit([1] * 500, GREEDY)
    long = llm.submit(PROMPTS[0], SamplingParams(max_tokens=60, ignore_eos=True, temperature=0))
    long.abort()
    assert len(long.result(60).outputs[0].token_ids) <= 60


def test_pending_outputs_end_with_their_engine(tiny_model: Callable[..., str]) -> None:
    with LLM(tiny_model(), max_model_len=512) as engine:
        slow = SamplingParams(max_tokens=500, ignore_eos=True, logits_processors=[slowly])
        long = engine.submit([5, 6], slow)
    with pytest.raises(EngineError):
        long.result(60)
    with pytest.raises(EngineError):
        list(long)
    with pytest.raises(EngineError, match="was shut down"):
        engine.submit([5, 6], GREEDY)


def test_who_stops_awaiting_does_not_end_it(llm: LLM) -> None:
    go = Event()
    pending = llm.submit(PROMPTS[0], waiting(go, max_tokens=50))

    async def leave() -> None:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(pending.aresult(), 0)

    asyncio.run(leave())
    go.set()
    assert len(pending.result(60).outputs[0].token_ids) == 50


def test_an_error_of_one_ends_it_alone(llm: LLM) -> None:
    def breaks(tokens: list[int], logits: object) -> object:
        raise ValueError("no")

    broken = llm.submit(PROMPTS[0], SamplingParams(max_tokens=8, logits_processors=[breaks]))
    fine = llm.submit(PROMPTS[1], GREEDY)
    with pytest.raises(QuireError, match="failed"):
        broken.result(60)
    assert len(fine.result(60).outputs[0].token_ids) == 8


def test_token_arrays(llm: LLM) -> None:
    found = llm.generate_ids(
        PROMPTS, SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=0), 3
    )
    outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert found.ids.shape == (2, 1, 4 + 8)
    assert found.lengths.tolist() == [[12], [10]]
    for row, output in zip(found.ids[:, 0], outputs, strict=True):
        tokens = [*output.prompt_token_ids, *output.outputs[0].token_ids]
        assert row.tolist() == tokens + [3] * (12 - len(tokens))
    assert (found.cumulative_logprobs < 0).all()
    beams = BeamSearchParams(beam_width=3, max_tokens=5, ignore_eos=True)
    ids = llm.generate_ids(PROMPTS, beams.sampling_params()).ids
    for rows, search in zip(ids, llm.beam_search(PROMPTS, beams), strict=True):
        for row, sequence in zip(rows, search.sequences, strict=True):
            assert row[: len(sequence.tokens)].tolist() == sequence.tokens
    assert llm.generate_ids([], GREEDY).ids.shape == (0, 0, 0)
    assert llm.generate_ids([[1]], SamplingParams(max_tokens=99)).ids.shape == (1, 1, 64)
    assert ids.dtype == np.int32


def test_the_progress_bar_leaves_standard_output_alone(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate(PROMPTS, GREEDY)
    assert capsys.readouterr().out == ""
