"""Drafts never change a result: tokens, log-probabilities and ends equal those without drafts, bit for bit."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from quire import LLM
from quire.runtime.inputs import StepLayout
from quire.runtime.rows import StepRows
from quire.runtime.slots.protocol import Collect
from quire.types import NewSeq, StepOutput
from tests.exactness.requests import PARAMS, make_prompts
from tests.exactness.test_schedule import load, make_chaotic, remembered, results
from tests.tiny import EOS, VOCAB_SIZE

SCHEDULES: dict[str, dict[str, Any]] = {
    "batched": {},
    "two at a time": {"max_num_seqs": 2},  # rows of one slot are sampled in several pieces
    "one at a time": {"max_num_seqs": 1},
    "small budget": {"max_num_batched_tokens": 19, "block_size": 5},
    "preempted": {"num_gpu_blocks_override": 14, "max_model_len": 160},
    "every token sampled": {"enable_jump_forward": False},
    "overlapped": {"async_scheduling": True},
    "overlapped, preempted": {
        "async_scheduling": True,
        "num_gpu_blocks_override": 14,
        "max_model_len": 160,
    },
}
MODELS = ("llama-f32", "mistral-f32-window", "gpt-oss-f32-sinks", "llama-int8-kv-int8")


class Drafter:
    """A slot part that drafts, at random: right tokens, rubbish, right ones and then rubbish, ends, nothing.

    `known` has the whole output of each seed, from a run without drafts.
    """

    greedy = active = True

    def __init__(self, known: dict[int, list[int]], seed: int) -> None:
        self._known = known
        self._rng = random.Random(seed)
        self._outputs: dict[int, tuple[int, int]] = {}  # by slot: the seed, how much of its output there is
        self._drafts: dict[int, list[int]] = {}
        self.drafted = self.longest = 0
        self.accepted: Counter[int] = Counter()  # by seed

    def set(self, new: NewSeq) -> None:
        self._outputs[new.slot] = new.request.seed, len(new.tokens) - len(new.request.tokens)

    def clear(self, slot: int) -> None:
        self._outputs.pop(slot, None)

    def rows(self, step: StepLayout) -> list[int]:
        self._drafts = {seq.slot: seq.draft for seq in step.seqs}
        return []

    def launch(self, rows: StepRows, first: int) -> Collect:
        return self._collect

    def _collect(self, output: StepOutput) -> None:
        for slot, tokens in output.tokens.items():
            seed, count = self._outputs[slot]
            accepted = len(tokens) - output.forced.get(slot, 0) - 1
            self.drafted += len(self._drafts[slot])
            self.accepted[seed] += accepted
            self.longest = max(self.longest, accepted)
            self._outputs[slot] = seed, count + len(tokens)
            draft = self._draft(self._known[seed][count + len(tokens) :])
            if draft:
                output.drafts[slot] = draft

    def _draft(self, right: list[int]) -> list[int]:
        rng, length = self._rng, self._rng.randrange(1, 9)
        rubbish = [rng.randrange(VOCAB_SIZE) for _ in range(length)]
        cut = rng.randrange(length + 1)
        return rng.choice(
            [
                right[:length],
                rubbish,
                (right[:cut] + rubbish)[:length],
                [EOS] * length,
                [*right[:cut], EOS, *rubbish],
                (right + rubbish)[:length],  # goes on behind the end
                [],
            ]
        )


def drafting(llm: LLM, known: dict[int, list[int]], seed: int) -> Drafter:
    """Make `llm` draft from now on."""
    drafter = Drafter(known, seed)
    llm._core._executor.parts.append(drafter)
    return drafter


@pytest.fixture(scope="module")
def plain(tiny_model: Callable[..., str]) -> Callable[[str], list[Any]]:
    """The results of each model without drafts."""
    return remembered(tiny_model, make_prompts(), PARAMS)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("model", MODELS)
def test_drafts_change_nothing(
    model: str, schedule: str, tiny_model: Callable[..., str], plain: Callable[[str], list[Any]]
) -> None:
    wanted = plain(model)
    known = {
        params.seed: list(outputs[0].token_ids)
        for params, (_, outputs) in zip(PARAMS, wanted, strict=True)
        if params.seed is not None
    }
    llm = load(tiny_model, model, **SCHEDULES[schedule])
    drafter = drafting(llm, known, seed=len(schedule))
    for _ in range(2):
        assert results(llm, make_prompts(), PARAMS) == wanted
    long = [seed for seed, output in known.items() if len(output) >= 12 and seed != 16]  # 16 is all forced
    if "overlapped" in schedule:  # some drafts come too late, perhaps all of a sequence that is mostly forced
        assert drafter.accepted.total() > 200
    else:
        assert min(drafter.accepted[seed] for seed in long) > 0, "the drafter was to be right now and then"
    assert drafter.drafted - drafter.accepted.total() > 100, "the drafter was to be wrong often"
    assert drafter.longest > 4
    if schedule == "preempted":
        assert llm.stats().num_preemptions > 0


@pytest.mark.parametrize("model", MODELS)
def test_drafts_cut_anywhere_change_nothing(
    model: str, tiny_model: Callable[..., str], plain: Callable[[str], list[Any]]
) -> None:
    wanted = plain(model)
    known = {
        params.seed: list(outputs[0].token_ids)
        for params, (_, outputs) in zip(PARAMS, wanted, strict=True)
        if params.seed is not None
    }
    llm = load(tiny_model, model)
    make_chaotic(llm, seed=1)
    drafter = drafting(llm, known, seed=1)
    assert results(llm, make_prompts(), PARAMS) == wanted
    assert drafter.accepted.total() > 0
