"""The model inside the package: small, loads anywhere, writes English, and stops by itself."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from quire import LLM, SamplingParams
from quire.engine.start import ASSETS, SHIPPED_MODEL

DRAFT_MODEL = "quire-stories-draft"
OPENINGS = ["Once upon a time", "The little dog", "One day, Tom went to the park."]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM()


def test_all_of_it_is_small() -> None:
    def size(path: Path) -> int:
        return sum(f.stat().st_size for f in path.rglob("*") if f.is_file())

    assert size(ASSETS / SHIPPED_MODEL) <= 16 << 20
    assert sum(size(path) for path in ASSETS.iterdir() if path.name != SHIPPED_MODEL) <= 4 << 20


def test_transformers_writes_the_same_greedy_tokens() -> None:
    tokenizer = AutoTokenizer.from_pretrained(ASSETS / SHIPPED_MODEL)
    model = AutoModelForCausalLM.from_pretrained(ASSETS / SHIPPED_MODEL, dtype=torch.float32)
    ours = LLM(dtype="float32")
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    for opening in OPENINGS:
        (output,) = ours.generate(opening, params)
        prompt = tokenizer(opening, return_tensors="pt").input_ids
        assert output.prompt_token_ids == prompt[0].tolist()
        wanted = model.generate(prompt, max_new_tokens=60, min_new_tokens=60, do_sample=False)
        assert output.outputs[0].token_ids == wanted[0, prompt.shape[1] :].tolist()


def test_stories_are_words_and_end(llm: LLM) -> None:
    outputs = llm.generate(OPENINGS * 4, llm.default_params(max_tokens=800, seed=1), use_tqdm=False)
    texts = [o.outputs[0].text for o in outputs]
    ended = [o.outputs[0].finish_reason == "stop" for o in outputs]
    assert sum(ended) >= 0.7 * len(ended)
    words = " ".join(texts).split()
    assert len(words) > 300
    common = {"the", "a", "and", "to", "was", "he", "she", "said", "her", "his", "in", "of"}
    assert sum(w.lower().strip(".,!?\"'") in common for w in words) > 0.15 * len(words)


def test_chat_answers_and_ends_its_turn(llm: LLM) -> None:
    talk = [{"role": "user", "content": "Tell me a story about a cat."}]
    (answer,) = llm.chat(talk, llm.default_params(max_tokens=800, seed=2))
    assert answer.outputs[0].text.strip()
    assert "<|" not in answer.outputs[0].text
    assert answer.outputs[0].finish_reason == "stop"


def test_the_draft_is_a_tenth_and_speaks_the_same_tokens(llm: LLM) -> None:
    draft = LLM(str(ASSETS / DRAFT_MODEL))
    assert draft.report.parameters <= 0.1 * llm.report.parameters
    shared = [(ASSETS / name / "tokenizer.json").read_bytes() for name in (SHIPPED_MODEL, DRAFT_MODEL)]
    assert shared[0] == shared[1]
    (story,) = draft.generate("Once upon a time", SamplingParams(temperature=0, max_tokens=20))
    assert len(story.outputs[0].text.split()) > 5
