"""Finds the tokens that a grammar allows next, for one sequence. Knows token ids; knows no scheduler and no logits.

If the grammar leaves only one continuation, its text is written in the tokenizer's own tokens: `forced` holds them,
and the mask allows only the first. So appending them at once (jump-forward) and sampling them one by one give the
same output, whatever the model says.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from quire.errors import QuireError

if TYPE_CHECKING:
    from llguidance import LLMatcher

TokenMask = NDArray[np.uint32]


class GrammarError(QuireError, ValueError):
    """A sequence left its grammar, or the grammar needs more work for a token than is allowed."""


class Matcher:
    """The state of one sequence. `forced`: tokens that must come next, in order. `ended`: nothing may be added.

    Equal tokens lead to equal states, so a preempted sequence recovers its state from its tokens.
    """

    __slots__ = ("_ends", "_matcher", "ended", "forced")

    def __init__(self, matcher: LLMatcher, ends: tuple[int, ...] = ()) -> None:
        """Owns `matcher`, which must be at its beginning. `ends` are masked: the caller does not end at them."""
        self._matcher: Any = matcher
        self._ends = ends
        self.forced: deque[int] = deque()
        self.ended = False
        self._look_ahead()

    def advance(self, token: int) -> None:
        """Add `token`. GrammarError if it is not allowed."""
        if self.forced:
            if token != self.forced[0]:
                raise GrammarError(f"token {token} where the grammar forces {self.forced[0]}")
            self._consume(token)
            self.forced.popleft()
            if self.forced:
                return
        else:
            self._consume(token)
        self._look_ahead()

    def followed_by(self, token: int) -> Matcher:
        """Make a matcher of its own for the sequence with `token` added. GrammarError if it is not allowed."""
        other = Matcher.__new__(Matcher)
        other._matcher, other._ends = self._matcher.deep_copy(), self._ends
        other.forced, other.ended = deque(self.forced), self.ended
        other.advance(token)
        return other

    def jump(self, limit: int, stops: frozenset[int]) -> list[int]:
        """Advance over forced tokens, at most `limit` and up to the first of `stops`; returns them."""
        taken: list[int] = []
        while self.forced and len(taken) < limit and self.forced[0] not in stops:
            taken.append(self.forced[0])
            self.advance(self.forced[0])
        return taken

    def fill(self, mask_W: TokenMask) -> None:
        """Set the bits of the tokens that may come next (token % 32 of word token // 32), clear all others."""
        if self.forced:
            mask_W[:] = 0
            _allow(mask_W, self.forced[0])
            return
        self._matcher.unsafe_compute_mask_ptr(mask_W.ctypes.data, mask_W.nbytes)
        self._check()
        for end in self._ends:
            mask_W[end // 32] &= np.uint32(~(1 << end % 32) & 0xFFFFFFFF)

    def fill_ahead(self, drafts: list[int], masks_RW: TokenMask) -> int:
        """Fill masks of this state and of the states after each of `drafts`, while allowed; keeps the state.

        `masks_RW` has len(drafts) + 1 rows; returns how many were filled.
        """
        forced, ended = deque(self.forced), self.ended
        rows = advanced = 0
        try:
            self.fill(masks_RW[0])
            rows = 1
            for draft in drafts:
                if self.ended or not _allows(masks_RW[rows - 1], draft):
                    break
                self.advance(draft)
                advanced += 1
                if self.ended:
                    break
                self.fill(masks_RW[rows])
                rows += 1
        finally:
            if advanced:
                self._matcher.rollback(advanced)
            self.forced, self.ended = forced, ended
        return rows

    def count_allowed(self, tokens: list[int]) -> int:
        """Count how many of `tokens` the grammar allows one after the other; the state does not change."""
        if self.ended:
            return 0
        ends = (i for i, token in enumerate(tokens) if token in self._ends)
        tokens = tokens[: next(ends, len(tokens))]
        for place, (token, forced) in enumerate(zip(tokens, self.forced, strict=False)):
            if token != forced:
                return place
        return int(self._matcher.validate_tokens(tokens))

    def _consume(self, token: int) -> None:
        if not self._matcher.consume_token(token):
            self._check()
            raise GrammarError(f"token {token} is not what the grammar allows")

    def _look_ahead(self) -> None:
        matcher = self._matcher
        if matcher.is_stopped():
            self._check()
            self.ended = True
        elif matcher.compute_ff_bytes():
            self.forced.extend(matcher.compute_ff_tokens())

    def _check(self) -> None:
        if self._matcher.is_error():
            raise GrammarError(
                f"the grammar is too complex to go on: {first_line(self._matcher.get_error())}"
            )


def first_line(message: str) -> str:
    """Cut llguidance's message before the state that it prints below, to at most 400 characters."""
    lines = [line for line in message.strip().split("\n") if line.strip() and "<non-verbose/>" not in line]
    return " ".join(" ".join(lines).split())[:400] or "no reason given"


def _allow(mask_W: TokenMask, token: int) -> None:
    mask_W[token // 32] |= np.uint32(1 << token % 32)


def _allows(mask_W: TokenMask, token: int) -> bool:
    return bool(int(mask_W[token // 32]) >> token % 32 & 1)
