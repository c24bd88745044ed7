"""A tokenizer's own chat template, called as transformers' tokenizers call it."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire.errors import ModelError, RequestError
from quire.text.tokenizer import Tokenizer
from tests.tiny import write_checkpoint

TALK = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("template") / "model")


def test_it_renders_as_transformers_does(directory: Path) -> None:
    transformers = pytest.importorskip("transformers")
    theirs, ours = transformers.AutoTokenizer.from_pretrained(directory), Tokenizer.load(directory)
    for options in ({}, {"add_generation_prompt": True}, {"continue_final_message": True}):
        text = theirs.apply_chat_template(TALK, tokenize=False, **options)
        assert ours.apply_chat_template(TALK, tokenize=False, **options) == text
        ids = theirs.apply_chat_template(TALK, tokenize=True, return_dict=False, **options)
        assert ours.apply_chat_template(TALK, **options) == ids


def test_another_template_and_mistakes(directory: Path) -> None:
    tokenizer = Tokenizer.load(directory)
    template = "{{ messages[0]['content'] }}{{ mood }}"
    assert tokenizer.apply_chat_template(TALK, chat_template=template, tokenize=False, mood="!") == "hi!"
    with pytest.raises(RequestError, match="exclude each other"):
        tokenizer.apply_chat_template(TALK, add_generation_prompt=True, continue_final_message=True)
    tokenizer = Tokenizer.load(directory)
    tokenizer.chat_template = None
    with pytest.raises(ModelError, match="has no chat template"):
        tokenizer.apply_chat_template(TALK)
