"""The files beside a vocabulary: what they add to a tokenizer, change in a text, or are refused for."""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tokenizers import decoders

from quire.errors import ModelError
from quire.model.sentences import default_prompt, max_length
from quire.text.side_files import SENTENCE_CONFIGS
from quire.text.tokenizer import Tokenizer
from tests.text.conftest import byte_level_backend

NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4


def put(directory: Path, **files: Any) -> Path:
    for name, content in files.items():
        (directory / f"{name}.json").write_text(json.dumps(content))
    return directory


def field(number: int, data: bytes) -> bytes:
    return bytes([number << 3 | 2, len(data)]) + data


def sentencepiece(
    directory: Path, pieces: Sequence[tuple[str, float, int]], dummy_prefix: bool = True
) -> Path:
    """A BPE model of sentencepiece's format."""
    rows = [
        field(1, text.encode()) + b"\x15" + struct.pack("<f", score) + bytes([0x18, kind])
        for text, score, kind in pieces
    ]
    trainer = bytes([3 << 3, 2])
    normalizer = bytes([3 << 3, dummy_prefix, 4 << 3, 0])
    model = b"".join(field(1, row) for row in rows) + field(2, trainer) + field(3, normalizer)
    (directory / "tokenizer.model").write_bytes(model)
    return directory


SPECIAL = [("<unk>", 0.0, UNKNOWN), ("<s>", 0.0, CONTROL), ("</s>", 0.0, CONTROL)]
LETTERS = [(letter, -5.0, NORMAL) for letter in "▁abcdefi"]


def test_added_tokens_are_found_where_there_is_no_tokenizer_json(tmp_path: Path) -> None:
    count = len(SPECIAL + LETTERS)
    put(
        sentencepiece(tmp_path, SPECIAL + LETTERS),
        tokenizer_config={"tokenizer_class": "LlamaTokenizer", "add_bos_token": False},
        added_tokens={"<|im_start|>": count, "<|im_end|>": count + 1},
        special_tokens_map={"pad_token": "[PAD]", "additional_special_tokens": ["<tool>"]},
    )
    tokenizer = Tokenizer.load(tmp_path)
    tokens = tokenizer.encode("<|im_start|>ab<|im_end|>[PAD]<tool>")
    assert [tokens[0], *tokens[-3:]] == [count, count + 1, count + 2, count + 3]
    assert tokenizer.special_tokens["pad_token"] == "[PAD]"
    assert tokenizer.is_special(count + 3)
    (tmp_path / "added_tokens.json").write_text('{"<x>": "5"}')
    with pytest.raises(ModelError, match="must map tokens to ids"):
        Tokenizer.load(tmp_path)
    (tmp_path / "added_tokens.json").write_text('{"<x>": 99}')
    with pytest.raises(ModelError, match="'<x>' is declared as 99"):
        Tokenizer.load(tmp_path)


def test_pieces_of_spaces_are_found_where_nothing_is_prepended(tmp_path: Path) -> None:
    """As sentencepiece splits it: user-defined pieces first, the longest of them."""
    spaces = [("▁▁", 0.0, USER_DEFINED), ("▁▁▁▁", 0.0, USER_DEFINED), ("<x>", 0.0, USER_DEFINED)]
    directory = sentencepiece(tmp_path, [*SPECIAL, *spaces, *LETTERS], dummy_prefix=False)
    put(directory, tokenizer_config={"add_bos_token": False})
    tokenizer = Tokenizer.load(directory)
    text = "a    b  c<x>     d e"
    names = [tokenizer.id_to_token(i) for i in tokenizer.encode(text)]
    assert names == ["a", "▁▁▁▁", "b", "▁▁", "c", "<x>", "▁▁▁▁", "▁", "d", "▁", "e"]
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_flags_of_tokens_that_are_not_there_change_nothing(tmp_path: Path) -> None:
    pieces = [("<unk>", 0.0, UNKNOWN), *LETTERS]
    put(sentencepiece(tmp_path, pieces), tokenizer_config={"add_bos_token": True, "bos_token": None})
    trainer = (tmp_path / "tokenizer.model").read_bytes()
    # No bos and no eos: ids of -1 (fields 41 and 42 of the trainer's message).
    absent = b"".join(bytes([key << 3 & 0x7F | 0x80, key >> 4]) + b"\xff" * 9 + b"\x01" for key in (41, 42))
    at = trainer.index(field(2, bytes([3 << 3, 2])))
    model = trainer[:at] + field(2, bytes([3 << 3, 2]) + absent) + trainer[at + 4 :]
    (tmp_path / "tokenizer.model").write_bytes(model)
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.encode("ab") == tokenizer.encode("ab", add_special_tokens=False)


def test_a_prefix_space_is_that_of_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    model = json.loads(byte_level_backend().to_str())["model"]
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    (tmp_path / "merges.txt").write_text("\n".join(merges))
    for spaced in (True, False):
        config = {"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": spaced}
        put(tmp_path, vocab=model["vocab"], tokenizer_config=config)
        theirs = transformers.GPT2Tokenizer.from_pretrained(tmp_path)
        for text in ("the cat", " the cat", "sat\n"):
            assert Tokenizer.load(tmp_path).encode(text) == theirs(text)["input_ids"], (spaced, text)


@pytest.mark.parametrize("name", SENTENCE_CONFIGS)
def test_sentence_transformers_lower_texts_and_cut_them(tmp_path: Path, name: str) -> None:
    byte_level_backend().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / name).write_text(json.dumps({"do_lower_case": True, "max_seq_length": 7}))
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.encode("The CAT Größe") == tokenizer.encode("the cat größe")
    assert max_length(tmp_path) == 7
    (tmp_path / name).write_text(json.dumps({"max_seq_length": 0}))
    with pytest.raises(ModelError, match="max_seq_length"):
        max_length(tmp_path)


def test_the_longest_text_may_be_the_tokenizers(tmp_path: Path) -> None:
    put(tmp_path, tokenizer_config={"model_max_length": 32})
    assert max_length(tmp_path) is None  # no model of sentence-transformers
    put(tmp_path, modules=[])
    assert max_length(tmp_path) == 32
    put(tmp_path, tokenizer_config={"model_max_length": 1e30})
    assert max_length(tmp_path) is None
    put(tmp_path, config_sentence_transformers={"prompts": {"q": "query: "}, "default_prompt_name": "q"})
    assert default_prompt(tmp_path) == "query: "


def test_a_decoder_that_does_not_fit_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    backend = byte_level_backend()
    backend.save(str(tmp_path / "tokenizer.json"))
    Tokenizer.load(tmp_path)
    assert not caplog.records
    backend.decoder = decoders.Replace("▁", " ")
    backend.save(str(tmp_path / "tokenizer.json"))
    Tokenizer.load(tmp_path)
    (record,) = caplog.records
    assert "outputs may hold letters for spaces" in record.getMessage()
