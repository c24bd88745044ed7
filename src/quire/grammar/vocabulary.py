"""A tokenizer in llguidance's form: the bytes of each token, and how a text is tokenized. Knows no files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from quire.lazy import Lazy
from quire.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    import llguidance
else:
    llguidance = Lazy("llguidance")


MARK = "\x02"  # no text begins with it


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """`pieces[i]` are the bytes that token i adds inside a text; b"" if it adds none or does not exist.

    `special` maps names of special tokens to ids: text never contains them. `ends` are the ids that end a text;
    a vocabulary without any gives up its last id.
    `encode` tokenizes a text without adding anything: forced text is written in its tokens.
    """

    pieces: Sequence[bytes]
    special: dict[str, int]
    ends: tuple[int, ...]
    encode: Callable[[str], list[int]]
    table: llguidance.LLTokenizer = field(init=False)

    def __post_init__(self) -> None:
        end = list(self.ends) or [len(self.pieces) - 1]
        source: Any = _Source(self.pieces, list(self.special.values()), end[0], self.encode)
        object.__setattr__(self, "ends", tuple(end))
        object.__setattr__(
            self, "table", llguidance.LLTokenizer(source, n_vocab=len(self.pieces), eos_token=end)
        )


class _Source:
    """The attributes that LLTokenizer reads, under the names that it expects."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(
        self, tokens: Sequence[bytes], special: list[int], end: int, encode: Callable[[str], list[int]]
    ) -> None:
        self.tokens = tokens
        self.special_token_ids = special
        self.eos_token_id = end
        self._encode = encode

    def __call__(self, text: str) -> list[int]:
        return self._encode(text)


def vocabulary_of(tokenizer: Tokenizer, vocab_size: int, ends: tuple[int, ...]) -> Vocabulary:
    """Ids from the tokenizer's size up to `vocab_size`, the model's, are never allowed. `ends` are the model's."""
    ids = range(vocab_size)
    special = {}
    for token_id in ids:
        if tokenizer.is_special(token_id) and (name := tokenizer.id_to_token(token_id)):
            special[name] = token_id
    pieces = [tokenizer.token_bytes(token_id) for token_id in ids]
    return Vocabulary(pieces, special, tokenizer.ends(ends, vocab_size), _Encoder(tokenizer, pieces).encode)


class _Encoder:
    """Tokenizes text that continues other text, to exactly its bytes."""

    def __init__(self, tokenizer: Tokenizer, pieces: list[bytes]) -> None:
        self._tokenizer = tokenizer
        self._pieces = pieces
        self._ids = {piece: token_id for token_id, piece in reversed(list(enumerate(pieces))) if piece}
        self._longest = max(map(len, self._ids), default=1)

    def encode(self, text: str) -> list[int]:
        """Tokens of `data` as text in the middle: if the tokenizer adds a leading space, encode behind a mark."""
        tokens = self._tokenizer.encode(text, add_special_tokens=False)
        data = text.encode()
        if self._join(tokens) == data:
            return tokens
        tokens = self._tokenizer.encode(MARK + text, add_special_tokens=False)
        for start in range(1, len(tokens)):
            if self._join(tokens[start:]) == data:
                return tokens[start:]
        return self._greedy(data)

    def _join(self, tokens: list[int]) -> bytes:
        return b"".join([self._pieces[t] for t in tokens if t < len(self._pieces)])

    def _greedy(self, data: bytes) -> list[int]:
        """Longest pieces first, for text that the tokenizer changes. Stops at bytes without a piece."""
        tokens: list[int] = []
        at = 0
        while at < len(data):
            for length in range(min(self._longest, len(data) - at), 0, -1):
                token = self._ids.get(data[at : at + length])
                if token is not None:
                    break
            else:
                break
            tokens.append(token)
            at += length
        return tokens
