"""Models with recurrent states: what is said depends on the request alone, whatever is shared, copied or taken back."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from quire import LLM, SamplingParams, StructuredOutputsParams
from quire.client.beams import BeamSearchParams
from tests.model.tiny_models import make_model
from tests.tiny import write_checkpoint, write_tokenizer

BACKEND = "native"
BASE: dict[str, Any] = {
    "backend": BACKEND,
    "threads": 2,
    "max_model_len": 400,
    "kv_cache_memory_bytes": 1 << 22,
    "max_num_seqs": 8,
}
SCHEDULES: dict[str, dict[str, Any]] = {
    "batched": {},
    "chunks of 7": {"max_num_batched_tokens": 7},
    "blocks of 5": {"block_size": 5},
    "overlapped": {"async_scheduling": True},
    "two at a time": {"max_num_seqs": 2},
    "preempted": {"num_gpu_blocks_override": 26},
    "overlapped, preempted, small blocks": {
        "async_scheduling": True,
        "num_gpu_blocks_override": 81,
        "block_size": 5,
        "max_num_batched_tokens": 19,
    },
    "no snapshots": {"state_cache_fraction": 0.0},
    "no prefix cache": {"enable_prefix_caching": False},
    "drafts from the prompt": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 4}},
    "drafts from a tree": {"speculative_config": {"method": "suffix"}},
    "drafts in small chunks": {
        "speculative_config": {"method": "ngram", "num_speculative_tokens": 6},
        "max_num_batched_tokens": 9,
        "num_gpu_blocks_override": 26,
    },
    "two stages": {"pipeline_parallel_size": 2},
    "two ranks": {"tensor_parallel_size": 2, "exact_across_ranks": True},
    "quantized keys": {"kv_cache_dtype": "int8"},
}


@pytest.fixture(scope="module", params=["lfm2", "lfm3", "qwen3_5", "mamba2"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """States that are smaller than a block, with windows too; larger than many; and no attention at all."""
    path = tmp_path_factory.mktemp(request.param)
    length = {} if request.param == "mamba2" else {"max_position_embeddings": 400}
    make_model(request.param, vocab_size=260, **length).save_pretrained(path)
    write_tokenizer(path)
    return path


def prompts() -> list[list[int]]:
    """Some begin alike, and all repeat themselves, so that drafts are found."""
    rng = random.Random(5)
    shared = [rng.randrange(3, 90) for _ in range(90)]
    made = [[rng.randrange(3, 90) for _ in range(count)] for count in (1, 17, 40)]
    made += [[*shared[: 30 * i], *shared[:20], rng.randrange(3, 90)] for i in range(1, 4)]
    return [*made, shared, [*shared, 7]]


PARAMS = [
    SamplingParams(max_tokens=24, temperature=[0.0, 1.0][i % 2], seed=i, ignore_eos=True) for i in range(8)
]


def said(llm: LLM, tokens: list[list[int]], params: list[SamplingParams]) -> list[list[list[int]]]:
    asked: Any = [{"prompt_token_ids": one} for one in tokens]
    found = llm.generate(asked, params, use_tqdm=False)
    return [[list(sample.token_ids) for sample in one.outputs] for one in found]


@pytest.fixture(scope="module")
def alone(model: Path) -> list[list[list[int]]]:
    """What each prompt gives cold and alone."""
    llm = LLM(str(model), **BASE, enable_prefix_caching=False)
    return [said(llm, [one], [params])[0] for one, params in zip(prompts(), PARAMS, strict=True)]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_tokens_depend_on_the_request_alone(schedule: str, model: Path, alone: list[list[list[int]]]) -> None:
    options = {**BASE, **SCHEDULES[schedule]}
    if "kv_cache_dtype" in options:
        cold = LLM(str(model), **options, enable_prefix_caching=False)
        alone = [said(cold, [one], [params])[0] for one, params in zip(prompts(), PARAMS, strict=True)]
    llm = LLM(str(model), **options)
    for _ in range(2):  # the second time from what the first has left
        assert said(llm, prompts(), PARAMS) == alone
    llm.shutdown()


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[LLM]:
    llm = LLM(str(model), **BASE)
    yield llm
    llm.shutdown()


def test_a_conversation_computes_its_new_tokens_alone(llm: LLM, model: Path) -> None:
    cold = LLM(str(model), **BASE, enable_prefix_caching=False)
    params = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
    tokens = prompts()[6]
    for turn in range(4):
        (found,) = llm.generate({"prompt_token_ids": tokens}, params, use_tqdm=False)
        if turn:
            assert found.num_cached_tokens == len(tokens) - 4, "the last answer is computed again"
        answer = list(found.outputs[0].token_ids)
        assert [[answer]] == said(cold, [tokens], [params])
        tokens = [*tokens, *answer, 5, 6, 7]


def test_samples_and_their_prompt(llm: LLM, model: Path) -> None:
    params = SamplingParams(n=4, max_tokens=12, temperature=1.0, seed=3, ignore_eos=True)
    tokens = prompts()[4]
    cold = LLM(str(model), **BASE, enable_prefix_caching=False)
    assert said(llm, [tokens], [params]) == said(cold, [tokens], [params])


def test_a_draft_model_and_a_grammar(model: Path, tmp_path: Path) -> None:
    """Tokens that are taken back, because a draft was wrong or a grammar was late, leave no trace."""
    write_checkpoint(tmp_path / "draft", vocab_size=260)
    drafts = {"model": str(tmp_path / "draft"), "num_speculative_tokens": 3}
    rule = StructuredOutputsParams(regex="(ab|cd){4,12}")
    params = [
        SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True),
        SamplingParams(max_tokens=30, temperature=1.0, seed=4, structured_outputs=rule),
        SamplingParams(
            max_tokens=20, temperature=1.0, seed=5, logprobs=2, prompt_logprobs=1, ignore_eos=True
        ),
    ]
    tokens = [prompts()[i] for i in (6, 2, 7)]
    cold = LLM(str(model), **BASE, enable_prefix_caching=False)
    alone = [said(cold, [one], [asked])[0] for one, asked in zip(tokens, params, strict=True)]
    for more in ({}, {"speculative_config": drafts}, {"async_scheduling": True}):
        llm = LLM(str(model), **{**BASE, **more})
        for _ in range(2):
            assert said(llm, tokens, params) == alone
        llm.shutdown()


def test_a_predicted_answer_is_verified_in_pieces(llm: LLM) -> None:
    """No more tokens of a draft are computed than a row has open rows."""
    asked = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
    tokens = prompts()[6]
    (answer,) = said(llm, [tokens], [asked])[0]
    before = llm.stats().spec_accepted_tokens
    assert said(llm, [tokens], [msgspec.structs.replace(asked, prediction=answer)]) == [[answer]]
    assert llm.stats().spec_accepted_tokens > before


def test_sleep_forgets_states(llm: LLM) -> None:
    before = said(llm, prompts(), PARAMS)
    llm.sleep()
    llm.wake_up()
    assert said(llm, prompts(), PARAMS) == before


def test_beams_copy_states(llm: LLM, model: Path) -> None:
    params = BeamSearchParams(beam_width=3, max_tokens=8, ignore_eos=True)
    asked: Any = [{"prompt_token_ids": prompts()[6]}]
    cold = LLM(str(model), **BASE, state_cache_fraction=0.0)
    found = [[beam.tokens for beam in one.beam_search(asked, params)[0].sequences] for one in (llm, cold)]
    assert found[0] == found[1]
