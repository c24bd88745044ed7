"""A vocabulary of all bytes and a few longer tokens, with special ones."""

from __future__ import annotations

import pytest

from quire.grammar.compiler import GrammarCompiler
from quire.grammar.vocabulary import Vocabulary

WORDS = (b'{"', b'":', b'","', b'"}', b"name", b'"name', b"abc", b"ab", b"true", b"false", b"<tool", b"  ")
END, CALL = 256 + len(WORDS), 257 + len(WORDS)
PIECES = [bytes([i]) for i in range(256)] + list(WORDS) + [b"<eos>", b"<|call|>"]


def encode(text: str) -> list[int]:
    """Longest piece first."""
    data, tokens, at = text.encode(), list[int](), 0
    while at < len(data):
        found = max((p for p in PIECES[:END] if data.startswith(p, at)), key=len)
        tokens.append(PIECES.index(found))
        at += len(found)
    return tokens


def decode(tokens: list[int]) -> str:
    return b"".join(PIECES[t] for t in tokens).decode()


@pytest.fixture(scope="session")
def vocabulary() -> Vocabulary:
    return Vocabulary(PIECES, {"<eos>": END, "<|call|>": CALL}, (END,), encode)


@pytest.fixture(scope="session")
def compiler(vocabulary: Vocabulary) -> GrammarCompiler:
    return GrammarCompiler(lambda: vocabulary)
