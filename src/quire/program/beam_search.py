"""Rules of beam search: which continuations live on, which are kept, and when the search ends. Token ids only.

Two definitions are in use. vLLM's (0.32): an end token among the 2 w best of a beam always completes it, the search
runs for all steps, and the prompt counts in the length penalty. transformers' (`generate(num_beams=w)`, 5.23): a
candidate ends only if it is among the w best, early stopping applies, and the prompt does not count.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from quire.params import BeamRules
from quire.types import TokenLogprobs


@dataclass(frozen=True, slots=True)
class Candidate:
    """A continuation of the beam at place `parent` by one token; `total` sums the log-probabilities up to it."""

    parent: int
    token: int
    logprob: float
    total: float


@dataclass(slots=True)
class Hypothesis:
    """A finished beam: its score, whether an end token ended it, and its tokens with their log-probabilities."""

    score: float
    ended: bool
    entries: tuple[TokenLogprobs, ...]


@dataclass(slots=True)
class BeamStep:
    """The result of one step: candidates that complete a beam with their scores, and those that live on."""

    completed: list[tuple[Candidate, float]] = field(default_factory=list)
    survivors: list[Candidate] = field(default_factory=list)


class BeamSearch:
    """One search. `ends` are the end tokens. Call `step` for each new token; afterwards `is_done` may hold.

    A score is total / length ** length_penalty.
    """

    def __init__(self, rules: BeamRules, prompt_len: int, max_tokens: int, ends: frozenset[int]) -> None:
        self.rules, self.ends, self.max_tokens = rules, ends, max_tokens
        self.length = 0  # new tokens of each live beam
        self.pool: list[Hypothesis] = []
        self.is_done = False
        self._prompt_len = prompt_len
        self._improvable = True

    @property
    def _counts_ends(self) -> bool:
        """Whether candidates that end take places of others; else each of them completes its beam."""
        return self.rules.early_stopping is not None

    @property
    def num_candidates(self) -> int:
        """Count the best continuations of each beam that `step` needs."""
        count = max(2, 1 + len(self.ends)) if self._counts_ends else 2
        return count * self.rules.beam_width

    def contenders(
        self, totals: Sequence[float], followers: Sequence[Sequence[tuple[int, float]]]
    ) -> list[Candidate]:
        """Make the candidates that `step` may choose, of each beam's total and best next tokens with their scores."""
        sums, places, rest = [], [], []
        for total, pairs in zip(totals, followers, strict=True):
            row = np.fromiter((score for _, score in pairs), np.float64, len(pairs)) + total
            found = () if self._counts_ends else pairs
            ends = [i for i, (token, _) in enumerate(found) if token in self.ends]
            sums.append(row)
            places.append(ends)
            rest.append(np.delete(row, ends) if ends else row)
        competing = np.concatenate(rest)
        count = self.num_candidates if self._counts_ends else self.rules.beam_width
        least = np.partition(competing, -count)[-count] if len(competing) > count else -np.inf
        return [
            Candidate(parent, *followers[parent][i], float(row[i]))
            for parent, (row, ends) in enumerate(zip(sums, places, strict=True))
            for i in sorted({*np.flatnonzero(row >= least).tolist(), *ends})
        ]

    def step(self, candidates: Sequence[Candidate]) -> BeamStep:
        """Choose among all live beams' continuations."""
        self.length += 1
        made, width = BeamStep(), self.rules.beam_width
        ranked = sorted(candidates, key=lambda c: -c.total)  # stable: the lower parent first among equals
        for place, candidate in enumerate(ranked[: self.num_candidates] if self._counts_ends else ranked):
            if candidate.token in self.ends:
                if place < width or not self._counts_ends:
                    made.completed.append((candidate, self.score(candidate.total, True)))
            elif len(made.survivors) < width:
                made.survivors.append(candidate)
        return made

    def keep(self, hypothesis: Hypothesis) -> None:
        """Add a completed beam to the pool, which holds the best `beam_width` under transformers' definition."""
        insort(self.pool, hypothesis, key=lambda h: -h.score)
        if self.rules.early_stopping is not None:
            del self.pool[self.rules.beam_width :]

    def settle(self, running: Sequence[float]) -> None:
        """Decide whether the search goes on, given the totals of the surviving beams, best first."""
        if not running or self.length >= self.max_tokens:
            self.is_done = True
            return
        early = self.rules.early_stopping
        if early is None or len(self.pool) < self.rules.beam_width:
            return
        if early is True:
            self.is_done = True
            return
        longest = self.max_tokens if early == "never" and self.rules.length_penalty > 0 else self.length
        if running[0] / longest**self.rules.length_penalty <= self.pool[-1].score:
            self._improvable = False  # stays so, even if a later comparison differs
        self.is_done = not self._improvable

    @property
    def keeps_live(self) -> bool:
        """Tell whether beams that have not ended count at the end of the search."""
        return self.rules.early_stopping is None or self.length >= self.max_tokens

    def score(self, total: float, ended: bool) -> float:
        """Score a beam of the current length."""
        return self.rules.score(total, self._prompt_len, self.length, ended)
