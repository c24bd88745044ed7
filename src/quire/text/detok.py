"""Token ids to text as they come, on bytes: no split character, no leaked stop string. Knows one output."""

from __future__ import annotations

from bisect import bisect_left
from codecs import utf_8_decode
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from typing import TYPE_CHECKING

from quire.errors import EngineError
from quire.lazy import Lazy
from quire.params import SamplingParams
from quire.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from quire.text import stop_strings
    from quire.text.stop_strings import Narrow
else:
    stop_strings = Lazy("quire.text.stop_strings")


def _incomplete_tail(data: bytes) -> bytes:
    """Find the bytes at the end of `data` that begin a UTF-8 sequence without completing it (0 to 3 bytes)."""
    for size in range(1, min(3, len(data)) + 1):
        if data[-size] >= 0xC0:
            return data[-size:] if utf_8_decode(data[-size:], "replace", False)[1] == 0 else b""
        if data[-size] < 0x80:
            return b""
    return b""


def _continues(tail: bytes, data: bytes) -> bool:
    """Whether the first byte of `data` carries on the unfinished sequence `tail`."""
    text, used = utf_8_decode(tail + data[:1], "replace", False)
    return used == 0 or (used == len(tail) + 1 and len(text) == 1)


class Detokenizer:
    """Text of one output. `push` gives new text that is safe to send, `finish` the rest.

    All text given equals the tokenizer's decoding of the output after the prompt, cut at the stop string. A
    character that the prompt's last token began and the output completes belongs to the output.
    `stopped` is the stop string that was found. `offsets[i]` is the start of token i in the text. Before `min_tokens`
    tokens no stop string counts. Tokens after a stop are ignored.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Sequence[str] = (),
        include_stop_str_in_output: bool = False,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
        *,
        prompt_tokens: Sequence[int] = (),
        min_tokens: int = 0,
        stops: Narrow | None = None,
    ) -> None:
        self.stopped: str | None = None
        self.offsets: list[int] = []
        self._tokenizer = tokenizer
        self._table: Mapping[int, bytes] = tokenizer.pieces(skip_special_tokens)
        matcher = stop_strings.StopMatcher(stop) if stop else None
        self._matcher = matcher if matcher is None or stops is None else stops(matcher)
        self._include_stop = include_stop_str_in_output
        self._min_tokens = min_tokens
        # Only a tokenizer that joins tokens with spaces has any between special tokens.
        self._tight = tokenizer.joins_with_space and not (
            skip_special_tokens or spaces_between_special_tokens
        )
        self._after_added = bool(prompt_tokens) and tokenizer.is_added(prompt_tokens[-1])
        self._at_start = not any(self._table[t] for t in prompt_tokens)
        self._tail = self._prompt_tail(prompt_tokens)
        self._fresh = True
        self._finished = False
        self._pending = b""
        self._held = ""
        self._length = 0
        self._cut: int | None = None

    @classmethod
    def for_sampling(
        cls,
        tokenizer: Tokenizer,
        sampling: SamplingParams,
        prompt_tokens: Sequence[int] = (),
        stops: Narrow | None = None,
    ) -> Detokenizer:
        """Make the detokenizer for a request's parameters. `stops` may narrow where stop strings are found."""
        return cls(
            tokenizer,
            tuple(sampling.stop or ()),
            sampling.include_stop_str_in_output,
            sampling.skip_special_tokens,
            sampling.spaces_between_special_tokens,
            prompt_tokens=prompt_tokens,
            min_tokens=sampling.min_tokens,
            stops=stops,
        )

    def twin(self) -> Detokenizer:
        """Make another detokenizer for the same request, before any token: both use the tables of one matcher."""
        other = copy(self)
        other.offsets = []
        other._matcher = None if self._matcher is None else self._matcher.twin()
        return other

    def _prompt_tail(self, prompt_tokens: Sequence[int]) -> bytes:
        data = b""
        for token in reversed(prompt_tokens):
            if len(data) >= 3:
                break
            data = self._table[token] + data
        return _incomplete_tail(data)

    def shows(self, token: int) -> bool:
        """Whether the text shows anything of a token."""
        return bool(self._table[token])

    @property
    def num_tokens(self) -> int:
        """The number of tokens taken so far, including the one that completed a stop string."""
        return len(self.offsets)

    @property
    def num_tokens_in_text(self) -> int:
        """The number of tokens that begin before the end of the text: with a stop string, before the cut."""
        return len(self.offsets) if self._cut is None else bisect_left(self.offsets, self._cut)

    def push(self, token_ids: Iterable[int]) -> str:
        """Take the next tokens; give the text that can no longer change or be part of a stop string."""
        if self._finished:
            raise EngineError("Detokenizer.push after finish: make a new one for each output")
        if self.stopped is not None:
            return ""
        given: list[str] = []
        for token in token_ids:
            self.offsets.append(self._length)
            data = self._table[token]
            if self._fresh or self._tight:
                data = self._adjust(token, data)
            if not data:
                continue
            data = self._pending + data
            text, used = utf_8_decode(data, "replace", False)
            self._pending = data[used:]
            if text:
                given.append(self._release(text) if self._matcher else text)
                self._length += len(text)
                if self.stopped is not None:
                    break
        return "".join(given)

    def _adjust(self, token: int, data: bytes) -> bytes:
        """Adjust a token's bytes at the start of the output, or drop unwanted spaces between special tokens."""
        if self._tight:
            added = self._tokenizer.is_added(token)
            if added and self._after_added:
                data = self._tokenizer.start_bytes(token)
            self._after_added = added
        if self._fresh and data:
            self._fresh = False
            if self._at_start:
                data = self._tokenizer.start_bytes(token)
            if self._tail and _continues(self._tail, data):
                self._pending = self._tail
        return data

    def _release(self, text: str) -> str:
        """Pass `text` through the stop matcher; returns what may be sent, up to a stop string."""
        matcher = self._matcher
        if matcher is None:
            return text
        match = matcher.feed(text, ignore=len(self.offsets) <= self._min_tokens)
        whole = self._held + text
        if match is not None:
            return self._stop(match, whole, len(text))
        keep = len(whole) - matcher.held(self._include_stop)
        self._held = whole[keep:]
        return whole[:keep]

    def _stop(self, match: tuple[int, str], whole: str, size: int) -> str:
        """End the text at a match, counted from its last `size` characters; returns what may be sent of `whole`."""
        end, self.stopped = match
        end -= 0 if self._include_stop else len(self.stopped)
        self._cut = self._length + end
        return whole[: len(whole) - size + end]

    def finish(self) -> str:
        """Give the text still held back. An unfinished UTF-8 sequence becomes U+FFFD. No tokens may follow."""
        if self._finished or self.stopped is not None:
            self._finished = True
            return ""
        self._finished = True
        text = utf_8_decode(self._pending, "replace", True)[0]
        given = self._release(text) if text else ""
        self._length += len(text)
        if self.stopped is None and self._matcher is not None and (match := self._matcher.finish()):
            return given + self._stop(match, self._held, 0)
        return given if self.stopped is not None else given + self._held


def token_text(tokenizer: Tokenizer, token_id: int) -> str:
    """Decode one token by itself, as log-probabilities show it; special tokens by name."""
    return tokenizer.token_bytes(token_id).decode("utf-8", "replace")
