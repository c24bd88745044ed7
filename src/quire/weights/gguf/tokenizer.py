"""The tokenizer and chat template that a GGUF file carries. Knows the keys tokenizer.*; no tensors and no model."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, normalizers
from tokenizers import Tokenizer as Backend

from quire.errors import ModelError
from quire.text.tokenizer import Tokenizer, TokenizerOptions
from quire.text.vocab import MAX_PIECES, SentencePiece, build_sentencepiece, byte_level, spaced
from quire.weights.gguf.container import GGUFFile
from quire.weights.gguf.splits import SPLITTINGS

KEY = "tokenizer.ggml."
BPE, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 2, 2, 3, 4, 5, 6
ROLES = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "sep_token": "seperator_token_id",
    "pad_token": "padding_token_id",
    "mask_token": "mask_token_id",
}
ENDS = ("eos_token_id", "eot_token_id", "eom_token_id")
# Control tokens that end a turn, for files that name only one end (as llama.cpp finds them).
_END_NAMES = """<|eot_id|> <|eom_id|> <|im_end|> <|end|> <end_of_turn> <turn|> <|endoftext|> <|end_of_text|> <|eot|>
    <EOT> <|END_OF_TURN_TOKEN|> <|return|> <|call|>"""
END_NAMES = frozenset(_END_NAMES.split())


def open_tokenizer(path: Path) -> Tokenizer:
    return read_tokenizer(GGUFFile(path))


def read_tokenizer(file: GGUFFile) -> Tokenizer:
    """Raises ModelError for a file without a tokenizer, or with one that would not give the model's own tokens."""
    vocabulary = _Vocabulary(file)
    kind = file.get(KEY + "model")
    if kind == "gpt2":
        backend, add_bos = _byte_level(vocabulary)
    elif kind == "llama":
        backend, add_bos = _sentencepiece(vocabulary), True
    elif kind == "gemma4":
        backend, add_bos = _spaced(vocabulary), True
    else:
        raise vocabulary.wrong(
            f"{KEY}model {kind!r} is not read (gpt2, llama and gemma4 are); give the model's own with --tokenizer"
        )
    _add_tokens(backend, vocabulary)
    given = {name: vocabulary.token_id(key) for name, key in ROLES.items()}
    named = {
        name: vocabulary.tokens[i] for name, i in given.items() if i is not None and vocabulary.tokens[i]
    }
    adds = [vocabulary.flag("add_bos_token", add_bos), vocabulary.flag("add_eos_token", False)]
    options = TokenizerOptions(
        named=named,
        add_bos=adds[0] and "bos_token" in named,
        add_eos=adds[1] and "eos_token" in named,
        bos_token_id=given["bos_token"],
        eos_token_ids=vocabulary.ends(),
        chat_template=_chat_template(file),
    )
    return Tokenizer(backend, options)


def read_ends(file: GGUFFile) -> tuple[int, ...]:
    """Ids of the tokens that end a text or a turn; none where the file has no vocabulary."""
    return _Vocabulary(file).ends() if KEY + "tokens" in file else ()


class _Vocabulary:
    """Tokens and their types, checked to fit each other."""

    def __init__(self, file: GGUFFile) -> None:
        self.file = file
        self.tokens: list[str] = self._list("tokens", str, None)
        self.types: list[int] = self._list("token_type", int, len(self.tokens)) or [1] * len(self.tokens)

    def _list(self, name: str, kind: type, length: int | None) -> Any:
        """A list of `length` values; without a length it must be there."""
        values = self.file.get(KEY + name)
        if values is None and length is not None:
            return []
        if not isinstance(values, list) or not 1 <= len(values) <= MAX_PIECES:
            raise self.wrong(f"{KEY}{name} is missing or not a list; give a tokenizer with --tokenizer")
        if length not in (None, len(values)) or set(map(type, values)) != {kind}:
            raise self.wrong(f"{KEY}{name} does not hold {length or 'a'} {kind.__name__} for each token")
        return values

    def wrong(self, message: str) -> ModelError:
        return ModelError(f"{self.file.path}: {message}")

    def token_id(self, key: str) -> int | None:
        value = self.file.get(KEY + key)
        if value is None or value == 0xFFFFFFFF:  # -1 in a file that could not say "none"
            return None
        if type(value) is not int or not 0 <= value < len(self.tokens):
            raise self.wrong(f"{KEY}{key} {value!r} is not one of the {len(self.tokens)} tokens")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self.file.get(KEY + key)
        if value is not None and type(value) is not bool:
            raise self.wrong(f"{KEY}{key} must be true or false, got {value!r}")
        return default if value is None else value

    def scores(self) -> list[float]:
        scores: list[float] = self._list("scores", float, len(self.tokens))
        if not scores or not all(map(math.isfinite, scores)):
            raise self.wrong(f"{KEY}scores must hold a number for each token")
        return scores

    def merges(self) -> list[tuple[str, str]]:
        lines = self.file.get(KEY + "merges")
        if not isinstance(lines, list) or len(lines) > MAX_PIECES:
            raise self.wrong(f"{KEY}merges is missing; give a tokenizer with --tokenizer")
        pairs = []
        for line in lines:
            # the first character may itself be a space in old files, so look behind it
            cut = line.find(" ", 1) if isinstance(line, str) else -1
            if cut < 1 or cut == len(line) - 1:
                raise self.wrong(f"{KEY}merges must hold two tokens each, got {str(line)[:80]!r}")
            pairs.append((line[:cut], line[cut + 1 :]))
        return pairs

    def ids(self) -> dict[str, int]:
        """Token -> id. A token that is there twice is a damaged file, but for those that are never used."""
        ids: dict[str, int] = {}
        for i, token in enumerate(self.tokens):
            if ids.setdefault(token, i) != i and self.types[i] not in (UNUSED, UNKNOWN, CONTROL):
                raise self.wrong(f"token {token!r} is there twice, as {ids[token]} and {i}")
        return ids

    def ends(self) -> tuple[int, ...]:
        found = [self.token_id(key) for key in ENDS]
        control = (i for i, kind in enumerate(self.types) if kind == CONTROL)
        named = [i for i in control if self.tokens[i] in END_NAMES]
        return tuple(dict.fromkeys([i for i in [*found, *named] if i is not None]))


def _byte_level(vocabulary: _Vocabulary) -> tuple[Backend, bool]:
    name = vocabulary.file.get(KEY + "pre")
    splitting = SPLITTINGS.get("default" if name is None else str(name))
    if splitting is None:
        raise vocabulary.wrong(
            f"{KEY}pre {name!r} is not known, so how text is split is not; give the model's own with --tokenizer"
        )
    try:
        backend = byte_level(
            vocabulary.ids(), vocabulary.merges(), splitting.patterns, ignore_merges=splitting.whole_words
        )
    except ModelError as error:
        raise vocabulary.wrong(str(error)) from error
    if splitting.nfc:
        backend.normalizer = normalizers.NFC()
    return backend, splitting.add_bos


def _spaced(vocabulary: _Vocabulary) -> Backend:
    found = vocabulary.token_id("unknown_token_id")
    unknown = None if found is None else vocabulary.tokens[found]
    try:
        return spaced(vocabulary.ids(), vocabulary.merges(), unknown)
    except ModelError as error:
        raise vocabulary.wrong(str(error)) from error


def _sentencepiece(vocabulary: _Vocabulary) -> Backend:
    if vocabulary.file.get(KEY + "precompiled_charsmap"):
        raise vocabulary.wrong("normalizes text by a table; give the model's own with --tokenizer")
    ids = [vocabulary.token_id(key) for key in ("unknown_token_id", "bos_token_id", "eos_token_id")]
    unknown = vocabulary.types.index(UNKNOWN) if ids[0] is None and UNKNOWN in vocabulary.types else ids[0]
    vocabulary.ids()
    model = SentencePiece(
        pieces=list(zip(vocabulary.tokens, vocabulary.scores(), vocabulary.types, strict=True)),
        model_type=BPE,
        byte_fallback=BYTE in vocabulary.types,
        unk_id=0 if unknown is None else unknown,
        bos_id=-1 if ids[1] is None else ids[1],
        eos_id=-1 if ids[2] is None else ids[2],
        add_dummy_prefix=vocabulary.flag("add_space_prefix", True),
        remove_extra_whitespaces=vocabulary.flag("remove_extra_whitespaces", False),
    )
    try:
        return build_sentencepiece(model, legacy=True)
    except ModelError as error:
        raise vocabulary.wrong(str(error)) from error


def _add_tokens(backend: Backend, vocabulary: _Vocabulary) -> None:
    """Control tokens are found whole in text and hidden from it; user-defined ones are found whole."""
    pairs = list(zip(vocabulary.tokens, vocabulary.types, strict=True))
    control = [token for token, kind in pairs if kind == CONTROL and token]
    whole = [token for token, kind in pairs if kind == USER_DEFINED and token]
    backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in control])
    backend.add_tokens([AddedToken(token, normalized=False) for token in whole])


def _chat_template(file: GGUFFile) -> str | dict[str, str] | None:
    default = file.get("tokenizer.chat_template")
    named = {"default": default} if default is not None else {}
    prefix = "tokenizer.chat_template."
    named |= {key[len(prefix) :]: file.get(key) for key in file.keys_under(prefix)}
    if not all(isinstance(text, str) for text in named.values()):
        raise ModelError(f"{file.path}: tokenizer.chat_template must be text")
    if not named:
        return None
    return default if len(named) == 1 and default is not None else named
