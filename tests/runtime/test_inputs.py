"""What a step asks for beside its arrays."""

from __future__ import annotations

from typing import Any

import pytest

from quire import SamplingParams
from quire.runtime.inputs import InputBuilder
from quire.types import NewSeq, Request, ScheduledBatch, ScheduledSeq

GREEDY: dict[str, Any] = {"temperature": 0.0}


def new(slot: int, params: dict[str, Any], **more: Any) -> NewSeq:
    sampling = SamplingParams(**params)
    request = Request(id=str(slot), tokens=[5, 6], sampling=sampling, seed=1, max_tokens=4, **more)
    return NewSeq(slot, request, 0, [5, 6])


def is_greedy(builder: InputBuilder, *news: NewSeq, freed: tuple[int, ...] = ()) -> bool:
    """Whether a step of the news, each a prompt, and of nobody else asks for the largest logits alone."""
    seqs = [ScheduledSeq(n.slot, 0, n.tokens, [], [n.slot], True) for n in news]
    return builder.build(ScheduledBatch(0, list(news), seqs, list(freed), []), {})[0].greedy


@pytest.mark.parametrize(
    ("params", "more"),
    [
        ({}, {}),
        ({**GREEDY, "logprobs": 1}, {}),
        ({**GREEDY, "prompt_logprobs": 1}, {}),
        ({**GREEDY, "min_tokens": 2}, {}),
        (GREEDY, {"bad_words_token_ids": ((1,),)}),
        (GREEDY, {"grammar": "start: /a/"}),
        (GREEDY, {"pooling": "last"}),
    ],
)
def test_a_step_is_greedy_while_all_that_run_are(params: dict[str, Any], more: dict[str, Any]) -> None:
    builder = InputBuilder(4, 8)
    assert is_greedy(builder, new(0, GREEDY), new(1, GREEDY))
    assert not is_greedy(builder, new(2, params, **more))
    assert is_greedy(builder, new(3, GREEDY), freed=(2,))
    assert not is_greedy(builder, new(2, GREEDY), new(3, params, **more), freed=(2, 3))
