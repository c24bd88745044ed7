"""Tokenizers out of GGUF files: llama.cpp's own vectors on real vocabularies, and files that are refused."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import gguf
import pytest
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers

from quire.errors import ModelError
from quire.weights.gguf.container import GGUFFile
from quire.weights.gguf.tokenizer import SPLITTINGS, read_ends, read_tokenizer
from tests.gguf_files import finish
from tests.shared import DATA, require

VOCABULARIES = ["deepseek-coder", "falcon", "gpt-2", "llama-spm", "mpt", "phi-3", "refact", "starcoder"]


@pytest.mark.parametrize("name", VOCABULARIES)
def test_tokens_are_llama_cpps(name: str) -> None:
    path = require(DATA / "tok-ggml-vocab" / f"ggml-vocab-{name}.gguf")
    tokenizer = read_tokenizer(GGUFFile(path))
    with open(f"{path}.inp", encoding="utf-8", newline="") as file:
        texts = file.read().split("\n__ggml_vocab_test__\n")
    rows = Path(f"{path}.out").read_text().splitlines()
    cases = list(zip(texts, rows, strict=False))
    assert len(cases) > 40
    for text, row in cases:
        tokens = tokenizer.encode(text, add_special_tokens=False)
        assert tokens == [int(token) for token in row.split()], text
        if (
            name != "deepseek-coder"
        ):  # its added tokens are characters that stand for bytes, as in the original
            assert tokenizer.decode(tokens) == text


@pytest.mark.parametrize("name", sorted(SPLITTINGS))
def test_every_splitting_keeps_the_text(name: str, tmp_path: Path) -> None:
    tokenizer = read_tokenizer(write(tmp_path, {"pre": name}))
    text = "It's naïve: 12345 café!!\n\n  Ünder_score ÀB  the\tend. 你好 "
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("kimi-k2", ["It's", " ", "123", "45", " ", "你好", "abc"]),
        ("seed-coder", ["It", "'s", " ", "1", "2", "3", "4", "5", " 你好abc"]),
        ("exaone-moe", ["It", "'s", " ", "1", "2", "3", "4", "5", " 你好abc"]),
        ("jais-2", ["It", "'s", " ", "123", "45", " 你好abc"]),
        ("bloom", ["It's", " 12345", " 你好abc"]),
    ],
)
def test_words_of_newer_models(name: str, words: list[str]) -> None:
    """Expected by hand, from the patterns in the models' own tokenizer.json."""
    patterns = SPLITTINGS[name].patterns
    assert patterns is not None
    cut = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(p), "isolated") for p in patterns])
    assert [word for word, _ in cut.pre_tokenize_str("It's 12345 你好abc")] == words


def write(tmp_path: Path, changes: dict[str, Any]) -> GGUFFile:
    """A file with a tokenizer of bytes and nothing else; None leaves a key out."""
    alphabet = [chr(b) for b in [*range(33, 127), *range(161, 173), *range(174, 256), *range(256, 324)]]
    values: dict[str, Any] = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": [*alphabet, "th", "<s>", "<|im_end|>", "word"],
        "token_type": [1] * 257 + [3, 3, 4],
        "merges": ["t h"],
        "bos_token_id": 257,
        "eos_token_id": 258,
    } | changes
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in values.items():
        name = key if key.startswith("tokenizer.") else f"tokenizer.ggml.{key}"
        if value is None:
            continue
        if isinstance(value, list):
            writer.add_array(name, value)
        else:
            writer.add_key_value(name, value, gguf.GGUFValueType.get_type(value))
    finish(writer)
    return GGUFFile(path)


def test_flags_and_templates(tmp_path: Path) -> None:
    tokenizer = read_tokenizer(write(tmp_path, {"add_bos_token": True, "add_eos_token": True}))
    inside = tokenizer.encode("th word", add_special_tokens=False)
    assert inside[0] == 256  # the merge
    assert inside[-1] == 259  # user-defined: whole
    assert tokenizer.encode("th word") == [257, *inside, 258]
    assert tokenizer.special_tokens == {"bos_token": "<s>", "eos_token": "<|im_end|>"}
    assert tokenizer.chat_template is None
    file = write(tmp_path, {"tokenizer.chat_template": "A", "tokenizer.chat_template.tool_use": "B"})
    assert read_tokenizer(file).chat_template == {"default": "A", "tool_use": "B"}
    assert read_tokenizer(write(tmp_path, {})).encode("th") == [256]


def test_gemma_4_merges_whole_texts(tmp_path: Path) -> None:
    """Against the pipeline of the model's own tokenizer.json: cut before spaces, BPE, bytes for what has no token."""
    letters = [*"▁abcd\n", *(f"<0x{b:02X}>" for b in range(256))]
    merges = [("▁", "a"), ("b", "c"), ("▁a", "b"), ("\n", "\n"), ("▁", "▁"), ("c", "d"), ("▁▁", "▁▁")]
    tokens = ["<unk>", "<bos>", "<turn|>", *letters, *("".join(pair) for pair in merges)]
    kinds = [2, 3, 3, *[1] * 6, *[6] * 256, *[1] * len(merges)]
    own = Tokenizer(
        models.BPE(
            {token: i for i, token in enumerate(tokens)},
            merges,
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    own.normalizer = normalizers.Replace(" ", "▁")
    own.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    changes = {
        "model": "gemma4",
        "pre": None,
        "tokens": tokens,
        "token_type": kinds,
        "merges": [" ".join(pair) for pair in merges],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
    }
    tokenizer = read_tokenizer(write(tmp_path, changes))
    rng = random.Random(1)
    for _ in range(50):
        text = "".join(rng.choices("abcd \né", k=40))
        found = tokenizer.encode(text, add_special_tokens=False)
        assert found == own.encode(text).ids
        assert tokenizer.decode(found) == text
    assert tokenizer.encode("ab<turn|>") == [1, *own.encode("ab").ids, 2]


def test_all_ends_of_a_turn_are_found(tmp_path: Path) -> None:
    assert read_ends(write(tmp_path, {"eos_token_id": 257})) == (257, 258)
    assert read_ends(write(tmp_path, {"eot_token_id": 5})) == (258, 5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "bert"}, "'bert' is not read"),
        ({"model": None}, "None is not read"),
        ({"pre": "unheard-of"}, "'unheard-of' is not known"),
        ({"tokens": None}, "tokens is missing"),
        ({"tokens": "text"}, "tokens is missing or not a list"),
        ({"tokens": [1, 2]}, "does not hold a str"),
        ({"token_type": [1]}, "token_type does not hold"),
        ({"token_type": [1.5] * 260}, "token_type does not hold"),
        ({"merges": None}, "merges is missing"),
        ({"merges": ["th"]}, "two tokens each"),
        ({"merges": ["q unknown"]}, "do not fit together"),
        ({"bos_token_id": "x"}, "must be a token.s id"),
        ({"eos_token_id": 2.5}, "must be a token.s id"),
        ({"add_bos_token": 1}, "must be true or false"),
        ({"tokenizer.chat_template": 3}, "must be text"),
        ({"model": "llama"}, "scores must hold a number"),
        ({"model": "llama", "scores": [float("nan")] * 260}, "scores must hold a number"),
        ({"model": "llama", "scores": [0.0] * 260, "precompiled_charsmap": [1, 2]}, "by a table"),
        ({"model": "llama", "scores": [0.0] * 260, "remove_extra_whitespaces": True}, "normalizes spaces"),
        ({"tokens": ["a"] * 260, "token_type": [1] * 260}, "is there twice"),
    ],
)
def test_tokenizers_that_would_be_wrong_are_refused(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=message):
        read_tokenizer(write(tmp_path, changes))


ENDS: dict[str, tuple[list[tuple[str, int]], set[str]]] = {
    "types do not matter": (
        [("<|im_end|>", 1), ("<|eot_id|>", 4), ("<|im_start|>", 3)],
        {"<|im_end|>", "<|eot_id|>"},
    ),
    "Kimi": ([("[EOT]", 3), ("[EOS]", 3)], {"[EOT]", "[EOS]"}),
    "others": (
        [("</s>", 1), ("<end_of_utterance>", 3), ("<｜end▁of▁sentence｜>", 3), ("[e~[", 4)],
        {"</s>", "<end_of_utterance>", "<｜end▁of▁sentence｜>", "[e~["},
    ),
    "gpt-oss": ([("<|end|>", 3), ("<|return|>", 3), ("<|call|>", 3)], {"<|return|>", "<|call|>"}),
    "Solar": ([("<|end|>", 3), ("<|flush|>", 3), ("<|calls|>", 3)], {"<|flush|>", "<|calls|>"}),
    "half of gpt-oss": ([("<|end|>", 3), ("<|return|>", 3)], {"<|end|>", "<|return|>"}),
    "Gemma 4": (
        [("<eos>", 3), ("<turn|>", 3), ("<|tool_response>", 3), ("</s>", 1)],
        {"<eos>", "<turn|>", "<|tool_response>"},
    ),
    "a control token of Cohere": ([("<|END_OF_TURN_TOKEN|>", 3), ("<|eot|>", 1)], {"<|END_OF_TURN_TOKEN|>"}),
    "fill in the middle": ([("<|fim_pad|>", 3), ("<|file_sep|>", 3)], {"<|fim_pad|>", "<|file_sep|>"}),
}


@pytest.mark.parametrize("name", ENDS)
def test_ends_are_those_of_llama_cpp(name: str, tmp_path: Path) -> None:
    special, wanted = ENDS[name]
    old = write(tmp_path, {})
    tokens, types = old.get("tokenizer.ggml.tokens"), old.get("tokenizer.ggml.token_type")
    tokens[258] = "<end>"  # in place of <|im_end|>
    changes = {
        "tokens": [*tokens, *(token for token, _ in special)],
        "token_type": [*types, *(t for _, t in special)],
    }
    file = write(tmp_path, {**changes, "eos_token_id": 258})
    tokenizer = read_tokenizer(file)
    assert {tokenizer.id_to_token(i) for i in read_ends(file)} == wanted | {"<end>"}
    assert set(tokenizer.eos_token_ids) == set(read_ends(file))
    for i in read_ends(file):  # whole in a text, and hidden from it
        assert tokenizer.encode(str(tokenizer.id_to_token(i)), add_special_tokens=False) == [i]
        assert tokenizer.is_special(i)


def test_what_llama_cpp_warns_of_is_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = write(tmp_path, {"eos_token_id": 999_999})
    assert "tokenizer.ggml.eos_token_id is 999999" not in caplog.text
    assert [read_tokenizer(file).id_to_token(i) for i in read_ends(file)] == ["<|im_end|>"]
    assert "tokenizer.ggml.eos_token_id is 999999" in caplog.text
    pieces = ["<unk>", "<s>", "</s>", "▁", "a", "▁a"]
    llama = {
        "model": "llama",
        "tokens": pieces,
        "token_type": [2, 3, 3, 1, 1, 1],
        "scores": [0, 0, 0, -3, -2, -1],
    }
    tokenizer = read_tokenizer(write(tmp_path, {**llama, "bos_token_id": None, "eos_token_id": None}))
    assert tokenizer.encode("a a") == [1, 5, 5]
    assert tokenizer.eos_token_ids == (2,)


def test_gemma_4_begins_with_bos_whatever_the_file_says(tmp_path: Path) -> None:
    tokenizer = read_tokenizer(write(tmp_path, {"model": "gemma4", "add_bos_token": False}))
    assert tokenizer.encode("th") == [257, 256]


PIECES = "It'll 1234567 x=12 日本語 naïve\n\n ok  "
NEWEST = {
    "afmoe": "It|'ll| |1|234|567| x|=|12| |日本語| naïve|\n\n| ok|  ",
    "bailingmoe2": "It|'ll| |1|2|3|4|5|6|7| x|=|1|2| 日本語| naïve|\n\n| ok|  ",
    "cohere2moe": "It'll| |1|234|567| x|=|12| 日本語| naïve|\n\n| ok|  ",
    "deepseek-llm": "It|'|ll| |1234567| x|=|12| |日本語| na|ï|ve|\n|\n| ok|  ",
    "laguna": "It|'ll| |1|2|3|4|5|6|7| x|=|1|2| 日本語| naïve|\n\n| ok|  ",
    "minicpm5": "It|'ll| |123|456|7| x|=|12| 日本語| naïve|\n\n| ok|  ",
    "qwen35": "It|'ll| |1|2|3|4|5|6|7| x|=|1|2| 日本語| naïve|\n\n| ok|  ",
    "superbpe": "It'll |1|234|567| x=|12| 日本語 naïve\n\n ok  ",
    "viking": "It'll| |1|2|3|4|5|6|7| x=|1|2| 日本語| naïve|\n\n| ok|  ",
    "youtu": "It'll| |1|2|3|4|5|6|7| x|=|1|2| |日本語| naïve|\n\n| ok|  ",
}


@pytest.mark.parametrize("name", NEWEST)
def test_words_of_the_newest_models(name: str) -> None:
    """Expected by hand, from the patterns that llama.cpp and the models' own files have."""
    patterns = SPLITTINGS[name].patterns
    assert patterns is not None
    cut = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(p), "isolated") for p in patterns])
    assert "|".join(word for word, _ in cut.pre_tokenize_str(PIECES)) == NEWEST[name]


def test_a_vocabulary_with_marks_for_spaces_may_be_called_byte_level(tmp_path: Path) -> None:
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), "▁", "a", "▁a"]
    types = [2, 3, 3, *[6] * 256, 1, 1, 1]
    changes = {
        "pre": "sarvam-moe",
        "tokens": pieces,
        "token_type": types,
        "merges": ["▁ a"],
        "bos_token_id": 1,
    }
    tokenizer = read_tokenizer(write(tmp_path, {**changes, "eos_token_id": 2, "unknown_token_id": 0}))
    assert tokenizer.encode("a a", add_special_tokens=False) == [260, 261]
