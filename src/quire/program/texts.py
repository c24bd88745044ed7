"""The tokenizer of an engine that runs programs: loaded beside the steps, when the first program comes."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from quire.errors import QuireError
from quire.text.tokenizer import Tokenizer
from quire.types import Request

MAX_HEADS = 32
_WORD_END = re.compile(
    r".*[A-Za-z](?= [A-Za-z])", re.DOTALL
)  # up to the last end of a word within a line of words
_WORD_BEGIN = re.compile(r" [A-Za-z]")
_SPANS = re.compile(rb"[A-Za-z] ")
_ANCHOR = "a"


class Cuts:
    """Places where a text can be cut: whether a tokenizer's tokens end where words end.

    If no token has a letter before a space, a text falls apart at "letter, space, letter": the parts, encoded alone,
    give the same tokens. That holds for BPE, whose merges cannot cross it, as for unigram models, whose best path
    passes there.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        vocab = tokenizer.backend.get_vocab(with_added_tokens=True).values()
        self.anchor = tokenizer.encode(_ANCHOR, add_special_tokens=False)
        whole = tokenizer.encode(_ANCHOR)
        adds_end = whole[len(whole) - len(self.anchor) :] != self.anchor
        self.at_words = not adds_end and not any(map(_SPANS.search, map(tokenizer.token_bytes, vocab)))


class Encoder:
    """Tokens of the texts of one program, with special tokens at their start as the tokenizer adds them."""

    def __init__(self, cuts: Cuts) -> None:
        self._cuts, self._tokenizer = cuts, cuts.tokenizer
        self._heads: OrderedDict[str, list[int]] = OrderedDict()  # beginnings up to the end of a word

    def encode(self, text: str) -> list[int]:
        """Return the tokens of `text`."""
        if text in self._heads:
            return self._heads[text]
        head = self._known_head(text)
        whole = self._longest_head(text, head)
        if whole != head:
            self.learn(whole, self._after(head, whole))
        return self._after(whole, text)

    def long_part(self, text: str, most: int) -> str | None:
        """Find the beginning of `text` to `learn` first if `encode` would tokenize more than about `most` letters."""
        if text in self._heads:
            return None
        head = self._known_head(text)
        whole = self._longest_head(text, head)
        if len(text) - len(whole) > most:
            return text
        return whole if len(whole) - len(head) > most else None

    def learn(self, head: str, tokens: list[int]) -> None:
        """Remember the tokens of a text that is whole, or a beginning up to the end of a word."""
        self._heads[head] = tokens
        if len(self._heads) > MAX_HEADS:
            self._heads.popitem(last=False)

    def _known_head(self, text: str) -> str:
        """Find the longest beginning of `text` whose tokens are known."""
        if not self._cuts.at_words:
            return ""
        head = max((head for head in self._heads if self._continues(text, head)), key=len, default="")
        if head:
            self._heads.move_to_end(head)
        return head

    def _longest_head(self, text: str, head: str) -> str:
        """Find the beginning of `text` up to the last end of a word; `head` if there is none after it."""
        end = _WORD_END.match(text, len(head)) if self._cuts.at_words else None
        return head if end is None else text[: end.end()]

    def _continues(self, text: str, head: str) -> bool:
        """Tell whether `text` is `head`, which ends in a letter, then a space, a letter, and more."""
        ends = head[-1:].isascii() and head[-1:].isalpha()
        return ends and text.startswith(head) and _WORD_BEGIN.match(text, len(head)) is not None

    def _after(self, head: str, text: str) -> list[int]:
        """Return the tokens of `text`, whose beginning `head` is tokenized already."""
        if not head:
            return self._tokenizer.encode(text)
        anchor = self._cuts.anchor
        rest = self._tokenizer.encode(_ANCHOR + text[len(head) :], add_special_tokens=False)
        if rest[: len(anchor)] != anchor:
            return self._tokenizer.encode(text)
        return self._heads[head] + rest[len(anchor) :]


T = TypeVar("T")


class Texts:
    """Loads a tokenizer once, and is the gate that holds programs meanwhile. Without `load`, programs are refused."""

    def __init__(self, load: Callable[[], Tokenizer] | None, max_model_len: int, caching: bool) -> None:
        self.max_model_len, self.caching = max_model_len, caching
        self._load = load
        self._loaded: Future[Tokenizer] | None = None
        self._cuts: Cuts | None = None
        self._threads: ThreadPoolExecutor | None = None

    def hold(self, request: Request) -> Future[Tokenizer] | None:
        """Hold a program until the tokenizer is loaded, which begins with the first program."""
        if request.program is None or self._load is None:
            return None  # without `load`, `tokenizer` raises
        if self._loaded is None:
            self._loaded = self.beside(self._load)
        return None if self._loaded.done() else self._loaded

    def remove(self, request_id: str) -> None:
        """Forget nothing: all programs wait for the same."""

    def beside(self, work: Callable[[], T]) -> Future[T]:
        """Run `work` in a thread."""
        if self._threads is None:
            self._threads = ThreadPoolExecutor(1, "quire-texts")
        return self._threads.submit(work)

    @property
    def tokenizer(self) -> Tokenizer:
        """QuireError if there is none or it cannot be loaded."""
        if self._loaded is None:
            raise QuireError("this engine has no tokenizer, which programs need")
        return self._loaded.result()

    @property
    def cuts(self) -> Cuts:
        """Find where the tokenizer's tokens end, once."""
        if self._cuts is None:
            self._cuts = Cuts(self.tokenizer)
        return self._cuts
