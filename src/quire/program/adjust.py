"""Penalties and bans on the log-probabilities of beams, as transformers applies them: nothing is renormalized."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from quire.types import Request, TokenLogprobs

MOST = 1024  # extra entries of a step; beyond, all of the vocabulary are read


class Adjustment:
    """The rules of one request: repetition_penalty, min_tokens, bad_words and allowed_token_ids."""

    def __init__(self, request: Request, ends: frozenset[int]) -> None:
        params = request.sampling
        self._penalty, self._min_tokens, self._ends = params.repetition_penalty, params.min_tokens, ends
        self._prompt = frozenset(request.tokens)
        self._words = request.bad_words_token_ids
        self._allowed = frozenset(params.allowed_token_ids or ())
        seen = len(self._prompt) + request.max_tokens if self._penalty != 1 else 0
        self._extra = seen + len(self._words) + (len(ends) if self._min_tokens else 0)

    def num_top(self, count: int) -> int:
        """How many of the best tokens must be read to know the `count` best after adjustment; -1: all."""
        return -1 if self._allowed or self._extra > MOST else count + self._extra

    def best(
        self, output: Sequence[TokenLogprobs], drawn: TokenLogprobs, count: int
    ) -> list[tuple[int, float]]:
        """The `count` best tokens after `output` with their adjusted log-probabilities, best first."""
        tokens = [entry.token for entry in output]
        banned = frozenset(self._banned(tokens))
        seen = self._prompt.union(tokens) if self._penalty != 1 else frozenset[int]()
        adjusted = [
            (token, logprob * self._penalty if token in seen else logprob)
            for token, logprob in zip(drawn.top_ids, drawn.top, strict=True)
            if token not in banned and (not self._allowed or token in self._allowed)
        ]
        adjusted.sort(key=lambda pair: -pair[1])
        return adjusted[:count]

    def _banned(self, tokens: list[int]) -> Iterable[int]:
        if len(tokens) < self._min_tokens:
            yield from self._ends
        for *begin, last in self._words:
            if not begin or tokens[-len(begin) :] == begin:
                yield last
