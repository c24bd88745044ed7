"""Makes token masks of constrained sequences in threads while the model computes. Knows one sequence at a time."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field

import numpy as np

from quire.grammar.budget import BudgetMatcher
from quire.grammar.matcher import GrammarError, Matcher, TokenMask

NUM_THREADS = 4  # several, so that a slow grammar does not hold up others
PATIENCE = 0.004
"""A step waits PATIENCE seconds for masks once it has logits. Sequences whose mask is late sample in a later step."""
PATIENCE_ALONE = 0.1
MAX_SECONDS = 10.0
"""A grammar that needs more than MAX_SECONDS for one mask ends its request."""


@dataclass(slots=True)
class Advance:
    """The effect of sampled tokens on a grammar: tokens it forces next, and whether it allows no more."""

    forced: list[int] = field(default_factory=list)
    ended: bool = False
    error: str | None = None


@dataclass(slots=True, eq=False)
class Constraint:
    """The grammar of one sequence: its state after `tokens`, the output so far, and masks for what comes next.

    `make` makes a matcher in the state before any output.
    Row 0 of `masks_RW` [R, W] is the mask after `tokens`, row i the mask after the first i tokens of `draft`;
    `num_masks` rows are valid. From `begin` until `is_ready`, matcher and masks belong to a thread. `room` is how many
    tokens may still be added; with `jumps`, forced tokens are appended without sampling.
    """

    make: Callable[[], Matcher | BudgetMatcher]
    tokens: list[int]
    stops: frozenset[int]
    jumps: bool
    room: int
    masks_RW: TokenMask
    draft: list[int] = field(default_factory=list)
    num_masks: int = 0
    matcher: Matcher | BudgetMatcher | None = None
    work: MaskWork | None = None
    is_ready: bool = False
    error: str | None = None

    def begin(self, draft: Sequence[int]) -> None:
        """Begin to make masks, also after each token of `draft`; call it before `prepare`.

        A sequence ends at its first stop token, so later draft tokens do not matter.
        """
        ends = (i for i, token in enumerate(draft) if token in self.stops)
        self.draft = list(draft[: next(ends, len(draft))])
        if len(self.masks_RW) <= len(self.draft):
            self.masks_RW = np.zeros((len(self.draft) + 1, self.masks_RW.shape[1]), np.uint32)

    def prepare(self) -> None:
        """Catch up with `tokens`, then make the masks. The step that reads the masks raises any error."""
        try:
            if self.matcher is None:
                self.matcher = self._replayed()
            self.num_masks = self._fill(self.matcher)
        except GrammarError as error:
            self.error = str(error)
        except Exception as error:
            self.error = f"the grammar failed: {type(error).__name__}: {error}"
        self.is_ready = True

    def _replayed(self) -> Matcher | BudgetMatcher:
        matcher = self.make()
        for token in self.tokens:
            matcher.advance(token)
        return matcher

    def _fill(self, matcher: Matcher | BudgetMatcher) -> int:
        if self.draft:
            try:
                return matcher.fill_ahead(self.draft, self.masks_RW)
            except GrammarError:  # perhaps behind a draft token that will not be sampled: do without the mask
                matcher = self.matcher = self._replayed()
        matcher.fill(self.masks_RW[0])
        return 1

    def num_rows(self, draft: Sequence[int]) -> int:
        """Count the rows of a sequence computed with `draft` that have a mask; later rows cannot be reached."""
        rows = 1
        for mine, given in zip(self.draft[: self.num_masks - 1], draft, strict=False):
            if mine != given:
                break
            rows += 1
        return rows

    def advance(self, sampled: Sequence[int]) -> Advance:
        """Add `sampled` to the output. Moves over forced tokens too if it may jump."""
        matcher = self.matcher
        assert matcher is not None
        self.work, self.is_ready = None, False
        self.room -= len(sampled)
        follow = Advance()
        try:
            for token in sampled:
                if token in self.stops:
                    return follow  # the sequence ends here; if it must not, the token was masked
                self.tokens.append(token)
                matcher.advance(token)
            if self.jumps:
                follow.forced = matcher.jump(self.room, self.stops)
                self.tokens += follow.forced
                self.room -= len(follow.forced)
        except GrammarError as error:
            follow.error = str(error)
        follow.ended = matcher.ended
        return follow


class MaskWork:
    """Sequences that need masks. Threads take them one by one, so that any thread can help."""

    def __init__(self, constraints: list[Constraint], threads: ThreadPoolExecutor) -> None:
        self._queue = deque(constraints)
        self._threads = threads
        self._job = threads.submit(self._run)
        self._waited = False
        self.since = time.monotonic()

    def _run(self) -> None:
        while self._queue:
            try:
                constraint = self._queue.popleft()
            except IndexError:
                return
            constraint.prepare()

    def wait(self) -> None:
        """Wait a moment, the first time; then start a second thread for the sequences behind the slow one."""
        if self._waited:
            return
        self._waited = True
        wait((self._job,), PATIENCE)
        if self._queue and not self._job.done():
            self._threads.submit(self._run)

    def wait_on(self) -> None:
        """Wait longer, because there is nothing else to do."""
        wait((self._job,), PATIENCE_ALONE)
