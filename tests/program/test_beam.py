"""Beam search gives transformers' and vLLM's sequences and scores, alone and in batches, whatever the schedule."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, BeamSearchParams, SamplingParams
from quire.errors import RequestError
from quire.params import BeamRules
from quire.program.beams import BeamSearch, Candidate

DATA = Path(__file__).parents[3] / "shared" / "data"
MODELS = {
    "base-llama": DATA / "adapters" / "base-llama",
    "base-qwen3": DATA / "adapters" / "base-qwen3",
    "stories260K": DATA / "ckpt-stories260K" / "hf",
}
KINDS = ("plain", "min", "rep", "bad", "suppress", "multi")


def cases() -> list[dict[str, Any]]:
    path = DATA / "beam" / "cases.jsonl"
    if not path.exists():
        return []
    found = [json.loads(line) for line in path.read_text().splitlines()]
    return [case for case in found if case["kind"] in KINDS]


needs_data = pytest.mark.skipif(not cases(), reason="needs the beam searches in shared/data/beam")


@cache
def model(name: str, **options: Any) -> LLM:
    options = {"max_num_seqs": 64, **options}
    return LLM(str(MODELS[name]), dtype="float32", skip_tokenizer_init=True, max_model_len=256, **options)


def params(case: dict[str, Any], early: Any) -> SamplingParams:
    """The case as a request. Single tokens that are forbidden are words of one token."""
    return SamplingParams(
        n=case["num_return_sequences"] if early != "vllm" else case["num_beams"],
        beam=BeamRules(
            beam_width=case["num_beams"],
            length_penalty=case["length_penalty"],
            early_stopping=None if early == "vllm" else early,
        ),
        max_tokens=case["max_new_tokens"],
        min_tokens=case.get("min_new_tokens", 0),
        repetition_penalty=case.get("repetition_penalty", 1.0),
        stop_token_ids=case["eos_token_id"][:1] if early == "vllm" else case["eos_token_id"],
        ignore_eos=True,
        logprobs=0,
        detokenize=False,
    )


def search(llm: LLM, given: list[dict[str, Any]], early: Callable[[dict[str, Any]], Any]) -> list[Any]:
    prompts = [{"prompt_token_ids": case["prompt"]} for case in given]
    return llm.generate(prompts, [params(case, early(case)) for case in given], use_tqdm=False)


def banned(case: dict[str, Any]) -> tuple[tuple[int, ...], ...]:
    words = [tuple(word) for word in case.get("bad_words_ids", [])]
    return (*words, *((token,) for token in case.get("suppress_tokens", [])))


@needs_data
@pytest.mark.parametrize("name", MODELS)
def test_searches_are_those_of_transformers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given = [case for case in cases() if case["model"] == name]
    llm = model(name)
    for case in given:  # words are given as tokens, which the API takes only as text
        monkeypatch.setattr(llm._front, "_bad_words", lambda params, case=case: banned(case))
        (output,) = search(llm, [case], lambda case: case["early_stopping"])
        found = [sample.token_ids for sample in output.outputs]
        assert found == case["expected"]["sequences"], case["id"]
        rules = params(case, case["early_stopping"]).beam
        assert rules is not None
        scores = [
            rules.score(
                o.cumulative_logprob, len(case["prompt"]), len(o.token_ids), o.finish_reason == "stop"
            )
            for o in output.outputs
        ]
        assert scores == pytest.approx(case["expected"]["sequences_scores"], abs=1e-4, rel=2e-6), case["id"]


@needs_data
@pytest.mark.parametrize("name", MODELS)
def test_searches_are_those_of_vllm(name: str) -> None:
    given = [case for case in cases() if case["model"] == name and "vllm" in case and case["kind"] == "plain"]
    assert given
    for case, output in zip(given, search(model(name), given, lambda case: "vllm"), strict=True):
        wanted = case["vllm"]
        assert [sample.token_ids for sample in output.outputs] == wanted["sequences"], case["id"]
        totals = [sample.cumulative_logprob for sample in output.outputs]
        assert totals == pytest.approx(wanted["cumulative_logprobs"], abs=1e-4, rel=2e-6), case["id"]


@needs_data
@pytest.mark.parametrize(
    "options",
    [
        {"max_num_seqs": 3},
        {"num_gpu_blocks_override": 64, "block_size": 4},
        {"enable_prefix_caching": False},
        {"async_scheduling": True},
    ],
)
def test_no_schedule_changes_a_search(options: dict[str, Any]) -> None:
    given = [case for case in cases() if case["model"] == "base-llama" and case["kind"] == "plain"][:6]
    llm = model("base-llama", **options)
    for case, output in zip(given, search(llm, given, lambda case: case["early_stopping"]), strict=True):
        assert [sample.token_ids for sample in output.outputs] == case["expected"]["sequences"], case["id"]
    assert llm.stats().num_used_blocks == 0


def test_beams_share_blocks() -> None:
    llm = LLM(block_size=4)
    most = 0

    def watch(batch: Any) -> None:
        nonlocal most
        most = max(most, llm_core.stats().num_used_blocks)

    llm_core = llm._engine._core  # type: ignore[attr-defined]
    llm_core.on_batch = watch
    (output,) = llm.beam_search("Once upon a time there was a", BeamSearchParams(beam_width=8, max_tokens=40))
    longest = max(len(sequence.tokens) for sequence in output.sequences)
    assert most < 0.6 * 8 * -(-longest // 4)


def test_results_have_vllms_names() -> None:
    llm = LLM()
    (output,) = llm.beam_search(["Once upon a time"], BeamSearchParams(beam_width=3, max_tokens=6))
    assert len(output.sequences) == 3
    best = output.sequences[0]
    assert best.text
    assert best.cum_logprob >= output.sequences[1].cum_logprob
    assert len(best.logprobs) == len(best.tokens) - len(llm.generate("Once upon a time")[0].prompt_token_ids)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"beam_width": 0}, "beam_width"),
        ({"num_return_sequences": 9}, "beam_width"),
        ({"length_penalty": float("nan")}, "length_penalty"),
        ({"early_stopping": "soon"}, "early_stopping"),
    ],
)
def test_bad_searches_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(RequestError, match=said):
        BeamSearchParams(**{"beam_width": 4, "max_tokens": 4, **options}).sampling_params()


def test_the_rules_on_a_table() -> None:
    """Two beams; token 9 ends. Candidates are given by hand."""
    search = BeamSearch(BeamRules(beam_width=2, early_stopping=True), 1, 9, frozenset({9}))
    first = search.step([Candidate(0, 5, -1, -1.0), Candidate(0, 9, -2, -2.0), Candidate(0, 6, -3, -3.0)])
    assert [c.token for c in first.survivors] == [5, 6]
    assert [score for _, score in first.completed] == [-2.0]
    search = BeamSearch(BeamRules(beam_width=2, early_stopping=True), 1, 9, frozenset({9}))
    late = search.step([Candidate(0, 5, -1, -1.0), Candidate(0, 6, -2, -2.0), Candidate(0, 9, -3, -3.0)])
    assert not late.completed  # the end is not among the two best
