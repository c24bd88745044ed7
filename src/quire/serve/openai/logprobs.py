"""Log-probabilities in the shapes of OpenAI and vLLM."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from quire.client.outputs import Logprob, OutputStream
from quire.text.tokenizer import Tokenizer


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

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        as_ids: bool,
        hides_special: bool = True,
        asked: Sequence[int] | None = None,
    ) -> None:
        self._asked = None if asked is None else frozenset(asked)
        self._tokenizer = tokenizer
        self._hides_special = hides_special
        self._as_ids = as_ids or tokenizer is None

    def name(self, token: int, entry: Logprob) -> str:
        if self._as_ids or entry.decoded_token is None:
            return f"token_id:{token}"
        return entry.decoded_token

    def width(self, token: int, entry: Logprob) -> int:
        """Number of characters that the token adds to the text of the answer."""
        if self._tokenizer is None or (self._hides_special and self._tokenizer.is_special(token)):
            return 0
        return len(entry.decoded_token or "")

    def top(self, entries: dict[int, Logprob], count: int) -> list[tuple[int, Logprob]]:
        """The entries that were asked for, else the `count` most likely ones (-1: all); best first."""
        ranked = [(token, entry) for token, entry in entries.items() if entry.rank is not None]
        ranked.sort(key=lambda pair: pair[1].rank or 0)
        if self._asked is not None:
            return [pair for pair in ranked if pair[0] in self._asked]
        return [pair for pair in ranked if count == -1 or (pair[1].rank or 0) <= count]

    def data(self, token: int) -> list[int] | None:
        """The token's bytes, possibly part of a character."""
        return None if self._tokenizer is None else list(self._tokenizer.token_bytes(token))


def chat_logprobs(steps: list[dict[int, Logprob]], count: int, names: TokenNames) -> list[TokenLogprob]:
    """One entry per token; the sampled token is the first entry of its step."""
    content = []
    for entries in steps:
        token, entry = next(iter(entries.items()))
        top = [TopLogprob(names.name(t, e), e.logprob, names.data(t)) for t, e in names.top(entries, count)]
        content.append(TokenLogprob(names.name(token, entry), entry.logprob, names.data(token), top))
    return content


def completion_logprobs(
    steps: list[dict[int, Logprob] | None], tokens: list[int], count: int, names: TokenNames, offset: int
) -> tuple[CompletionLogprobs, int]:
    """The four lists, and the text offset after them.

    `steps` holds None for a token without a score (the first of a prompt); `offset` is the length of the text before.
    """
    result = CompletionLogprobs([], [], [], [])
    for token, entries in zip(tokens, steps, strict=True):
        entry = Logprob(0.0, None, names_text(names, token)) if entries is None else entries[token]
        name = names.name(token, entry)
        result.text_offset.append(offset)
        result.tokens.append(name)
        result.token_logprobs.append(None if entries is None else entry.logprob)
        shown = None
        if entries is not None:
            shown = dict[str, float]()
            for t, e in (*names.top(entries, count), (token, entry)):
                shown.setdefault(names.name(t, e), e.logprob)  # parts of a character may share a name
        result.top_logprobs.append(shown)
        offset += names.width(token, entry)
    return result, offset


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
        else {t: LogprobInfo(e.logprob, e.rank, e.decoded_token) for t, e in entries.items()}
        for entries in steps
    ]
