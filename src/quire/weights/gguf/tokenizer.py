"""The tokenizer and chat template that a GGUF file carries. Knows the keys tokenizer.*; no tensors and no model."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, normalizers
from tokenizers import Tokenizer as Backend

from quire.errors import ModelError
from quire.text.side_files import TokenizerOptions
from quire.text.tokenizer import Tokenizer
from quire.text.vocab import (
    LLAMA3_SPLIT,
    MAX_PIECES,
    QWEN2_SPLIT,
    SentencePiece,
    build_sentencepiece,
    byte_level,
    spaced,
)
from quire.weights.gguf.container import GGUFFile


@dataclass(frozen=True, slots=True)
class Splitting:
    """`patterns` None is GPT-2's own way. `whole_words`: a word that is a token stays whole, whatever the merges."""

    patterns: tuple[str, ...] | None
    whole_words: bool = False
    add_bos: bool = False  # where the file does not say
    nfc: bool = False


_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_END = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_HEAD = r"[^\r\n\p{L}\p{N}]?"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_GPT4O = (
    rf"{_HEAD}{_UPPER}*{_LOWER}+{_SUFFIX}|{_HEAD}{_UPPER}+{_LOWER}*{_SUFFIX}|\p{{N}}{{1,3}}"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_END}"
)
_TEKKEN = (
    rf"{_HEAD}{_UPPER}*{_LOWER}+|{_HEAD}{_UPPER}+{_LOWER}*|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_END}"
)
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    r"[一-龥\x{3040}-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    rf"|{_END}",
)
_CONTRACTED = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_NO_HAN = "&&[^\\p{Han}]"
_UPPER_NO_HAN, _LOWER_NO_HAN = f"{_UPPER[:-1]}{_NO_HAN}]", f"{_LOWER[:-1]}{_NO_HAN}]"
_KIMI = (
    rf"\p{{Han}}+|{_HEAD}{_UPPER_NO_HAN}*{_LOWER_NO_HAN}+{_SUFFIX}|{_HEAD}{_UPPER_NO_HAN}+{_LOWER_NO_HAN}*{_SUFFIX}"
    rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_END}"
)
_SEED = rf"{_CONTRACTED}|{_HEAD}\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_END}"
_EXAONE_MOE = (
    rf"{_CONTRACTED}|{_HEAD}(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]?"
    r"|\s*[\r\n]|\s+(?!\S)|\s+"
)
_SPACES = "|".join(rf"\s{{{n}}}(?!\S)" for n in (512, 256, 128, 64, 32, 16, 8, 4))
_JAIS2 = (
    rf"{_CONTRACTED}|{_HEAD}\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|{_SPACES}"
    r"|\s{1,2}(?!\S)|\s"
)
_PUNCTUATED = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""
_SPARK = (
    rf"{_PUNCTUATED}|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+| ?[\p{{P}}\p{{S}}]+|[\r\n]|\s+(?!\S)|\s+"
)
_ASIAN = (
    "[一-\u9fff㐀-\u4dbf豈-\ufaff\u3040-ゟ゠-ヿ\uff65-ﾟ⼀-\u2fdfเ-\u0e7f\u0e80-\u0effក-\u17ffက-႟ꩠ-ꩿꧠ-\ua9ff가-\ud7af"
    "ᄀ-ᇿ]+"
)
_AFMOE = (
    r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))",
    _ASIAN,
    rf"{_PUNCTUATED}|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_END}",
)
_YOUTU = (
    r"[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|[一-龥\x{3040}-ゟ゠-ヿ]+",
    rf"{_HEAD}{_UPPER}*{_LOWER}+{_SUFFIX}|{_HEAD}{_UPPER}+{_LOWER}*{_SUFFIX}|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_END}",
)
_DEEPSEEK = (
    r"[\r\n]",
    r"\s?[[\p{Lu}\p{Ll}\p{Lt}]&&[^\x{1d400}-\x{1d7ff}\x{16e40}-\x{16e7f}]]+",
    r"\s?[!-/:-~！-／：-～‘-‟　-。]+",
    r"\s+$",
    r"[一-龥ࠀ-一가-\x{d7ff}]+",
    r"\p{N}+",
)
_BAILING = (
    rf"'(?i:[sdmt]|ll|ve|re)|{_HEAD}\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
)
_QWEN35 = rf"{_CONTRACTED}|{_HEAD}[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_END}"
_MINICPM5 = rf"{_CONTRACTED}|{_HEAD}\p{{L}}+|\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_END}"
_TURKISH = rf"{_HEAD}\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_END}"
_CHAMELEON = (
    r"<sentinel:[0-9]+>",
    r"(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
    r"([\t\n]|    |  )",
    r"\p{N}",
    r"[\p{P}!-/:-@\[-`{-~]",
    _GPT2,
)
_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"
_BY_NAMES: tuple[tuple[str, Splitting], ...] = (
    (
        "gpt-2 gpt2 phi-2 mpt olmo jina-es jina-de jina-v1-en jina-v2-es jina-v2-de modern-bert jais exaone4 "
        "trillion granite-docling gigachat a.x-4.0 mellum",
        Splitting(None),
    ),
    (
        "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano",
        Splitting((LLAMA3_SPLIT,), whole_words=True, add_bos=True),
    ),
    ("dbrx smaug-bpe chatglm-bpe", Splitting((LLAMA3_SPLIT,))),
    ("glm4 glm5", Splitting((LLAMA3_SPLIT,), whole_words=True)),
    ("qwen2", Splitting((QWEN2_SPLIT,), nfc=True)),
    ("deepseek-r1-qwen stablelm2 megrez hunyuan solar-open grok-2 kormo f2llmv2", Splitting((QWEN2_SPLIT,))),
    ("qwen35", Splitting((_QWEN35,), nfc=True)),
    ("laguna", Splitting((r"[^\n]+|[\n]+", QWEN2_SPLIT))),
    ("minicpm5", Splitting((r"\p{N}{1,3}", _MINICPM5), whole_words=True)),
    ("ufakzeka", Splitting((_TURKISH,))),
    ("bailingmoe bailingmoe2 llada-moe", Splitting((_BAILING,))),
    ("starcoder refact command-r smollm codeshell exaone minerva-7b mellum2", Splitting((r"\p{N}", _GPT2))),
    ("chameleon", Splitting(_CHAMELEON, add_bos=True)),
    ("superbpe", Splitting((r"\p{N}+", r"\d{1,3}(?=(?:\d{3})*(?!\d))"))),
    ("deepseek-llm", Splitting(_DEEPSEEK)),
    ("afmoe", Splitting(_AFMOE)),
    ("youtu", Splitting(_YOUTU, whole_words=True)),
    ("spark2_5", Splitting((*_DEEPSEEK3[:2], _SPARK, r"\p{N}"))),
    ("falcon", Splitting((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]"))),
    ("default", Splitting((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"))),
    (
        "deepseek-coder",
        Splitting((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[一-龥ࠀ-一가-\x{d7ff}]+", r"\p{N}")),
    ),
    ("deepseek-v3 hunyuan-dense joyai-llm hy_v4", Splitting(_DEEPSEEK3)),
    ("kimi-k2", Splitting((_KIMI,))),
    ("seed-coder", Splitting((_SEED,))),
    ("exaone-moe", Splitting((_EXAONE_MOE,))),
    ("jais-2", Splitting((_JAIS2,))),
    ("bloom poro-chat gpt3-finnish", Splitting((_BLOOM,))),
    ("viking", Splitting((_BLOOM, r"\p{N}"))),
    ("gpt-4o llama4 kanana2 minimax-m2 talkie", Splitting((_GPT4O,))),
    ("tiny_aya cohere2moe", Splitting((r"\d{1,3}(?=(?:\d{3})*\b)", _GPT4O))),
    ("tekken", Splitting((_TEKKEN,), whole_words=True, add_bos=True)),
)
SPLITTINGS: Mapping[str, Splitting] = {
    name: splitting for names, splitting in _BY_NAMES for name in names.split()
}


log = logging.getLogger(__name__)

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
ENDS = (
    "eos_token_id",
    "eot_token_id",
    "eom_token_id",
    "fim_pad_token_id",
    "fim_rep_token_id",
    "fim_sep_token_id",
)
# END_NAMES end an answer whatever their type, as in llama.cpp; CONTROL_ENDS do as control tokens.
_END_NAMES = """<|eot_id|> <|eom_id|> <|im_end|> <|end|> <|return|> <|call|> <|flush|> <|calls|> <end_of_turn>
    <|endoftext|> </s> <EOT> _<EOT> [EOT] [EOS] <|end_of_text|> <end_of_utterance> <eos> <turn|> <|tool_response> [e~[
    <｜end▁of▁sentence｜> <|fim_pad|> <fim-pad> <fim_pad> <PAD> [PAD] <|fim_repo|> <|repo_name|> <fim-repo> <REPO>
    <reponame> <|file_sep|>"""
END_NAMES = frozenset(_END_NAMES.split())
CONTROL_ENDS = frozenset(("<|eot|>", "<|END_OF_TURN_TOKEN|>"))
# INNER_ENDS do not end the answer where tokens of each set after them do (gpt-oss, Solar Open, Gemma 4).
INNER_ENDS = (
    ("<|end|>", {"<|return|>", "<|flush|>"}, {"<|call|>", "<|calls|>"}),
    ("</s>", {"<|tool_response>"}, {"<|tool_response>"}),
)
# DEFAULTS of sentencepiece's ids, for files that name none.
DEFAULTS = {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}
# SPACED_PRE name byte-level vocabularies' splits that are none: their tokens are of Gemma's kind.
SPACED_PRE = ("gemma4", "sarvam-moe")


def open_tokenizer(path: Path) -> Tokenizer:
    return read_tokenizer(GGUFFile(path))


def read_tokenizer(file: GGUFFile) -> Tokenizer:
    """Raises ModelError for a file without a tokenizer, or with one that would not give the model's own tokens."""
    vocabulary = _Vocabulary(file)
    kind = file.get(KEY + "model")
    gemma4 = "gemma4" in (kind, vocabulary.pre)
    if kind == "gemma4" or (kind == "gpt2" and vocabulary.pre in SPACED_PRE):
        backend, add_bos = _spaced(vocabulary), gemma4
    elif kind == "gpt2":
        backend, add_bos = _byte_level(vocabulary)
    elif kind == "llama":
        backend, add_bos = _sentencepiece(vocabulary), True
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
    if gemma4 and not adds[0]:  # files of April 2026 say so, and the model degrades without it
        log.warning("%s: %sadd_bos_token is false, which is not so for Gemma 4: it is added", file.path, KEY)
        adds[0] = True
    options = TokenizerOptions(
        where=str(file.path),
        named=named,
        add_bos=adds[0] and "bos_token" in named,
        add_eos=adds[1] and "eos_token" in named,
        bos_token_id=given["bos_token"],
        eos_token_ids=vocabulary.ends,
        chat_template=_chat_template(file),
    )
    return Tokenizer(backend, options)


def read_ends(file: GGUFFile) -> tuple[int, ...]:
    """Ids of the tokens that end a text or a turn; none where the file has no vocabulary."""
    return _Vocabulary(file).ends if KEY + "tokens" in file else ()


class _Vocabulary:
    """Tokens and their types, checked to fit each other. `ends` end an answer; all of them are control tokens."""

    def __init__(self, file: GGUFFile) -> None:
        self.file = file
        self.pre = file.get(KEY + "pre")
        self.tokens: list[str] = self._list("tokens", {str}, None)
        types: list[int] = self._list("token_type", {int}, len(self.tokens))
        self.types = list(types) or [1] * len(self.tokens)
        self._ids: dict[str, int | None] = {}
        self.ends = self._find_ends()
        for i in self.ends:
            self.types[i] = CONTROL

    def _find_ends(self) -> tuple[int, ...]:
        keyed = [self.token_id(key) for key in ENDS]
        named = [
            i
            for i, token in enumerate(self.tokens)
            if token in END_NAMES or (token in CONTROL_ENDS and self.types[i] == CONTROL)
        ]
        found = dict.fromkeys([i for i in [*keyed, *named] if i is not None])
        texts = {self.tokens[i] for i in found}
        inner = {end for end, *others in INNER_ENDS if all(not texts.isdisjoint(some) for some in others)}
        return tuple(i for i in found if self.tokens[i] not in inner)

    def _list(self, name: str, kinds: set[type], length: int | None) -> Any:
        """A list of `length` values; without a length it must be there."""
        values = self.file.get(KEY + name)
        if values is None and length is not None:
            return []
        if not isinstance(values, list) or not 1 <= len(values) <= MAX_PIECES:
            raise self.wrong(f"{KEY}{name} is missing or not a list; give a tokenizer with --tokenizer")
        if length not in (None, len(values)) or not set(map(type, values)) <= kinds:
            named = " or ".join(sorted(kind.__name__ for kind in kinds))
            raise self.wrong(f"{KEY}{name} does not hold {length or 'a'} {named} for each token")
        return values

    def wrong(self, message: str) -> ModelError:
        return ModelError(f"{self.file.path}: {message}")

    def token_id(self, key: str) -> int | None:
        """The id under a key; None if there is none, or one beyond the tokens."""
        if key not in self._ids:
            self._ids[key] = self._read_id(key)
        return self._ids[key]

    def _read_id(self, key: str) -> int | None:
        value, count = self.file.get(KEY + key), len(self.tokens)
        if type(value) is int and 0 <= value < count:
            return value
        if value is not None and type(value) is not int:
            raise self.wrong(f"{KEY}{key} must be a token's id, got {value!r}")
        if value not in (None, -1, 0xFFFFFFFF):  # -1: none
            log.warning(
                "%s: %s%s is %d, and there are %d tokens: it is ignored",
                self.file.path,
                KEY,
                key,
                value,
                count,
            )
        default = DEFAULTS.get(key) if self.file.get(KEY + "model") == "llama" and value is None else None
        return default if default is not None and default < count else None

    def flag(self, key: str, default: bool) -> bool:
        value = self.file.get(KEY + key)
        if value is not None and type(value) is not bool:
            raise self.wrong(f"{KEY}{key} must be true or false, got {value!r}")
        return default if value is None else value

    def scores(self) -> list[float]:
        scores: list[float] = self._list("scores", {float, int}, len(self.tokens))
        if not scores or not all(map(math.isfinite, scores)):
            raise self.wrong(f"{KEY}scores must hold a number for each token")
        return list(map(float, scores))

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


def _byte_level(vocabulary: _Vocabulary) -> tuple[Backend, bool]:
    name = vocabulary.pre
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
