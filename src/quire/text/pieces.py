"""Computes the exact bytes that each token adds to a text, from a tokenizer's decoder. Knows no files.

Byte-level BPE writes a byte as a printable character (GPT-2, Radford et al. 2019); sentencepiece writes a
space as U+2581 and an unknown byte as `<0xXX>` (Kudo and Richardson 2018). Both map each token by itself, so
text can be joined as bytes and turned into characters once, wherever token borders fall.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import tokenizers

from quire.errors import ModelError, RequestError

Part = str | bytes
Step = Callable[[Part], Part]

MAX_FILE = 256 << 20
"""MAX_FILE bounds the bytes of a vocabulary's file."""
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>\Z")


def byte_characters() -> dict[str, int]:
    """Make GPT-2's map from printable character to the byte it stands for (256 entries)."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [b for b in range(256) if b not in set(plain)]
    return {chr(b): b for b in plain} | {chr(256 + i): b for i, b in enumerate(rest)}


def _byte_level() -> Step:
    table = byte_characters()

    def step(part: Part) -> Part:
        if isinstance(part, bytes):
            return part
        # A token with any character outside the map was added as plain text.
        codes = [table.get(c) for c in part]
        return part.encode() if None in codes else bytes(c for c in codes if c is not None)

    return step


def _byte_fallback(part: Part) -> Part:
    found = _BYTE_TOKEN.match(part) if isinstance(part, str) else None
    return bytes([int(found.group(1), 16)]) if found else part


def _replace(old: str, new: str) -> Step:
    return lambda part: part if isinstance(part, bytes) else part.replace(old, new)


def _continued(part: Part, prefix: str) -> Part:
    """Decode WordPiece: a token goes on with the word before it, or begins one."""
    if isinstance(part, bytes):
        return part
    return part.removeprefix(prefix) if part.startswith(prefix) else f" {part}"


def _unsupported(what: str) -> ModelError:
    return ModelError(f"tokenizer decoder {what} is not supported; byte-level and sentencepiece decoders are")


class _Chain:
    """The decoder as two lists of steps: for a token inside a text, and for the first token of one."""

    def __init__(self, decoder: dict[str, Any] | None) -> None:
        self.inside: list[Step] = []
        self.first: list[Step] = []
        self.strip = b""
        self.joins_with_space = decoder is None
        self._fused = False
        if decoder is None:
            self.inside.append(lambda part: b" " + part.encode() if isinstance(part, str) else part)
        else:
            self._add(decoder)

    def _both(self, step: Step) -> None:
        self.inside.append(step)
        self.first.append(step)

    def _add(self, decoder: dict[str, Any]) -> None:
        kind = decoder.get("type")
        if kind == "Sequence":
            for part in decoder["decoders"]:
                self._add(part)
        elif kind == "ByteLevel":
            self._both(_byte_level())
        elif kind == "ByteFallback":
            self._both(_byte_fallback)
        elif kind == "Fuse":
            self._fused = True
        elif kind == "Replace" and "String" in decoder["pattern"] and not self._fused:
            self._both(_replace(decoder["pattern"]["String"], decoder["content"]))
        elif kind == "Strip" and self._fused and decoder["start"] in (0, 1) and decoder["stop"] == 0:
            self.strip = decoder["content"].encode() if decoder["start"] else b""
        elif (
            kind == "WordPiece" and not self._fused
        ):  # its clean-up of spaces looks at whole texts, and is left out
            prefix = decoder.get("prefix", "##")
            self.inside.append(lambda part: _continued(part, prefix))
        elif kind == "Metaspace" and not self._fused:
            mark = decoder.get("replacement", "▁")
            prefixed = decoder.get("prepend_scheme", "always") != "never"
            self.inside.append(_replace(mark, " "))
            self.first.append(_replace(mark, "" if prefixed else " "))
        else:
            raise _unsupported(json.dumps(decoder, ensure_ascii=False))


def _run(steps: list[Step], token: str) -> bytes:
    part: Part = token
    for step in steps:
        part = step(part)
    return part if isinstance(part, bytes) else part.encode()


class Pieces(dict[int, bytes]):
    """Token id -> the bytes it adds after other text, filled on demand; an id without a token adds none.

    Dict writes are atomic and every writer computes the same value, so threads may share it.
    Raises ModelError for a decoder that cannot be read as a per-token map.
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        super().__init__()
        decoder = backend.decoder
        self._token = backend.id_to_token
        self._chain = _Chain(None if decoder is None else json.loads(decoder.__getstate__()))
        self.joins_with_space = self._chain.joins_with_space

    def _look_up(self, token_id: int) -> str:
        try:
            return self._token(token_id) or ""
        except (OverflowError, TypeError) as error:
            raise RequestError(f"{token_id!r} is not a token id: must be an integer >= 0") from error

    def __missing__(self, token_id: int) -> bytes:
        token = self._look_up(token_id)
        piece = self[token_id] = _run(self._chain.inside, token) if token else b""
        return piece

    def at_start(self, token_id: int) -> bytes:
        """Return the token's bytes at the start of a text: without the space that sentencepiece puts before it."""
        token = self._look_up(token_id)
        data = _run(self._chain.first, token) if token else b""
        return data.removeprefix(self._chain.strip)


class VisiblePieces(dict[int, bytes]):
    """`Pieces` with the hidden (special) tokens adding nothing."""

    def __init__(self, pieces: Pieces, hidden: frozenset[int]) -> None:
        super().__init__(dict.fromkeys(hidden, b""))
        self._pieces = pieces

    def __missing__(self, token_id: int) -> bytes:
        piece = self[token_id] = self._pieces[token_id]
        return piece
