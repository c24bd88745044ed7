"""Builds a fast tokenizer from vocabularies that come without tokenizer.json. Knows formats, not requests.

Reads byte-level BPE (vocab.json + merges.txt), sentencepiece BPE models and tiktoken rank files.
"""

from __future__ import annotations

import base64
import binascii
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE

from quire.errors import ModelError
from quire.files import read_bytes, read_json, read_text
from quire.text.pieces import MAX_FILE, byte_characters
from quire.text.side_files import TokenizerOptions, optional

MAX_PIECES = 4_000_000
_TIKTOKEN_LINE = re.compile(rb"[A-Za-z0-9+/]+=* [0-9]+\r?\n")

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN2_SPLIT = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_REST}"
LLAMA3_SPLIT = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}"

_GPT2_NAMES = {
    "GPT2Tokenizer",
    "GPT2TokenizerFast",
    "CodeGenTokenizer",
    "CodeGenTokenizerFast",
    "gpt2",
    "codegen",
}
_QWEN2_NAMES = {"Qwen2Tokenizer", "Qwen2TokenizerFast", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe"}

LLAMA3_RANKS = 128_000


def byte_level(
    vocab: dict[str, int],
    merges: list[tuple[str, str]],
    split: str | tuple[str, ...] | None,
    add_prefix_space: bool = False,
    **options: Any,
) -> Tokenizer:
    """Make byte-level BPE. `split` are patterns that cut text into words, one after the other; None is GPT-2's way.

    `options` go to the library's BPE. Raises ModelError if vocabulary and merges do not fit together.
    """
    backend = Tokenizer(_bpe(vocab, merges, **options))
    backend.decoder = decoders.ByteLevel()
    if split is None:
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space, use_regex=True)
    else:
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [
                *(
                    pre_tokenizers.Split(Regex(pattern), behavior="isolated", invert=False)
                    for pattern in ((split,) if isinstance(split, str) else split)
                ),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    return backend


def spaced(vocab: dict[str, int], merges: list[tuple[str, str]], unknown: str | None) -> Tokenizer:
    """BPE of whole texts in which a ▁ stands for a space; what no token covers becomes tokens of bytes (Gemma's way).

    Raises ModelError if vocabulary and merges do not fit together.
    """
    backend = Tokenizer(_bpe(vocab, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return backend


def _bpe(vocab: dict[str, int], merges: list[tuple[str, str]], **options: Any) -> BPE:
    try:
        return BPE(vocab=vocab, merges=merges, **options)
    except Exception as error:  # the library raises bare Exception
        raise ModelError(f"vocabulary and merges do not fit together: {error}") from error


def from_merges(
    vocab_path: Path, merges_path: Path, kind: str | None, add_prefix_space: bool = False
) -> Tokenizer:
    """Byte-level BPE from its two files.

    `kind` is the tokenizer_class or model_type that says how text is split before merging: GPT-2's or Qwen2's
    way. Raises ModelError for broken files or another kind: a wrong split would give wrong tokens in silence.
    """
    vocab = read_json(vocab_path, most=MAX_FILE)
    if not vocab or not all(type(i) is int and 0 <= i < MAX_PIECES for i in vocab.values()):
        raise ModelError(f"{vocab_path} must map tokens to ids")
    merges: list[tuple[str, str]] = []
    # Not splitlines(): merges hold characters such as U+0085 that Python takes for line ends.
    for number, line in enumerate(read_text(merges_path, MAX_FILE).replace("\r\n", "\n").split("\n")):
        if not line or (number == 0 and line.startswith("#version")):
            continue
        left, _, right = line.partition(" ")
        if not left or not right or " " in right:
            raise ModelError(f"{merges_path}, line {number + 1}: must be two tokens, got {line[:80]!r}")
        merges.append((left, right))
    if kind in _GPT2_NAMES:
        return byte_level(vocab, merges, None, add_prefix_space)
    if kind in _QWEN2_NAMES:
        backend = byte_level(vocab, merges, QWEN2_SPLIT)
        backend.normalizer = normalizers.NFC()
        return backend
    raise ModelError(
        f"{vocab_path.parent} has no tokenizer.json, and how {kind or 'this one'} splits text is not known; "
        "add tokenizer.json, or a tokenizer_config.json with tokenizer_class GPT2Tokenizer or Qwen2Tokenizer"
    )


def _read_ranks(path: Path) -> dict[bytes, int]:
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(read_bytes(path, MAX_FILE).splitlines(), 1):
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error) as error:
            raise ModelError(f"{path}, line {number}: must be a base64 token and its rank") from error
    if not ranks or set(ranks.values()) != set(range(len(ranks))):
        raise ModelError(f"{path}: ranks must count from 0 without gaps; the file is cut or damaged")
    return ranks


def llama3_special_tokens() -> list[str]:
    """The 256 names that follow Llama 3's 128,000 ranks, in id order (as in Llama 3.1 and later)."""
    named = [
        "<|begin_of_text|>",
        "<|end_of_text|>",
        "<|reserved_special_token_0|>",
        "<|reserved_special_token_1|>",
    ]
    named += [
        "<|finetune_right_pad_id|>",
        "<|reserved_special_token_2|>",
        "<|start_header_id|>",
        "<|end_header_id|>",
    ]
    named += ["<|eom_id|>", "<|eot_id|>", "<|python_tag|>"]
    return named + [f"<|reserved_special_token_{i}|>" for i in range(3, 256 - len(named) + 3)]


def from_ranks(path: Path) -> Tokenizer:
    """Llama 3's tokenizer from its tiktoken file: base64 tokens with ranks. Raises ModelError.

    The file does not say how text is split, so only the size that is known to be Llama 3's is read.
    """
    ranks = _read_ranks(path)
    if len(ranks) != LLAMA3_RANKS:
        raise ModelError(
            f"{path} holds {len(ranks)} ranks; without tokenizer.json only Llama 3's {LLAMA3_RANKS} are known"
        )
    chars = {b: c for c, b in byte_characters().items()}
    merges: list[tuple[int, int, int, str, str]] = []
    names = {token: "".join([chars[b] for b in token]) for token in ranks}
    for token, rank in ranks.items():
        for cut in range(1, len(token)):
            left, right = ranks.get(token[:cut]), ranks.get(token[cut:])
            if left is not None and right is not None:
                merges.append((rank, left, right, names[token[:cut]], names[token[cut:]]))
    merges.sort()
    vocab = {names[token]: rank for token, rank in ranks.items()}
    # A word that is a token stays whole even where no order of merges leads to it, as tiktoken does.
    backend = byte_level(vocab, [m[3:] for m in merges], LLAMA3_SPLIT, ignore_merges=True)
    backend.add_special_tokens(
        [AddedToken(t, normalized=False, special=True) for t in llama3_special_tokens()]
    )
    return backend


@dataclass(slots=True)
class SentencePiece:
    """The parts of a sentencepiece model file that tokenizing needs."""

    pieces: list[tuple[str, float, int]] = field(default_factory=list)
    model_type: int = 1
    byte_fallback: bool = False
    unk_id: int = 0
    bos_id: int = 1
    eos_id: int = 2
    charsmap: bytes = b""
    add_dummy_prefix: bool = True
    remove_extra_whitespaces: bool = True
    escape_whitespaces: bool = True


_BPE, _NORMAL, _CONTROL, _USER_DEFINED = 2, 1, 3, 4


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if at >= len(data) or shift > 63:
            raise ModelError("the file ends inside a number")
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Field number and value of each field of a protobuf message; numbers as int, all else as bytes."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        number, wire = key >> 3, key & 7
        if wire == 0:
            value, at = _varint(data, at)
            yield number, value
            continue
        size = {1: 8, 5: 4}.get(wire)
        if wire == 2:
            size, at = _varint(data, at)
        if number == 0 or size is None or at + size > len(data):
            raise ModelError("a field is cut short or unknown")
        yield number, data[at : at + size]
        at += size


def _signed(value: int | bytes) -> int:
    if isinstance(value, bytes):
        raise ModelError("a number was expected")
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >> 63 else value


def _bytes(value: int | bytes) -> bytes:
    if isinstance(value, int):
        raise ModelError("a message was expected")
    return value


def _piece(data: bytes) -> tuple[str, float, int]:
    text, score, kind = "", 0.0, _NORMAL
    for number, value in _fields(data):
        if number == 1:
            text = _bytes(value).decode("utf-8")
        elif number == 2:
            (score,) = struct.unpack("<f", _bytes(value))
        elif number == 3:
            kind = _signed(value)
    return text, score, kind


def parse_sentencepiece(data: bytes) -> SentencePiece:
    """Read sentencepiece's ModelProto. Raises ModelError for anything that is not one."""
    model = SentencePiece()
    try:
        for number, value in _fields(data):
            if number == 1:
                model.pieces.append(_piece(_bytes(value)))
            elif number == 2:
                for name, item in _fields(_bytes(value)):
                    known = {3: "model_type", 40: "unk_id", 41: "bos_id", 42: "eos_id"}.get(name)
                    if known:
                        setattr(model, known, _signed(item))
                    elif name == 35:
                        model.byte_fallback = bool(_signed(item))
            elif number == 3:
                flags = {3: "add_dummy_prefix", 4: "remove_extra_whitespaces", 5: "escape_whitespaces"}
                for name, item in _fields(_bytes(value)):
                    if name == 2:
                        model.charsmap = _bytes(item)
                    elif name in flags:
                        setattr(model, flags[name], bool(_signed(item)))
            if len(model.pieces) > MAX_PIECES:
                raise ModelError(f"more than {MAX_PIECES} pieces")
    except (UnicodeDecodeError, struct.error) as error:
        raise ModelError(str(error)) from error
    if not model.pieces:
        raise ModelError("it holds no pieces")
    return model


def _merges_by_score(model: SentencePiece) -> list[tuple[str, str]]:
    """Every way to make a piece of two others, best score first, as sentencepiece merges."""
    ids = {text: i for i, (text, _, kind) in enumerate(model.pieces) if kind == _NORMAL}
    found: list[tuple[float, int, int, str, str]] = []
    for text, i in ids.items():
        score = model.pieces[i][1]
        for cut in range(1, len(text)):
            left, right = text[:cut], text[cut:]
            if left in ids and right in ids:
                found.append((-score, -len(left), -len(right), left, right))
    found.sort(key=lambda m: m[:3])
    return [(m[3], m[4]) for m in found]


def from_sentencepiece(path: Path, *, legacy: bool) -> tuple[Tokenizer, SentencePiece]:
    """Llama 2's and Mistral's kind: sentencepiece BPE with byte fallback. Raises ModelError for others.

    `legacy` puts the leading space before every stretch of text between special tokens, not only the first.
    """
    try:
        model = parse_sentencepiece(read_bytes(path, MAX_FILE))
    except ModelError as error:
        raise ModelError(f"{path} is not a readable sentencepiece model: {error}") from error
    try:
        return build_sentencepiece(model, legacy=legacy), model
    except ModelError as error:
        raise ModelError(f"{path} {error}") from error


def build_sentencepiece(model: SentencePiece, *, legacy: bool) -> Tokenizer:
    """The tokenizer of a model that was read. ModelErrors go on after the name of the file."""
    if model.model_type != _BPE:
        raise ModelError("is not a BPE sentencepiece model; convert it to tokenizer.json with transformers")
    if model.remove_extra_whitespaces or not model.escape_whitespaces:
        raise ModelError("normalizes spaces in a way only its tokenizer.json can tell; add that file")
    vocab = {text: i for i, (text, _, _) in enumerate(model.pieces)}
    if len(vocab) != len(model.pieces) or not 0 <= model.unk_id < len(model.pieces):
        raise ModelError("holds a piece twice or no unknown piece")
    unk = model.pieces[model.unk_id][0]
    bpe = _bpe(
        vocab, _merges_by_score(model), unk_token=unk, fuse_unk=True, byte_fallback=model.byte_fallback
    )
    backend = Tokenizer(bpe)
    steps: list[Any] = [normalizers.Precompiled(model.charsmap)] if model.charsmap else []
    if legacy and model.add_dummy_prefix:
        steps.append(normalizers.Prepend("▁"))
    if legacy or not model.add_dummy_prefix:
        steps.append(normalizers.Replace(" ", "▁"))
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme="first", split=False)
    backend.normalizer = normalizers.Sequence(steps)
    decode: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if model.add_dummy_prefix:
        decode.append(decoders.Strip(content=" ", left=1, right=0))
    backend.decoder = decoders.Sequence(decode)
    special = {model.unk_id, model.bos_id, model.eos_id} - {-1}
    for i, (text, _, kind) in enumerate(model.pieces):
        if kind in (_CONTROL, _USER_DEFINED) or i in special:
            control = kind != _USER_DEFINED
            # A piece with a space is found in text whose spaces are ▁, which is so before a dummy prefix alone.
            spaced = "▁" in text and not control and not model.add_dummy_prefix
            backend.add_tokens([AddedToken(text, normalized=spaced, special=control)])
    return backend


def read_older(directory: Path, config: dict[str, Any], options: TokenizerOptions) -> Tokenizer:
    """Build a tokenizer from the best file of a directory without tokenizer.json, and complete `options` from it."""
    if (directory / "tokenizer.model").exists():
        return _from_model_file(directory / "tokenizer.model", config, options)
    kind = config.get("tokenizer_class") or optional(directory / "config.json").get("model_type")
    for names, merges, known in (("vocab.json", "merges.txt", None), ("encoder.json", "vocab.bpe", "gpt2")):
        if (directory / names).exists() and (directory / merges).exists():
            options.named.setdefault("eos_token", "<|endoftext|>")
            spaced = config.get("add_prefix_space") is True
            return from_merges(directory / names, directory / merges, known or kind, spaced)
    raise ModelError(
        f"{directory} has no tokenizer: needs tokenizer.json, tokenizer.model, or vocab.json with merges.txt"
    )


def _from_model_file(path: Path, config: dict[str, Any], options: TokenizerOptions) -> Tokenizer:
    if _TIKTOKEN_LINE.match(read_bytes(path, MAX_FILE)):
        options.named.setdefault("bos_token", "<|begin_of_text|>")
        options.named.setdefault("eos_token", "<|end_of_text|>")
        backend = from_ranks(path)
    else:
        backend, model = from_sentencepiece(path, legacy=config.get("legacy") is not False)
        for role, index in (
            ("bos_token", model.bos_id),
            ("eos_token", model.eos_id),
            ("unk_token", model.unk_id),
        ):
            if 0 <= index < len(model.pieces):
                options.named.setdefault(role, model.pieces[index][0])
    if options.add_bos is None:
        options.add_bos = "bos_token" in options.named
    return backend
