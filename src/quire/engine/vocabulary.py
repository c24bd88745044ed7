"""The tokenizer's vocabulary in the form that grammars need. Knows no requests."""

from __future__ import annotations

from quire.grammar.vocabulary import Vocabulary
from quire.text.tokenizer import Tokenizer

MARK = "\x02"  # no text begins with it


def vocabulary_of(tokenizer: Tokenizer, vocab_size: int, ends: tuple[int, ...]) -> Vocabulary:
    """Ids from the tokenizer's size up to `vocab_size`, the model's, are never allowed. `ends` are the model's too."""
    ids = range(vocab_size)
    special = {}
    for token_id in ids:
        if tokenizer.is_special(token_id) and (name := tokenizer.id_to_token(token_id)):
            special[name] = token_id
    pieces = [tokenizer.token_bytes(token_id) for token_id in ids]
    return Vocabulary(pieces, special, ends or tokenizer.eos_token_ids, _Encoder(tokenizer, pieces).encode)


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
