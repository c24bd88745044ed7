"""Beam search as a program: each beam is a live request; survivors fork from their parents and share its blocks.

A step computes all beams in one batch. A beam whose own greedy token survives goes on. Other survivors fork, which
copies at most one block. A beam without survivors is dropped. Groups of beams (diverse search) share their first step.
"""

from __future__ import annotations

import itertools
from bisect import insort
from collections import Counter, deque
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from numpy.typing import NDArray

from quire.grammar.matcher import Matcher
from quire.params import BeamRules, SamplingParams
from quire.program.core import Run
from quire.types import Delta, FinishReason, Request, TokenLogprobs, Usage


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
        ranked = sorted(candidates, key=lambda c: -c.total)  # stable: the lower parent first among equals
        if self._counts_ends:
            return self._bounded(ranked[: self.num_candidates])
        return self._open_ended(ranked)

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

    def _open_ended(self, ranked: Sequence[Candidate]) -> BeamStep:
        made = BeamStep()
        for candidate in ranked:
            if candidate.token in self.ends:
                made.completed.append((candidate, self.score(candidate.total, True)))
            elif len(made.survivors) < self.rules.beam_width:
                made.survivors.append(candidate)
        return made

    def _bounded(self, ranked: Sequence[Candidate]) -> BeamStep:
        made, width = BeamStep(), self.rules.beam_width
        for place, candidate in enumerate(ranked):
            if candidate.token in self.ends:
                if place < width:
                    made.completed.append((candidate, self.score(candidate.total, True)))
            elif len(made.survivors) < width:
                made.survivors.append(candidate)
        return made


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


if TYPE_CHECKING:
    from quire.grammar.compiler import Grammar
    from quire.grammar.matcher import Matcher


@dataclass(frozen=True, slots=True)
class Beam:
    """A live beam: the id of its request, its tokens so far with their scores, their sum, and its grammar's state."""

    id: str
    entries: tuple[TokenLogprobs, ...]
    total: float
    matcher: Matcher | None


def beam_search(request: Request, run: Run) -> Generator[None, Delta, list[Delta]]:
    """Search by `request.sampling.beam`; the last deltas are the best sequences, one per sample, best first."""
    rules = request.sampling.beam
    assert rules is not None
    grammars: list[Grammar] = []
    if request.grammar is not None:
        run.compile(request.grammar, grammars.append)
        while not grammars:
            yield
    ends = frozenset({*request.eos_token_ids, *(request.sampling.stop_token_ids or ())})
    groups = [
        BeamSearch(rules.of_group, len(request.tokens), request.max_tokens, ends)
        for _ in range(rules.num_beam_groups)
    ]
    searcher = _Searcher(request, run, groups, Adjustment(request, rules, ends))
    live = searcher.first(grammars[0] if grammars else None)
    drawn: dict[str, deque[TokenLogprobs]] = {beam.id: deque() for beams in live for beam in beams}
    while drawn:
        while not all(drawn.values()):
            delta = yield
            if delta.finish_reason in (FinishReason.ERROR, FinishReason.ABORT):
                return [_failed(run, delta, index) for index in range(request.sampling.n)]
            drawn[delta.request_id].extend(delta.logprobs or ())
        # A beam may be steps ahead of forks that wait for a slot: its further tokens stay valid while it goes on.
        entries = {beam_id: waiting.popleft() for beam_id, waiting in drawn.items()}
        live = searcher.advance(live, entries)
        drawn = {beam.id: drawn.get(beam.id, deque()) for beams in live for beam in beams}
    pool = sorted((found for search in groups for found in search.pool), key=lambda found: -found.score)
    return list(_answers(request, run, pool))


class _Searcher:
    """Runs the beams of one search, group after group."""

    def __init__(
        self, request: Request, run: Run, groups: Sequence[BeamSearch], adjustment: Adjustment
    ) -> None:
        self.request, self.run, self.groups, self.adjustment = request, run, groups, adjustment
        self._ids = (f"{request.id}/{number}" for number in itertools.count())

    def first(self, grammar: Grammar | None) -> list[list[Beam]]:
        """Start the only beam of the first step, which all groups share."""
        beam = Beam(next(self._ids), (), 0.0, None if grammar is None else grammar.matcher())
        self.run.add(self._reader(beam.id))
        return [[beam] for _ in self.groups]

    def advance(
        self, live: Sequence[Sequence[Beam]], entries: Mapping[str, TokenLogprobs]
    ) -> list[list[Beam]]:
        """Take a step: keep completed beams, fork survivors, drop the rest. Returns each group's beams, best first."""
        chosen: Counter[int] = Counter()
        going_on: set[str] = set()
        following = []
        for search, beams in zip(self.groups, live, strict=True):
            following.append(self._advance(search, beams, entries, chosen, going_on) if beams else [])
        for parent in {beam.id for beams in live for beam in beams} - going_on:
            self.run.drop(parent)
        return following

    def _advance(
        self,
        search: BeamSearch,
        live: Sequence[Beam],
        entries: Mapping[str, TokenLogprobs],
        chosen: Counter[int],
        going_on: set[str],
    ) -> list[Beam]:
        """Do a group's step. `chosen` counts tokens of earlier groups; parents that go on join `going_on`."""
        best, count = self.adjustment.best, search.num_candidates
        followers = [best(beam.entries, entries[beam.id], count, chosen, beam.matcher) for beam in live]
        made = search.step(search.contenders([beam.total for beam in live], followers))
        for candidate, score in made.completed:
            parent = live[candidate.parent]
            search.keep(Hypothesis(score, True, (*parent.entries, _entry(candidate, entries[parent.id]))))
        search.settle([candidate.total for candidate in made.survivors])
        chosen.update(candidate.token for candidate in made.survivors)
        following = []
        for candidate in made.survivors:
            parent = live[candidate.parent]
            grown = (*parent.entries, _entry(candidate, entries[parent.id]))
            matcher = None if parent.matcher is None else parent.matcher.followed_by(candidate.token)
            if search.is_done or (matcher is not None and matcher.ended and not search.ends):
                if search.keeps_live or not search.is_done:
                    search.keep(Hypothesis(search.score(candidate.total, False), False, grown))
                continue
            own = candidate.token == entries[parent.id].token and parent.id not in going_on
            beam = Beam(parent.id if own else next(self._ids), grown, candidate.total, matcher)
            following.append(beam)
            if own:
                going_on.add(parent.id)
            else:
                self.run.fork(parent.id, self._reader(beam.id), [entry.token for entry in beam.entries])
        return following

    def _reader(self, beam_id: str) -> Request:
        """Make a request that never ends by itself and reports the best tokens of each step."""
        params = SamplingParams(
            temperature=0.0,
            logprobs=self.adjustment.num_top(self.groups[0].num_candidates),
            max_tokens=None,
            ignore_eos=True,
            detokenize=False,
        )
        return msgspec.structs.replace(
            self.request,
            id=beam_id,
            sampling=params,
            max_tokens=self.request.max_tokens + 1,  # the search counts steps, and ends it
            eos_token_ids=(),
            bad_words_token_ids=(),
            grammar=None,
        )


def _entry(candidate: Candidate, drawn: TokenLogprobs) -> TokenLogprobs:
    rank = drawn.top_ids.index(candidate.token) + 1
    return TokenLogprobs(candidate.token, candidate.logprob, rank, [], [])


def _answers(request: Request, run: Run, pool: Sequence[Hypothesis]) -> Iterator[Delta]:
    for index in range(request.sampling.n):
        if index >= len(pool):  # fewer sequences than beams: every continuation was forbidden
            yield Delta(request.id, index, [], _usage(run, 0), finish_reason=FinishReason.ABORT)
            continue
        found = pool[index]
        yield Delta(
            request.id,
            index,
            [entry.token for entry in found.entries],
            _usage(run, len(found.entries)),
            logprobs=list(found.entries) if request.sampling.logprobs is not None else None,
            finish_reason=FinishReason.STOP if found.ended else FinishReason.LENGTH,
        )


def _failed(run: Run, delta: Delta, index: int) -> Delta:
    return Delta(
        run.request.id, index, [], _usage(run, 0), finish_reason=delta.finish_reason, error=delta.error
    )


def _usage(run: Run, num_output: int) -> Usage:
    return Usage(len(run.request.tokens), run.num_cached, num_output)
