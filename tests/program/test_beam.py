"""Beam search gives transformers' and vLLM's sequences and scores, alone and in batches, whatever the schedule."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from concurrent.futures import Future
from functools import cache
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire import LLM, BeamSearchParams, SamplingParams
from quire.engine.feature import Features
from quire.errors import RequestError
from quire.params import BeamRules, StructuredOutputsParams
from quire.program.beam_search import BeamSearch, Candidate
from tests.shared import DATA, needs

STORY = (
    "Once upon a time there was a girl who had a red ball. One day she went to the park with her mother and"
)
MODELS = {
    "base-llama": DATA / "adapters" / "base-llama",
    "base-qwen3": DATA / "adapters" / "base-qwen3",
    "stories260K": DATA / "ckpt-stories260K" / "hf",
}


def cases() -> list[dict[str, Any]]:
    path = DATA / "beam" / "cases.jsonl"
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines()]


needs_data = needs(DATA / "beam")


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
            no_repeat_ngram_size=case.get("no_repeat_ngram_size", 0),
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


class TableMatcher:
    """A grammar whose states are last tokens: `rows[t % 8]` may follow token t."""

    ended = False

    def __init__(self, rows: list[list[int]], last: int) -> None:
        self._rows, self._last = rows, last

    def followed_by(self, token: int) -> TableMatcher:
        assert token in self._rows[self._last % 8]
        return TableMatcher(self._rows, token)

    def fill(self, mask_W: Any) -> None:
        bits = np.zeros(32 * len(mask_W), np.uint8)
        bits[self._rows[self._last % 8]] = 1
        mask_W[:] = np.packbits(bits, bitorder="little").view(np.uint32)


class TableGrammars:
    """In place of a compiler: the table of a case."""

    def __init__(self, case: dict[str, Any]) -> None:
        self._case = case

    def submit(self, text: str, owner: str = "") -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(self)
        return done

    def matcher(self) -> TableMatcher:
        return TableMatcher(self._case["allowed"], self._case["prompt"][-1])


def use_table(llm: LLM, case: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let requests be constrained by the table of a case, if it has one."""
    request = type(llm._front).request

    def constrained(*args: Any, **options: Any) -> Any:
        made = request(llm._front, *args, **options)
        return msgspec.structs.replace(made, grammar="table" if "allowed" in case else None)

    monkeypatch.setattr(llm._front, "request", constrained)
    next(gate for gate in llm._core.gates if isinstance(gate, Features)).join("program")
    monkeypatch.setattr(llm._core.host, "_grammars", lambda: TableGrammars(case))


@needs_data
@pytest.mark.parametrize("name", MODELS)
def test_searches_are_those_of_transformers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given = [case for case in cases() if case["model"] == name]
    llm = model(name)
    for case in given:  # words are given as tokens, which the API takes only as text
        monkeypatch.setattr(llm._front, "_bad_words", lambda params, case=case: banned(case))
        use_table(llm, case, monkeypatch)
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
def test_batches_of_searches_equal_each_alone() -> None:
    """Prompts of differing lengths together."""
    by_id = {case["id"]: case for case in cases()}
    for batch in json.loads((DATA / "beam" / "batches.json").read_text()):
        given = [
            by_id[one] for one in batch["cases"] if by_id[one]["kind"] not in ("bad", "suppress", "allowed")
        ]
        outputs = search(model(given[0]["model"]), given, lambda case: case["early_stopping"])
        for case, output in zip(given, outputs, strict=True):
            assert [sample.token_ids for sample in output.outputs] == case["expected"]["sequences"], case[
                "id"
            ]


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


@pytest.mark.parametrize("width", [2, 4, 8, 16])
def test_beams_share_blocks(width: int) -> None:
    """Before the step with the most tokens: blocks in use, beside those of as many sequences without sharing.

    docs/beam-search.md quotes these figures.
    """
    llm, most = shipped(block_size=16), (0, 0)
    core = llm._engine._core  # type: ignore[attr-defined]

    def watch(batch: Any) -> None:
        nonlocal most
        alone = sum(-(-(seq.start + len(seq.tokens)) // 16) for seq in batch.seqs)
        most = max(most, (alone, core.stats().num_used_blocks))

    core.on_batch = watch
    llm.beam_search([STORY], BeamSearchParams(beam_width=width, max_tokens=128, ignore_eos=True))
    core.on_batch = None
    alone, shared = most
    print(f"width {width}: {shared} blocks shared, {alone} without sharing")
    assert shared < 0.6 * alone


@cache
def shipped(**options: Any) -> LLM:
    return LLM(max_model_len=256, **options)


def plain_diverse_search(
    follow: Callable[[tuple[int, ...]], dict[int, float]], groups: int, each: int, penalty: float, steps: int
) -> list[tuple[float, tuple[int, ...]]]:
    """The definition, written plainly, for a model without end tokens: the best sequences with their scores."""
    beams: list[list[tuple[float, tuple[int, ...]]]] = [[(0.0, ())] for _ in range(groups)]
    for _ in range(steps):
        taken: list[int] = []
        for group in range(groups):
            found = [
                (total + logprob - penalty * taken.count(token), (*tokens, token))
                for total, tokens in beams[group]
                for token, logprob in follow(tokens).items()
            ]
            beams[group] = sorted(found, key=lambda one: -one[0])[:each]
            taken += [tokens[-1] for _, tokens in beams[group]]
    return sorted(((total / steps, tokens) for one in beams for total, tokens in one), reverse=True)


@needs_data
@pytest.mark.parametrize(("groups", "width", "penalty"), [(2, 4, 0.5), (3, 3, 1.5), (2, 6, 20.0)])
def test_diverse_groups_are_those_of_the_definition(groups: int, width: int, penalty: float) -> None:
    llm, prompt, steps = model("base-llama", max_logprobs=-1), [1, 7, 44, 90], 5

    @cache
    def follow(tokens: tuple[int, ...]) -> dict[int, float]:
        one = SamplingParams(temperature=0, max_tokens=1, logprobs=-1, detokenize=False)
        (output,) = llm.generate({"prompt_token_ids": [*prompt, *tokens]}, one, use_tqdm=False)
        (step,) = output.outputs[0].logprobs or ()
        return {token: entry.logprob for token, entry in step.items()}

    wanted = plain_diverse_search(follow, groups, width // groups, penalty, steps)
    params = BeamSearchParams(
        beam_width=width,
        max_tokens=steps,
        ignore_eos=True,
        early_stopping=False,
        num_beam_groups=groups,
        diversity_penalty=penalty,
    )
    (output,) = llm.beam_search([{"prompt_token_ids": prompt}], params)
    assert [tuple(one.tokens[len(prompt) :]) for one in output.sequences] == [tokens for _, tokens in wanted]
    assert [one.score for one in output.sequences] == pytest.approx([score for score, _ in wanted], abs=1e-4)
    assert llm.stats().num_used_blocks == 0


def test_grammars_bound_beams() -> None:
    """The beams over a few choices are the choices, with the log-probabilities that the model gives them."""
    llm, prompt = shipped(), "Tom has a pet. It is"
    choices = [" a dog", " a cat", " very big"]
    form = StructuredOutputsParams(choice=choices)
    for early in (None, False):
        params = BeamSearchParams(beam_width=4, max_tokens=12, structured_outputs=form, early_stopping=early)
        (output,) = llm.beam_search([prompt], params)
        assert {one.text for one in output.sequences} == set(choices)  # one may be there in other tokens too
        assert len({tuple(one.tokens) for one in output.sequences}) == len(output.sequences)
        for one in output.sequences:
            score = SamplingParams(max_tokens=1, prompt_logprobs=0)
            (scored,) = llm.generate({"prompt_token_ids": one.tokens}, score, use_tqdm=False)
            rows = (scored.prompt_logprobs or [])[-len(one.logprobs) :]
            total = sum(entry.logprob for row in rows for entry in (row or {}).values())
            assert one.cum_logprob == pytest.approx(total, abs=1e-4)
    number = StructuredOutputsParams(regex=" [1-9][0-9]{0,2}")
    (output,) = llm.beam_search(
        [prompt], BeamSearchParams(beam_width=6, max_tokens=6, structured_outputs=number)
    )
    assert len({tuple(one.tokens) for one in output.sequences}) == 6
    assert all(re.fullmatch(r" [1-9][0-9]{0,2}", one.text or "") for one in output.sequences)
    assert llm.stats().num_used_blocks == 0


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
        ({"num_beam_groups": 3}, "divisor of beam_width"),
        ({"num_beam_groups": 2}, "diversity_penalty"),
        ({"diversity_penalty": 0.5}, "num_beam_groups"),
        ({"no_repeat_ngram_size": -1}, "no_repeat_ngram_size"),
        ({"structured_outputs": StructuredOutputsParams(choice=["a"], select=True)}, "select"),
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


@settings(max_examples=200, deadline=None)
@given(st.data(), st.sampled_from([None, True, False, "never"]), st.integers(1, 6))
def test_only_candidates_that_may_win_are_made(data: st.DataObject, early: Any, width: int) -> None:
    """They lead to the step that all candidates lead to, with ties and with ends."""
    ends = frozenset(data.draw(st.sets(st.integers(0, 8), max_size=3)))
    score = st.sampled_from([-0.5, -1.0, -1.25, -2.0, -7.0, float("-inf")])
    row = st.lists(st.tuples(st.integers(0, 8), score), max_size=9, unique_by=lambda pair: pair[0])
    followers = [
        sorted(one, key=lambda pair: -pair[1]) for one in data.draw(st.lists(row, min_size=1, max_size=width))
    ]
    totals = data.draw(st.lists(score, min_size=len(followers), max_size=len(followers)))
    every = [
        Candidate(place, token, logprob, totals[place] + logprob)
        for place, pairs in enumerate(followers)
        for token, logprob in pairs
    ]
    rules = BeamRules(beam_width=width, early_stopping=early)
    one, other = (BeamSearch(rules, 3, 9, ends) for _ in range(2))
    some = one.contenders(totals, followers)
    assert one.step(some) == other.step(every)
