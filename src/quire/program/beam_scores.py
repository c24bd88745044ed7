"""Penalties and bans on the log-probabilities of beams, as transformers applies them: nothing is renormalized."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from quire.params import BeamRules
from quire.types import Request, TokenLogprobs

if TYPE_CHECKING:
    from quire.grammar.matcher import Matcher

MOST = 1024  # extra entries of a step; beyond, all of the vocabulary are read


class Adjustment:
    """The rules of one request.

    They are repetition_penalty, min_tokens, bad_words, allowed_token_ids, no_repeat_ngram_size, diversity_penalty and a
    grammar.
    """

    def __init__(self, request: Request, rules: BeamRules, ends: frozenset[int]) -> None:
        params = request.sampling
        self._penalty, self._min_tokens, self._ends = params.repetition_penalty, params.min_tokens, ends
        self._prompt, self._seen = request.tokens, frozenset(request.tokens)
        self._words = request.bad_words_token_ids
        self._allowed = frozenset(params.allowed_token_ids or ())
        self._ngram, self._diversity = rules.no_repeat_ngram_size, rules.diversity_penalty
        self._by_grammar = request.grammar is not None
        longest = len(self._prompt) + request.max_tokens
        self._extra = longest if self._penalty != 1 else 0
        self._extra += longest if self._ngram else 0
        self._extra += rules.beam_width if self._diversity else 0
        self._extra += len(self._words) + (len(ends) if self._min_tokens else 0)

    def num_top(self, count: int) -> int:
        """Count the best tokens to read so that the `count` best after adjustment are known; -1: all."""
        everything = self._allowed or self._by_grammar or self._extra > MOST
        return -1 if everything else count + self._extra

    def best(
        self,
        output: Sequence[TokenLogprobs],
        drawn: TokenLogprobs,
        count: int,
        chosen: Mapping[int, int],
        matcher: Matcher | None,
    ) -> list[tuple[int, float]]:
        """Return the `count` best tokens after `output` with their adjusted log-probabilities, best first.

        `chosen` counts the beams of earlier groups that took a token in this step; `matcher` is the beam's state.
        """
        if not (self._extra or self._allowed or self._by_grammar):
            return list(zip(drawn.top_ids[:count], drawn.top[:count], strict=True))
        tokens = [entry.token for entry in output]
        banned = frozenset(self._banned(tokens))
        seen = self._seen.union(tokens) if self._penalty != 1 else frozenset[int]()
        adjusted = []
        for token, logprob in self._followers(drawn, count, matcher):
            if token in banned or (self._allowed and token not in self._allowed):
                continue
            if self._diversity:
                logprob -= self._diversity * chosen.get(token, 0)
            adjusted.append((token, logprob * self._penalty if token in seen else logprob))
        adjusted.sort(key=lambda pair: -pair[1])
        return adjusted[:count]

    def _followers(
        self, drawn: TokenLogprobs, count: int, matcher: Matcher | None
    ) -> Iterable[tuple[int, float]]:
        """Return the best tokens that the grammar allows, as many as adjustment needs."""
        if matcher is None:
            return zip(drawn.top_ids, drawn.top, strict=True)
        places = np.flatnonzero(self._of_grammar(matcher, len(drawn.top_ids))[drawn.top_ids])
        most = None if self._allowed else count + self._extra
        return [(drawn.top_ids[i], drawn.top[i]) for i in places[:most].tolist()]

    def _of_grammar(self, matcher: Matcher, size: int) -> NDArray[np.bool_]:
        """Tell which tokens the grammar allows next; only end tokens follow what is complete."""
        allowed = np.zeros(size, np.bool_)
        if matcher.ended:
            allowed[list(self._ends)] = True
            return allowed
        mask_W = np.zeros((size + 31) // 32, np.uint32)
        matcher.fill(mask_W)
        allowed[:] = np.unpackbits(mask_W.view(np.uint8), bitorder="little")[:size]
        return allowed

    def _banned(self, tokens: list[int]) -> Iterable[int]:
        if len(tokens) < self._min_tokens:
            yield from self._ends
        for *begin, last in self._words:
            if not begin or tokens[-len(begin) :] == begin:
                yield last
        if self._ngram:
            yield from _repeats([*self._prompt, *tokens], self._ngram)


def _repeats(tokens: list[int], size: int) -> Iterable[int]:
    """Find the tokens that would repeat a run of `size` tokens."""
    start = len(tokens) - size + 1
    if start >= 0:
        begin = tokens[start:]
        for i in range(start):
            if tokens[i : i + size - 1] == begin:
                yield tokens[i + size - 1]
