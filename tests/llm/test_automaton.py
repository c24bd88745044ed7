"""Logits processors driven by the automaton of another library, beside plain requests in one batch."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import jsonschema
import numpy as np
import pytest
from outlines_core import Guide, Index, Vocabulary
from outlines_core.json_schema import build_regex_from_schema

from quire import LLM, SamplingParams

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"enum": [1, 2, 30]},
        "kind": {"enum": ["cat", "dog"]},
    },
    "required": ["name", "age", "kind"],
}
PLAIN = [
    SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, logprobs=1),
    SamplingParams(seed=1, max_tokens=40, ignore_eos=True, logprobs=1),
    SamplingParams(seed=2, max_tokens=40, ignore_eos=True, top_p=0.9, frequency_penalty=0.3),
]
PROMPTS = ["abc", "hello there", "x"]


class Automaton:
    """A request's function: the tokens that the automaton allows keep their logits."""

    def __init__(self, index: Index) -> None:
        self._guide, self._seen = Guide(index), 0

    def __call__(self, output: list[int], logits: Any) -> Any:
        for token in output[self._seen :]:
            self._guide.advance(token)
        self._seen = len(output)
        kept = self._guide.get_tokens()
        row = np.full_like(logits, -np.inf)
        row[kept] = logits[kept]
        return row


@pytest.fixture(scope="module")
def llm(tiny_model: Callable[..., str]) -> LLM:
    return LLM(tiny_model(), max_model_len=128, max_num_seqs=8)


@pytest.fixture(scope="module")
def index(llm: LLM) -> Index:
    tokenizer = llm.get_tokenizer()
    assert tokenizer is not None
    ids: dict[bytes, list[int]] = {}
    for token in range(llm._front.info.vocab_size):
        if piece := tokenizer.token_bytes(token):
            ids.setdefault(piece, []).append(token)
    (end,) = tokenizer.eos_token_ids
    pattern = build_regex_from_schema(json.dumps(SCHEMA))
    return Index(pattern, Vocabulary(end, {p: i for p, i in ids.items() if end not in i}))


def test_json_by_another_librarys_automaton(llm: LLM, index: Index) -> None:
    alone = llm.generate(PROMPTS, PLAIN, use_tqdm=False)
    guided = [
        SamplingParams(seed=seed, max_tokens=80, logits_processors=[Automaton(index)]) for seed in range(4)
    ]
    outputs = llm.generate([*PROMPTS, *PROMPTS, "y"], [*PLAIN, *guided], use_tqdm=False)
    assert [output.outputs for output in outputs[:3]] == [output.outputs for output in alone]
    for output in outputs[3:]:
        assert output.outputs[0].finish_reason == "stop"
        jsonschema.validate(json.loads(output.outputs[0].text), SCHEMA)
    assert len({output.outputs[0].text for output in outputs[3:]}) == 4
