"""Prompt lookup and suffix decoding against published cases, and against counts made by brute force."""

from __future__ import annotations

import json
import random
from array import array
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire import _native
from quire.config import SpeculativeOptions
from quire.params import SamplingParams
from quire.spec_decode.acceptance import Odds, Tally
from quire.spec_decode.lookup import PredictionProposer, lookup
from quire.spec_decode.proposer import Computed, SpecSequence, StepView
from quire.spec_decode.suffix import SharedOutputs, SuffixProposer
from quire.types import Request

VIEW = StepView(None)  # type: ignore[arg-type]  # not looked at


def cases(data: Path, name: str, count: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((data / "speculators" / name / "expected.json").read_text())[
        "cases"
    ]
    assert len(found) == count
    return found


def sequence(prompt: list[int], output: list[int], **fields: Any) -> SpecSequence:
    request = Request(id="r", tokens=prompt, sampling=SamplingParams(), seed=0, max_tokens=100, **fields)
    return SpecSequence(0, request, 0, array("i", prompt + output), Odds(Tally(0.9)))


def test_ngram_drafts_are_the_published_ones(data: Path) -> None:
    for case in cases(data, "ngram", 240):
        tokens = array("i", case["tokens"])
        count = min(case["k"], case["max_model_len"] - len(tokens))
        draft = lookup(tokens, case["prompt_lookup_min"], case["prompt_lookup_max"], count)
        assert draft == case["draft"], case


def test_suffix_drafts_are_the_published_ones(data: Path) -> None:
    for case in cases(data, "suffix", 92):
        assert suffix_draft(case) == case["draft"], case


def suffix_draft(case: dict[str, Any]) -> list[int]:
    options = SpeculativeOptions(
        suffix_decoding_max_tree_depth=case["max_tree_depth"],
        suffix_decoding_max_spec_factor=case["max_spec_factor"],
        suffix_decoding_max_spec_offset=case["max_spec_offset"],
        suffix_decoding_min_token_prob=case["min_token_prob"],
    )
    proposer = SuffixProposer(options)
    for output in case["earlier_responses"]:
        seq = sequence([1], output)
        proposer.start(seq)
        proposer.observe([Computed(seq, 0, range(len(seq.tokens)))], VIEW)
        proposer.stop(seq)
    seq = sequence(case["prompt"], case["response"])
    proposer.start(seq)
    proposer.observe([Computed(seq, 0, range(len(seq.tokens)))], VIEW)
    (draft,) = proposer.propose([(seq, case["max_spec_tokens"])], VIEW)
    return draft.tokens


def occurrences(texts: list[list[int]], string: list[int]) -> int:
    return sum(text[i : i + len(string)] == string for text in texts for i in range(len(text)))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=25), min_size=1, max_size=5), st.data())
def test_a_suffix_tree_counts_occurrences(texts: list[list[int]], data: st.DataObject) -> None:
    """Texts grow in turns, and some are removed: what is left counts as brute force does."""
    depth = data.draw(st.integers(2, 7))
    tree = _native.SuffixTree(depth)
    for i in range(25):
        for number, text in enumerate(texts):
            tree.extend(number, text[i : i + 1])
    gone = data.draw(st.sets(st.sampled_from(range(len(texts))), max_size=len(texts) - 1))
    for number in gone:
        tree.remove(number)
        assert tree.sound()
    left = [text for number, text in enumerate(texts) if number not in gone]
    context = data.draw(st.sampled_from(left))[-depth:]
    tokens, probabilities, score, match = tree.draft(array("i", context), 4, 1.0, 0.0, 0.0)
    assert len(tokens) <= match
    assert score == pytest.approx(sum(probabilities), abs=1e-5)
    string, whole = context[len(context) - match :] if match else [], 1.0
    for token, probability in zip(tokens, probabilities, strict=True):
        counts = [occurrences(left, [*string, t]) for t in range(3)]
        assert counts[token] == max(counts), "not the most frequent continuation"
        whole *= counts[token] / occurrences(left, string)
        string = [*string, token]
        assert probability == pytest.approx(whole, abs=1e-5)


def test_shared_outputs_are_bounded_and_apart_by_salt() -> None:
    shared = SharedOutputs(8, max_outputs=3)
    rng = random.Random(0)
    for number in range(20):
        salt = "ab"[number % 2]
        name = next(shared.ids)
        shared.tree(salt).extend(name, [rng.randrange(9) for _ in range(50)])
        shared.close(salt, name)
        assert sum(shared.tree(s).num_sequences for s in "ab") <= 3
    small = SharedOutputs(8, max_outputs=100, max_bytes=20_000)
    for _ in range(20):
        name = next(small.ids)
        small.tree("").extend(name, [rng.randrange(1000) for _ in range(50)])
        small.close("", name)
        assert small.nbytes <= 20_000
    proposer = SuffixProposer(SpeculativeOptions())
    first = sequence([9], [1, 2, 3, 4, 5, 6], salt="mine")
    proposer.start(first)
    proposer.observe([Computed(first, 0, range(7))], VIEW)
    proposer.stop(first)
    for salt, wanted in (("mine", [4, 5, 6]), ("yours", [])):
        seq = sequence([8], [1, 2, 3], salt=salt)
        proposer.start(seq)
        proposer.observe([Computed(seq, 0, range(4))], VIEW)
        assert proposer.propose([(seq, 10)], VIEW)[0].tokens == wanted
        proposer.stop(seq)


def test_a_prediction_is_followed_and_found_again() -> None:
    predicted = list(range(100, 130))
    seq = sequence([1, 2], [], prediction=tuple(predicted))
    proposer = PredictionProposer()
    proposer.start(seq)

    def draft(*new: int) -> list[int]:
        seq.tokens.extend(new)
        return proposer.propose([(seq, 4)], VIEW)[0].tokens

    assert draft() == [100, 101, 102, 103]
    assert draft(100, 101, 102, 103, 104) == [105, 106, 107, 108]
    assert draft(105, 7) == [], "the output went its own way"
    assert draft(8) == []
    assert draft(110, 111) == [112, 113, 114, 115], "found again behind a part that was left out"
    assert draft(*range(112, 128)) == [128, 129]
    proposer.stop(seq)
