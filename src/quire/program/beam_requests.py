"""Beam search as a program: each beam is a live request; survivors fork from their parents and share its blocks.

A step computes all beams in one batch. A beam whose own greedy token survives goes on. Other survivors fork, which
copies at most one block. A beam without survivors is dropped. Groups of beams (diverse search) share their first step.
"""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from quire.params import SamplingParams
from quire.program.beam_scores import Adjustment
from quire.program.beam_search import BeamSearch, Candidate, Hypothesis
from quire.program.core import Run
from quire.types import Delta, FinishReason, Request, TokenLogprobs, Usage, ends

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
    end_tokens = frozenset({*request.eos_token_ids, *(request.sampling.stop_token_ids or ())})
    groups = [
        BeamSearch(rules.of_group, len(request.tokens), request.max_tokens, end_tokens)
        for _ in range(rules.num_beam_groups)
    ]
    searcher = _Searcher(request, run, groups, Adjustment(request, rules, end_tokens))
    live = searcher.first(grammars[0] if grammars else None)
    drawn: dict[str, deque[TokenLogprobs]] = {beam.id: deque() for beams in live for beam in beams}
    while drawn:
        while not all(drawn.values()):
            delta = yield
            if delta.finish_reason in (FinishReason.ERROR, FinishReason.ABORT):
                return ends(request, delta.finish_reason, delta.error, run.num_cached)
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


def _usage(run: Run, num_output: int) -> Usage:
    return Usage(len(run.request.tokens), run.num_cached, num_output)
