"""Bounds the reasoning in an output: once its budget of tokens is spent, its end is forced. Knows ids and bytes."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from copy import copy

import numpy as np

from quire.grammar.matcher import GrammarError, Matcher, TokenMask
from quire.grammar.vocabulary import Vocabulary
from quire.types import ThinkingBudget

_ALL = np.uint32(0xFFFFFFFF)


class ReasoningCount:
    """Follows an output into and out of its reasoning. `forced`: tokens that must come next to end it."""

    __slots__ = ("_begin", "_count", "_end", "_inside", "_keep", "_limit", "_tail", "_vocabulary", "forced")

    def __init__(self, budget: ThinkingBudget, vocabulary: Vocabulary) -> None:
        self._limit = budget.limit
        self._begin = [text.encode() for text in budget.begin]
        self._end = [text.encode() for text in budget.end]
        self._keep = max(map(len, (*self._begin, *self._end)), default=1) - 1
        self._vocabulary = vocabulary
        self._inside = budget.opened
        self._count = 0
        self._tail = b""
        self.forced: deque[int] = deque()
        self._bound()

    def advance(self, token: int) -> None:
        """Add `token`. GrammarError if another one is forced."""
        if self.forced:
            if token != self.forced[0]:
                raise GrammarError(f"token {token} where {self.forced[0]} ends the reasoning")
            self.forced.popleft()
            if not self.forced:
                self._inside, self._tail = False, b""
            return
        text = self._tail + self._vocabulary.pieces[token]
        self._count += self._inside
        if any(mark in text for mark in (self._end if self._inside else self._begin)):
            self._inside, text = not self._inside, b""
        self._tail = text[-self._keep :] if self._keep else b""
        self._bound()

    def copy(self) -> ReasoningCount:
        """Copy the state, to advance on its own."""
        other = copy(self)
        other.forced = deque(self.forced)
        return other

    def _bound(self) -> None:
        """Force the unwritten rest of the end, if no more reasoning is allowed."""
        if self._inside and self._count >= self._limit:
            end = self._end[0]
            written = next((n for n in range(len(end) - 1, 0, -1) if self._tail.endswith(end[:n])), 0)
            self.forced.extend(self._vocabulary.encode(end[written:].decode("utf-8", "replace")))


class BudgetMatcher:
    """A Matcher whose reasoning is bounded; `inner` is the output's own grammar, if it has one."""

    __slots__ = ("_count", "_inner")

    def __init__(self, budget: ThinkingBudget, vocabulary: Vocabulary, inner: Matcher | None) -> None:
        self._count = ReasoningCount(budget, vocabulary)
        self._inner = inner

    @property
    def ended(self) -> bool:
        return self._inner is not None and self._inner.ended

    @property
    def forced(self) -> Sequence[int]:
        if self._inner is None or self._count.forced:
            return self._count.forced
        return self._inner.forced

    def advance(self, token: int) -> None:
        """Add `token`. GrammarError if it is not allowed."""
        self._count.advance(token)
        if self._inner is not None:
            self._inner.advance(token)

    def jump(self, limit: int, stops: frozenset[int]) -> list[int]:
        """As Matcher.jump."""
        taken: list[int] = []
        while len(taken) < limit and (forced := self.forced) and forced[0] not in stops:
            token = forced[0]
            taken.append(token)
            self.advance(token)
        return taken

    def fill(self, mask_W: TokenMask) -> None:
        """As Matcher.fill."""
        if self._count.forced:
            _only(mask_W, self._count.forced[0])
        elif self._inner is not None:
            self._inner.fill(mask_W)
        else:
            mask_W[:] = _ALL

    def count_allowed(self, tokens: list[int]) -> int:
        """As Matcher.count_allowed."""
        most = len(tokens) if self._inner is None else self._inner.count_allowed(tokens)
        count = self._count.copy()
        for place, token in enumerate(tokens[:most]):
            if count.forced and token != count.forced[0]:
                return place
            count.advance(token)
        return most

    def fill_ahead(self, drafts: list[int], masks_RW: TokenMask) -> int:
        """As Matcher.fill_ahead."""
        rows = len(drafts) + 1
        if self._inner is None:
            masks_RW[:rows] = _ALL
        else:
            rows = self._inner.fill_ahead(drafts, masks_RW)
        count = self._count.copy()
        for row in range(rows):
            if count.forced:
                _only(masks_RW[row], count.forced[0])
            if row == len(drafts) or (count.forced and drafts[row] != count.forced[0]):
                return row + 1
            count.advance(drafts[row])
        return rows


def _only(mask_W: TokenMask, token: int) -> None:
    mask_W[:] = 0
    mask_W[token // 32] = np.uint32(1 << token % 32)
