"""Outputs that were stopped go on as if they had not been."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.client.outputs import RequestOutput
from quire.errors import RequestError
from quire.params import StructuredOutputsParams

STORY = "Once upon a time, there was a"
KINDS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"n": 3, "top_p": 0.9},
    {"presence_penalty": 1.5, "frequency_penalty": 1.0, "repetition_penalty": 1.3},
    {"min_tokens": 20, "bad_words": ["the"]},
    {"stop": ["e", " day"], "n": 3},
    {"structured_outputs": StructuredOutputsParams(regex="[a-z ]{5,30}\\.")},
    {"structured_outputs": StructuredOutputsParams(choice=["yes", "no way"]), "n": 2},
    {"max_tokens": 200},
]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(threads=1, max_model_len=512) as made:
        yield made


def stopped(output: RequestOutput, count: int) -> RequestOutput:
    """The output as it was when each sample had at most `count` tokens."""
    samples = []
    for sample in output.outputs:
        if len(sample.token_ids) <= count:
            samples.append(sample)
        else:
            samples.append(
                replace(sample, token_ids=sample.token_ids[:count], finish_reason=None, stop_reason=None)
            )
    return replace(output, outputs=samples)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_an_output_goes_on_as_if_it_had_not_been_stopped(kind: dict[str, Any], llm: LLM) -> None:
    params = SamplingParams(**{"max_tokens": 24, "seed": 7, "temperature": 1, **kind})
    (whole,) = llm.generate([STORY], params, use_tqdm=False)
    for count in (0, 1, 2, 5, 13, 23, 300):
        (again,) = llm.resume(stopped(whole, count), params, use_tqdm=False)
        assert again.outputs == whole.outputs, count


def test_several_go_on_together(llm: LLM) -> None:
    params = SamplingParams(max_tokens=20, seed=3, n=2)
    whole = llm.generate([STORY, "A dog", "The"], params, use_tqdm=False)
    again = llm.resume([stopped(one, count) for one, count in zip(whole, (4, 99, 0), strict=True)], params)
    assert [one.outputs for one in again] == [one.outputs for one in whole]


def test_what_cannot_come_from_the_parameters_is_refused(llm: LLM) -> None:
    params = SamplingParams(max_tokens=8, seed=3)
    (whole,) = llm.generate([STORY], params, use_tqdm=False)
    with pytest.raises(RequestError, match="has all its tokens"):
        llm.resume(replace(whole, outputs=[replace(whole.outputs[0], finish_reason=None)]), params)
    with pytest.raises(RequestError, match="log-probabilities"):
        llm.resume(stopped(whole, 2), SamplingParams(max_tokens=8, logprobs=1))
    with pytest.raises(RequestError, match="n is 1"):
        llm.resume(replace(whole, outputs=whole.outputs * 2), params)
