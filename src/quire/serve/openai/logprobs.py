"""Log-probabilities in the shapes of OpenAI and vLLM."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from typing import Any, TypeVar, cast

import msgspec

from quire.client.logprobs import Logprob
from quire.client.outputs import OutputStream
from quire.serve.tools import OutputReader
from quire.text.detok import Detokenizer
from quire.text.tokenizer import Tokenizer

Entries = TypeVar("Entries", bound=Collection[Any])

MANY = 1000
_encode = msgspec.json.Encoder().encode


class LogprobInfo(msgspec.Struct):
    """One candidate for a prompt token, in vLLM's shape."""

    logprob: float
    rank: int | None
    decoded_token: str | None


PromptLogprobs = list[dict[int, LogprobInfo] | None]


class CompletionLogprobs(msgspec.Struct):
    """Four lists with one entry per token."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class TopLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    content: list[TokenLogprob]
    refusal: None = None


class TokenNames:
    """Chooses the tokens that logprobs show, and writes them as text or as `token_id:N`. `asked` names the tokens."""

    def __init__(self, tokenizer: Tokenizer | None, as_ids: bool, asked: Sequence[int] | None = None) -> None:
        self._asked = None if asked is None else frozenset(asked)
        self._tokenizer = tokenizer
        self._as_ids = as_ids or tokenizer is None

    def name(self, token: int, entry: Logprob) -> str:
        if self._as_ids or entry.decoded_token is None:
            return f"token_id:{token}"
        return entry.decoded_token

    def distinct(self, token: int, entry: Logprob) -> str:
        """Write a token that is part of a character by its bytes, so that such tokens differ."""
        name = self.name(token, entry)
        if "\ufffd" not in name or "\ufffd".encode() in (data := bytes(self.data(token) or ())):
            return name
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def top(self, entries: dict[int, Logprob], count: int) -> list[tuple[int, Logprob]]:
        """The `count` most likely entries (-1: all), best first; or the token itself and those that were asked for."""
        if self._asked is not None:
            return [(t, e) for i, (t, e) in enumerate(entries.items()) if not i or t in self._asked]
        ranked = [(token, entry) for token, entry in entries.items() if entry.rank is not None]
        ranked.sort(key=lambda pair: pair[1].rank or 0)
        return [pair for pair in ranked if count == -1 or (pair[1].rank or 0) <= count]

    def data(self, token: int) -> list[int] | None:
        """The token's bytes, possibly part of a character."""
        return None if self._tokenizer is None else list(self._tokenizer.token_bytes(token))


class AnswerLogprobs:
    """Finds the tokens of one sample that its answer shows, as the answer becomes known.

    An entry belongs to the answer if the token's text does: reasoning, calls, markers, and what ends the output have
    none. `reader`, located, knows where the answer stands in the output; None: it is all of it.
    """

    def __init__(
        self, stream: OutputStream, index: int, names: TokenNames, count: int, reader: OutputReader | None
    ) -> None:
        self._stream = stream
        self._index = index
        self._names = names
        self._count = count
        self._reader = reader
        self._taken = 0
        self._shown = 0  # characters of the answer
        self._waiting = deque[tuple[int, dict[int, Logprob]]]()  # tokens with their places, in order

    def add(self, tokens: list[int], steps: Iterable[dict[int, Logprob]]) -> None:
        """Take the next tokens of the sample."""
        offsets = self._stream.offsets(self._index, self._taken, len(tokens))
        self._taken += len(tokens)
        for token, offset, entries in zip(tokens, offsets, steps, strict=False):  # an end has no offset
            if self._stream.shows(token):
                self._waiting.append((offset, entries))

    def of(self, length: int) -> list[TokenLogprob]:
        """Return the entries of the tokens whose text the next `length` characters of the answer are."""
        first, self._shown = self._shown, self._shown + length
        places: Sequence[int] = range(first, self._shown)
        if self._reader is not None:
            places = self._reader.places[first : self._shown]
        found: list[dict[int, Logprob]] = []
        for place in places:
            here: list[tuple[int, dict[int, Logprob]]] = []
            while self._waiting and self._waiting[0][0] <= place:
                token = self._waiting.popleft()
                if here and here[-1][0] != token[0]:
                    here = []  # they end before this place
                here.append(token)  # parts of one character have one place
            found += [entries for _, entries in here]
        return chat_logprobs(found, self._count, self._names)


def chat_logprobs(steps: list[dict[int, Logprob]], count: int, names: TokenNames) -> list[TokenLogprob]:
    """One entry per token; the sampled token is the first entry of its step."""
    content = []
    for entries in steps:
        token, entry = next(iter(entries.items()))
        top = [TopLogprob(names.name(t, e), e.logprob, names.data(t)) for t, e in names.top(entries, count)]
        content.append(TokenLogprob(names.name(token, entry), entry.logprob, names.data(token), _part(top)))
    return content


def completion_logprobs(
    steps: Sequence[dict[int, Logprob] | None],
    tokens: Sequence[int],
    offsets: Sequence[int],
    count: int,
    names: TokenNames,
) -> CompletionLogprobs:
    """The four lists. `steps` holds None for a token without a score, the first of a prompt."""
    result = CompletionLogprobs(list(offsets), [], [], [])
    for token, entries in zip(tokens, steps, strict=True):
        entry = Logprob(0.0, None, names_text(names, token)) if entries is None else entries[token]
        result.tokens.append(names.distinct(token, entry))
        result.token_logprobs.append(None if entries is None else entry.logprob)
        shown = None
        if entries is not None:
            shown = {names.distinct(token, entry): entry.logprob}
            for t, e in names.top(entries, count):
                shown.setdefault(names.distinct(t, e), e.logprob)
        result.top_logprobs.append(shown and _part(shown))
    return result


def shown_prompt(tokenizer: Tokenizer, tokens: list[int], text: str) -> tuple[list[int], range]:
    """Return where each token of a prompt begins in its `text`, and which tokens the text shows.

    Text that was tokenized does not show special tokens that the tokenizer has added at its ends.
    """
    detok = Detokenizer(tokenizer, skip_special_tokens=False)
    whole = detok.push(tokens) + detok.finish()
    offsets = detok.offsets
    for i, (token, at) in enumerate(zip(tokens, offsets, strict=True)):
        start = at + (whole[at : at + 1] == " " != text[:1])
        if whole.startswith(text, start):
            end = bisect_left(offsets, start + len(text))
            return [max(0, offset - start) for offset in offsets], range(i, end)
        if not tokenizer.is_special(token):
            break
    return [min(offset, len(text)) for offset in offsets], range(len(tokens))


def names_text(names: TokenNames, token: int) -> str | None:
    """The text of one token on its own."""
    data = names.data(token)
    return None if data is None else bytes(data).decode("utf-8", "replace")


def prompt_logprobs(stream: OutputStream) -> PromptLogprobs | None:
    """One map from token id per prompt token, as in vLLM; null for the first."""
    steps = stream.output.prompt_logprobs
    if steps is None:
        return None
    return [
        None
        if entries is None
        else _part({t: LogprobInfo(e.logprob, e.rank, e.decoded_token) for t, e in entries.items()})
        for entries in steps
    ]


def _part(entries: Entries) -> Entries:
    """Encode many entries now: encoding a whole answer of millions at once would hold the interpreter lock."""
    return cast(Entries, msgspec.Raw(_encode(entries))) if len(entries) > MANY else entries
