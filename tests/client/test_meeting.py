"""Model, tokenizer and generation config meet: ids without a row, ends from all files, defaults, odd integers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer

from quire import LLM, SamplingParams
from quire.errors import ModelError, RequestError
from quire.params import StructuredOutputsParams

Make = Callable[..., Path]
PROMPT = [{"prompt_token_ids": [1, 5, 9]}]


@pytest.fixture
def changed(tiny_model: Callable[..., str], tmp_path: Path) -> Make:
    """A copy of a tiny model with changed files; `added` are tokens beyond its rows."""

    def make(added: tuple[str, ...] = (), **files: dict[str, Any]) -> Path:
        directory = tmp_path / "model"
        if not directory.exists():
            shutil.copytree(tiny_model("llama"), directory)
        for name, content in files.items():
            path = directory / f"{name}.json"
            old = json.loads(path.read_text()) if path.exists() else {}
            path.write_text(json.dumps({**old, **content}))
        rows = json.loads((directory / "config.json").read_text())["vocab_size"]
        tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        if added:
            while tokenizer.get_vocab_size() < rows:
                tokenizer.add_tokens([f"<fill{tokenizer.get_vocab_size()}>"])
            tokenizer.add_special_tokens([AddedToken(token, special=True) for token in added])
            tokenizer.save(str(directory / "tokenizer.json"))
        return directory

    return make


def run(llm: LLM, **params: Any) -> Any:
    options = {"max_tokens": 4, "temperature": 0.0, **params}
    return llm.generate(PROMPT, SamplingParams(**options), use_tqdm=False)[0].outputs[0]


def test_tokens_without_a_row_are_refused_and_end_nothing(
    changed: Make, caplog: pytest.LogCaptureFixture
) -> None:
    directory = changed(("[PAD]", "<eot>"), tokenizer_config={"eos_token": "<eot>"})
    with LLM(str(directory), max_model_len=64) as llm:
        alone = run(llm, ignore_eos=True).token_ids
        (record,) = [r for r in caplog.records if "have no row in the model" in r.getMessage()]
        assert str(directory) in record.getMessage()
        assert run(llm, ignore_eos=True, bad_words=["[PAD]"]).token_ids == alone  # the model cannot write it
        for refused in (
            lambda: llm.generate("a[PAD]", SamplingParams(max_tokens=2), use_tqdm=False),
            lambda: run(llm, structured_outputs=StructuredOutputsParams(choice=["[PAD]", "a"], select=True)),
            lambda: run(llm, prediction="a[PAD]"),
            lambda: list(llm.run_program({"steps": [{"type": "text", "text": "a[PAD]"}, {"type": "gen"}]})),
        ):
            with pytest.raises(RequestError, match="no row for the token '\\[PAD\\]'"):
                refused()
        assert run(llm, ignore_eos=True).token_ids == alone
        assert not {*llm._front.info.eos_token_ids} & {*range(llm.vocab_size, llm.vocab_size + 9)}


def test_ends_are_those_of_all_files(changed: Make) -> None:
    directory = changed(
        tokenizer_config={"eos_token": "<fill>"},
        config={"eos_token_id": 5},
        generation_config={"eos_token_id": [6, 10**6]},
    )
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    third = tokenizer.id_to_token(7)
    changed(tokenizer_config={"eos_token": third})
    with LLM(str(directory), max_model_len=64) as llm:
        for end in (5, 6, 7):
            found = run(llm, logit_bias={end: 100.0})
            assert (found.finish_reason, len(found.token_ids)) == ("stop", 1), end
        assert run(llm, logit_bias={8: 100.0}).finish_reason == "length"
        assert set(llm._front.info.eos_token_ids) == {5, 6, 7}


def test_the_generation_config_gives_a_length_and_is_checked_at_the_start(changed: Make) -> None:
    directory = changed(generation_config={"max_new_tokens": 7})
    with LLM(str(directory), max_model_len=64) as llm:
        assert llm.get_default_sampling_params().max_tokens == 7
    changed(generation_config={"max_new_tokens": 9999})
    with LLM(str(directory), max_model_len=64) as llm:
        assert llm.get_default_sampling_params().max_tokens == 64
    for wrong in ({"temperature": "0.7"}, {"top_p": 0.0}, {"max_new_tokens": "7"}, {"max_new_tokens": -1}):
        changed(generation_config={"max_new_tokens": None, **wrong})
        with pytest.raises(ModelError, match=r"generation_config\.json"):
            LLM(str(directory), max_model_len=64)
        changed(generation_config=dict.fromkeys(wrong))


def test_integers_of_any_kind_are_token_ids(tiny_model: Callable[..., str]) -> None:
    with LLM(tiny_model("llama"), max_model_len=64, skip_tokenizer_init=True) as llm:

        def tokens(prompts: Any, **more: Any) -> list[list[int]]:
            params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, detokenize=False, **more)
            return [list(o.outputs[0].token_ids) for o in llm.generate(prompts, params, use_tqdm=False)]

        (alone,) = tokens([[1, 5, 9]])
        one = np.array([1, 5, 9])
        for prompts in (one, [one], {"prompt_token_ids": one}, [{"prompt_token_ids": list(one)}], one[None]):
            assert tokens(prompts) == [alone]
        assert tokens(np.array([[1, 5, 9], [1, 5, 9]])) == [alone, alone]
        allowed = np.array(alone[:1])
        assert tokens(one, allowed_token_ids=allowed) == [[alone[0]] * 3]
        assert tokens(one, logit_bias={np.int64(7): 100.0}) == [[7] * 3]
        for wrong in ([1.5, 2], [[1, "a"]], [[True, 2]], {"prompt_token_ids": [None]}):
            with pytest.raises(RequestError):
                tokens(wrong)


@pytest.mark.parametrize(
    "params",
    [
        {"allowed_token_ids": [7], "bad_words": ["word"]},
        {"structured_outputs": StructuredOutputsParams(choice=["yes", "no"]), "bad_words": ["e", "no"]},
    ],
)
def test_requests_that_contradict_themselves_are_refused_before_any_step(
    changed: Make, params: dict[str, Any]
) -> None:
    directory = changed()
    if "allowed_token_ids" in params:
        tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        word = tokenizer.decode([40])
        params = {
            "allowed_token_ids": tokenizer.encode(word, add_special_tokens=False).ids,
            "bad_words": [word],
        }
        assert len(params["allowed_token_ids"]) == 1
    with LLM(str(directory), max_model_len=64) as llm:
        with pytest.raises(RequestError) as refusal:
            run(llm, **params)
        assert refusal.value.param == "bad_words"
        assert llm.stats().num_steps == 0


def test_a_grammar_that_a_request_forbids_later_is_the_requests_fault(changed: Make) -> None:
    with LLM(str(changed()), max_model_len=64) as llm:
        with pytest.raises(RequestError, match="every token is forbidden"):
            run(llm, structured_outputs=StructuredOutputsParams(regex="a"), allowed_token_ids=[7])
        assert run(llm, ignore_eos=True).finish_reason == "length"
