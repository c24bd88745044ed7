"""The model inside the package: small, loads anywhere, writes English, and stops by itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from quire import LLM, SamplingParams
from quire.engine.directory import SHIPPED_MODEL
from quire.text.output.constraint import call_constraint
from quire.text.output.parser import parse
from quire.weights.hub import ASSETS

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


ROLL = {"properties": {"sides": {"enum": [6, 20]}}, "required": ["sides"]}
TOOLS = [{"type": "function", "function": {"name": "roll", "parameters": ROLL}}]


def test_its_template_knows_tools_and_developers(llm: LLM) -> None:
    tokenizer = AutoTokenizer.from_pretrained(ASSETS / SHIPPED_MODEL)
    call = {"id": "1", "type": "function", "function": {"name": "roll", "arguments": {"sides": 6}}}
    talk = [
        {"role": "developer", "content": "Be kind."},
        {"role": "user", "content": "Roll twice."},
        {"role": "assistant", "content": None, "tool_calls": [call, call]},
        {"role": "tool", "tool_call_id": "1", "content": "4"},
        {"role": "assistant", "content": "Again:", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "2"},
    ]
    wanted = tokenizer.apply_chat_template(talk, tools=TOOLS, add_generation_prompt=True, tokenize=False)
    roll = '<tool_call>\n{"name": "roll", "arguments": {"sides": 6}}\n</tool_call>'
    assert wanted == (
        f"<|bos|><|system|>Be kind.<|end|><|user|>Roll twice.<|end|><|assistant|>{roll}\n{roll}<|end|>"
        f"<|user|><tool_response>\n4\n</tool_response><|end|><|assistant|>Again:\n{roll}<|end|>"
        "<|user|><tool_response>\n2\n</tool_response><|end|><|assistant|>"
    )
    (answer,) = llm.chat(talk, llm.default_params(max_tokens=1), tools=TOOLS)
    assert answer.prompt == wanted


def test_a_tool_loop_of_three_turns(llm: LLM) -> None:
    talk: list[dict[str, Any]] = [{"role": "user", "content": "Roll a die for me."}]
    for turn in range(3):
        params = SamplingParams(max_tokens=60, seed=turn, structured_outputs=call_constraint(TOOLS))
        (output,) = llm.chat(talk, params, tools=TOOLS)
        (call,) = parse(output.outputs[0].text, functions=TOOLS).calls
        assert call.complete
        function = {"name": call.name, "arguments": call.arguments}
        calls = [{"id": str(turn), "type": "function", "function": function}]
        talk.append({"role": "assistant", "content": None, "tool_calls": calls})
        talk.append({"role": "tool", "tool_call_id": str(turn), "content": "4"})


def test_the_draft_is_a_tenth_and_speaks_the_same_tokens(llm: LLM) -> None:
    draft = LLM(str(ASSETS / DRAFT_MODEL))
    assert draft.report.parameters <= 0.1 * llm.report.parameters
    shared = [(ASSETS / name / "tokenizer.json").read_bytes() for name in (SHIPPED_MODEL, DRAFT_MODEL)]
    assert shared[0] == shared[1]
    (story,) = draft.generate("Once upon a time", SamplingParams(temperature=0, max_tokens=20))
    assert len(story.outputs[0].text.split()) > 5
