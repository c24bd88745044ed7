"""A tokenizer in llguidance's form: the bytes of each token, and how a text is tokenized. Knows no files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from quire.lazy import Lazy

if TYPE_CHECKING:
    import llguidance
else:
    llguidance = Lazy("llguidance")


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
