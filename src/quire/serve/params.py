"""From a body's fields to SamplingParams, over the model's defaults; logprobs in OpenAI's shapes. No engine."""

from __future__ import annotations

from typing import Any

from quire.client.front import Front
from quire.client.outputs import Logprob, OutputStream
from quire.params import SamplingParams
from quire.serve.errors import invalid
from quire.serve.protocol import (
    CompletionLogprobs,
    LogprobInfo,
    PromptLogprobs,
    SamplingFields,
    TokenLogprob,
    TopLogprob,
)
from quire.serve.structured import constraint_of
from quire.text.tokenizer import Tokenizer

# Given to SamplingParams under the same name, where the body has them.
_SAME = (
    "n",
    "temperature",
    "top_p",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "stop",
    "top_k",
    "min_p",
    "repetition_penalty",
    "stop_token_ids",
    "min_tokens",
    "prompt_logprobs",
    "allowed_token_ids",
    "bad_words",
)

REFUSED = {
    "use_beam_search": "sampling is what this server does",
}


def sampling_params(
    front: Front, body: SamplingFields, max_tokens: int | None, logprobs: int | None
) -> SamplingParams:
    """Raises RequestError naming the field where a value cannot be."""
    given: dict[str, Any] = {name: value for name in _SAME if (value := getattr(body, name)) is not None}
    if body.logit_bias:
        given["logit_bias"] = {_token_id(key): value for key, value in body.logit_bias.items()}
    return front.default_params(
        max_tokens=max_tokens,
        logprobs=logprobs,
        include_stop_str_in_output=body.include_stop_str_in_output,
        ignore_eos=body.ignore_eos,
        skip_special_tokens=body.skip_special_tokens,
        spaces_between_special_tokens=body.spaces_between_special_tokens,
        structured_outputs=constraint_of(body),
        **given,
    )


def _token_id(key: str) -> int:
    if key.isascii() and key.isdecimal() and len(key) < 12:
        return int(key)
    raise invalid(f"logit_bias: {key[:32]!r} is not a token id", "logit_bias", "invalid_value")


def truncated(tokens: list[int], limit: int | None, longest: int) -> list[int]:
    """The last `limit` tokens; -1 keeps as many as leave room for one token of output."""
    if limit is None:
        return tokens
    keep = longest - 1 if limit == -1 else limit
    if keep < 1:
        raise invalid(
            "truncate_prompt_tokens must be at least 1, or -1", "truncate_prompt_tokens", "invalid_value"
        )
    return tokens[-keep:]


class TokenNames:
    """How tokens are written in logprobs: as text, or as `token_id:N` where that is asked for."""

    def __init__(self, tokenizer: Tokenizer | None, as_ids: bool, hides_special: bool = True) -> None:
        self._tokenizer = tokenizer
        self._hides_special = hides_special
        self._as_ids = as_ids or tokenizer is None

    def name(self, token: int, entry: Logprob) -> str:
        if self._as_ids or entry.decoded_token is None:
            return f"token_id:{token}"
        return entry.decoded_token

    def width(self, token: int, entry: Logprob) -> int:
        """How many characters of the answer's text are the token's."""
        if self._tokenizer is None or (self._hides_special and self._tokenizer.is_special(token)):
            return 0
        return len(entry.decoded_token or "")

    def data(self, token: int) -> list[int] | None:
        """The token's exact bytes, which may be a part of a character."""
        return None if self._tokenizer is None else list(self._tokenizer.token_bytes(token))


def _top(entries: dict[int, Logprob], count: int) -> list[tuple[int, Logprob]]:
    """The `count` most likely ones, best first."""
    ranked = [(token, entry) for token, entry in entries.items() if entry.rank is not None]
    ranked.sort(key=lambda pair: pair[1].rank or 0)
    return [pair for pair in ranked if count == -1 or (pair[1].rank or 0) <= count]


def chat_logprobs(steps: list[dict[int, Logprob]], count: int, names: TokenNames) -> list[TokenLogprob]:
    """One entry a token; the first of each step's entries is the token itself."""
    content = []
    for entries in steps:
        token, entry = next(iter(entries.items()))
        top = [TopLogprob(names.name(t, e), e.logprob, names.data(t)) for t, e in _top(entries, count)]
        content.append(TokenLogprob(names.name(token, entry), entry.logprob, names.data(token), top))
    return content


def completion_logprobs(
    steps: list[dict[int, Logprob] | None], tokens: list[int], count: int, names: TokenNames, offset: int
) -> tuple[CompletionLogprobs, int]:
    """The four lists and the offset after them.

    `steps` has None for a token without a score (the first of a prompt); `offset` is the length of the text before.
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
            for t, e in (*_top(entries, count), (token, entry)):
                shown.setdefault(names.name(t, e), e.logprob)  # parts of characters may share a name
        result.top_logprobs.append(shown)
        offset += names.width(token, entry)
    return result, offset


def names_text(names: TokenNames, token: int) -> str | None:
    """A token's text by itself, as logprobs show it."""
    data = names.data(token)
    return None if data is None else bytes(data).decode("utf-8", "replace")


def prompt_logprobs(stream: OutputStream) -> PromptLogprobs | None:
    """As vLLM shows them: a map from token id for each prompt token, null for the first."""
    steps = stream.output.prompt_logprobs
    if steps is None:
        return None
    return [
        None
        if entries is None
        else {t: LogprobInfo(e.logprob, e.rank, e.decoded_token) for t, e in entries.items()}
        for entries in steps
    ]
