"""Each proposer in each schedule: tokens, log-probabilities and ends equal those without speculation, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest

from quire import SamplingParams
from quire.engine.feature import Features
from quire.params import BeamRules
from quire.spec_decode.proposer import Draft, Proposer, SpecSequence, StepView
from tests.exactness.requests import PARAMS, make_prompts
from tests.exactness.test_schedule import load, remembered, results

SCHEDULES: dict[str, dict[str, Any]] = {
    "batched": {},
    "two at a time": {"max_num_seqs": 2},
    "small budget": {"max_num_batched_tokens": 19, "block_size": 5},
    "preempted": {"num_gpu_blocks_override": 14, "max_model_len": 160},
    "overlapped, preempted": {
        "async_scheduling": True,
        "num_gpu_blocks_override": 14,
        "max_model_len": 160,
    },
}
PROPOSERS: dict[str, dict[str, Any]] = {
    "ngram": {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 4, "num_speculative_tokens": 4},
    "suffix": {"method": "suffix", "suffix_decoding_min_token_prob": 0.0},
    "draft model": {"model": "qwen2", "num_speculative_tokens": 3},
    "itself": {"model": "llama", "num_speculative_tokens": 3},
}
# Several samples of one prompt, and text that repeats itself as random models do when greedy.
MORE = [
    SamplingParams(seed=20, n=3, max_tokens=20, temperature=0.9, logprobs=1),
    SamplingParams(seed=21, max_tokens=90, temperature=0.0, ignore_eos=True),
    SamplingParams(seed=22, max_tokens=60, temperature=0.2, frequency_penalty=-0.5, ignore_eos=True),
]
EACH = PARAMS + MORE
PROMPTS = [*make_prompts(), [7, 8, 9], [5, 6] * 12, [40, 41, 42, 43] * 8]


@pytest.fixture(scope="module")
def plain(tiny_model: Callable[..., str]) -> Callable[[str], list[Any]]:
    """The results of each model without speculation."""
    return remembered(tiny_model, PROMPTS, EACH)


def options_of(proposer: str, tiny_model: Callable[..., str]) -> dict[str, Any]:
    """The proposer's options; draft models are made on the spot."""
    options = dict(PROPOSERS[proposer])
    if "model" in options:
        options["model"] = tiny_model(options["model"])
    return options


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("proposer", PROPOSERS)
@pytest.mark.parametrize("adaptive", [True, False], ids=["adaptive", "pinned"])
def test_speculation_changes_nothing(
    schedule: str,
    proposer: str,
    adaptive: bool,
    tiny_model: Callable[..., str],
    plain: Callable[[str], list[Any]],
) -> None:
    options = {**options_of(proposer, tiny_model), "adaptive": adaptive}
    llm = load(tiny_model, "llama-f32", speculative_config=options, **SCHEDULES[schedule])
    for _ in range(2):
        assert results(llm, PROMPTS, EACH) == plain("llama-f32")
    stats = llm.stats()
    if not adaptive:
        assert stats.spec_accepted_tokens > 0
        assert proposer == "itself" or stats.spec_accepted_tokens < stats.spec_draft_tokens
        assert sum(stats.spec_accepted_per_pos) == stats.spec_accepted_tokens
    if "preempted" in schedule:
        assert stats.num_preemptions > 0


@pytest.mark.parametrize("model", ["llama-int8-kv-int8", "gpt-oss-f32-sinks"])
def test_other_models(model: str, tiny_model: Callable[..., str], plain: Callable[[str], list[Any]]) -> None:
    options = {**PROPOSERS["ngram"], "adaptive": False}
    llm = load(tiny_model, model, speculative_config=options)
    assert results(llm, PROMPTS, EACH) == plain(model)
    assert llm.stats().spec_accepted_tokens > 0


CHANGES: list[Callable[[list[int]], list[int]]] = [
    lambda tokens: tokens,
    lambda tokens: tokens[: len(tokens) // 2] + tokens[len(tokens) // 2 + 3 :],
    lambda tokens: [*tokens[:5], 1, 2, *tokens[5:]],
    lambda tokens: [1],
]


def predicting(params: SamplingParams, prediction: list[int]) -> SamplingParams:
    return msgspec.structs.replace(params, prediction=prediction)


def test_predictions_change_nothing(
    tiny_model: Callable[..., str], plain: Callable[[str], list[Any]]
) -> None:
    """Right predictions, predictions with a part cut out or put in, and rubbish."""
    wanted = plain("llama-f32")
    llm = load(tiny_model, "llama-f32")
    next(gate for gate in llm._core.gates if isinstance(gate, Features)).join("spec_decode")
    llm._core._executor.parts[-1].controller.adaptive = False  # so that times do not count
    outputs = [list(outputs[0].token_ids) for _, outputs in wanted]
    for number, change in enumerate(
        (
            lambda t: t,
            lambda t: t[: len(t) // 2] + t[len(t) // 2 + 3 :],
            lambda t: [*t[:5], 1, 2, *t[5:]],
            lambda t: [1],
        )
    ):
        before = llm.stats()
        each = [predicting(params, change(tokens)) for params, tokens in zip(EACH, outputs, strict=True)]
        assert results(llm, PROMPTS, each) == wanted
        stats = llm.stats()
        if number == 0:
            assert stats.num_steps - before.num_steps < 40
            assert stats.spec_accepted_tokens > 300


def test_requests_can_opt_out(tiny_model: Callable[..., str], plain: Callable[[str], list[Any]]) -> None:
    llm = load(tiny_model, "llama-f32", speculative_config={**PROPOSERS["ngram"], "adaptive": False})
    each = [msgspec.structs.replace(params, speculative_decoding=False, prediction=[1, 2]) for params in EACH]
    assert results(llm, PROMPTS, each) == plain("llama-f32")
    assert llm.stats().spec_drafts == 0


def test_a_model_that_drafts_for_itself_is_always_right(
    tiny_model: Callable[..., str], plain: Callable[[str], list[Any]]
) -> None:
    """It has the target's noise, penalties and limits, so that it draws the same tokens, at any temperature."""
    llm = load(
        tiny_model, "llama-f32", speculative_config=options_of("itself", tiny_model) | {"adaptive": False}
    )
    for number, params in enumerate(EACH):
        if params.structured_outputs is None:  # what a grammar forbids is not drawn by the target
            before = llm.stats()
            assert results(llm, [PROMPTS[number]], [params]) == [plain("llama-f32")[number]]
            stats = llm.stats()
            drafted = stats.spec_draft_tokens - before.spec_draft_tokens
            assert stats.spec_accepted_tokens - before.spec_accepted_tokens >= drafted - 3 * params.n, params


@pytest.mark.parametrize("proposer", ["ngram", "suffix", "itself"])
def test_beams_are_those_without_speculation(proposer: str, tiny_model: Callable[..., str]) -> None:
    """Beams fork, drop and continue sequences while others in the batch are drafted for."""
    options = options_of(proposer, tiny_model) | {"adaptive": False}
    sampled = [SamplingParams(seed=seed, max_tokens=40, temperature=0.3, ignore_eos=True) for seed in (1, 2)]
    each = [
        SamplingParams(n=3, beam=BeamRules(beam_width=3), max_tokens=20, logprobs=0, ignore_eos=True),
        *sampled,
        SamplingParams(n=2, beam=BeamRules(beam_width=4), max_tokens=30, logprobs=0),
    ]
    prompts = [[7, 8, 9], [5, 6] * 12, [40, 41, 42, 43] * 8, [1, 2, 3] * 9]
    wanted = results(load(tiny_model, "llama-f32"), prompts, each)
    llm = load(tiny_model, "llama-f32", speculative_config=options)
    for _ in range(2):
        assert results(llm, prompts, each) == wanted
    assert llm.stats().spec_accepted_tokens > 0
    llm._core.scheduler.check()


class Checking(Proposer):
    """Proposes nothing, and compares the tokens of each sequence with those that it is known to have."""

    def __init__(self, known: dict[tuple[int, int], list[int]]) -> None:
        self._known = known
        self.seen = 0

    def propose(self, asks: Sequence[tuple[SpecSequence, int]], step: StepView) -> list[Draft]:
        for seq, _ in asks:
            whole = seq.request.tokens + self._known[seq.request.seed, seq.index]
            assert seq.tokens.tolist() == whole[: len(seq.tokens)]
            self.seen += 1
        return [Draft() for _ in asks]


@pytest.mark.parametrize("schedule", ["batched", "overlapped, preempted"])
def test_tokens_are_known_after_steps_without_drafts(
    schedule: str, tiny_model: Callable[..., str], plain: Callable[[str], list[Any]]
) -> None:
    """The part rests where looking for drafts takes long, and takes in later what it missed."""
    llm = load(tiny_model, "llama-f32", speculative_config=PROPOSERS["ngram"], **SCHEDULES[schedule])
    part = llm._core._executor.parts[-1]
    known = {
        (params.seed, output.index): list(output.token_ids)
        for params, (_, outputs) in zip(EACH, plain("llama-f32"), strict=True)
        if params.seed is not None
        for output in outputs
    }
    part._proposer = checking = Checking(known)
    asleep = part.controller.asleep
    naps = []

    def watched(num_seqs: int) -> bool:
        naps.append(asleep(num_seqs))
        return naps[-1]

    part.controller.asleep = watched
    part.controller.record_overhead = lambda seconds: None
    part.controller._overhead = 4e-5  # rests for a few steps
    assert results(llm, PROMPTS, EACH) == plain("llama-f32")
    assert checking.seen > 5
    assert any(naps)
