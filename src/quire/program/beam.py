"""Beam search as a program: each beam is a live request; survivors fork from their parents and share its blocks.

A step computes all beams in one batch. A beam whose own greedy token survives goes on. Other survivors fork, which
copies at most one block. A beam without survivors is dropped.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from quire.params import SamplingParams
from quire.program.adjust import Adjustment
from quire.program.beams import BeamSearch, Candidate, Hypothesis
from quire.program.core import Run
from quire.types import Delta, FinishReason, Request, TokenLogprobs, Usage


@dataclass(frozen=True, slots=True)
class Beam:
    """A live beam: the id of its request, its tokens so far with their scores, and their sum."""

    id: str
    entries: tuple[TokenLogprobs, ...]
    total: float


def beam_search(request: Request, run: Run) -> Generator[None, Delta, list[Delta]]:
    """Search by `request.sampling.beam`; the last deltas are the best sequences, one per sample, best first."""
    rules = request.sampling.beam
    assert rules is not None
    ends = frozenset({*request.eos_token_ids, *(request.sampling.stop_token_ids or ())})
    search = BeamSearch(rules, len(request.tokens), request.max_tokens, ends)
    searcher = _Searcher(request, run, search, Adjustment(request, ends))
    live = [searcher.first()]
    drawn: dict[str, deque[TokenLogprobs]] = {live[0].id: deque()}
    while not search.is_done:
        while not all(drawn[beam.id] for beam in live):
            delta = yield
            if delta.finish_reason in (FinishReason.ERROR, FinishReason.ABORT):
                return [_failed(run, delta, index) for index in range(request.sampling.n)]
            drawn[delta.request_id].extend(delta.logprobs or ())
        # A beam may be steps ahead of forks that wait for a slot: its further tokens stay valid while it goes on.
        entries = {beam.id: drawn[beam.id].popleft() for beam in live}
        live = searcher.advance(live, entries)
        drawn = {beam.id: drawn.get(beam.id, deque()) for beam in live}
    for beam in live if search.keeps_live else ():
        search.keep(Hypothesis(search.score(beam.total, False), False, beam.entries))
    return list(_answers(request, run, search.pool))


class _Searcher:
    """Runs the beams of one search."""

    def __init__(self, request: Request, run: Run, search: BeamSearch, adjustment: Adjustment) -> None:
        self.request, self.run, self.search, self.adjustment = request, run, search, adjustment
        self._ids = (f"{request.id}/{number}" for number in itertools.count())

    def first(self) -> Beam:
        """The only beam of the first step."""
        beam = Beam(next(self._ids), (), 0.0)
        self.run.add(self._reader(beam.id))
        return beam

    def advance(self, live: Sequence[Beam], entries: Mapping[str, TokenLogprobs]) -> list[Beam]:
        """Take a step: keep completed beams, fork survivors, drop the rest. Returns the live beams, best first."""
        search = self.search
        candidates = [
            Candidate(place, token, logprob, beam.total + logprob)
            for place, beam in enumerate(live)
            for token, logprob in self.adjustment.best(beam.entries, entries[beam.id], search.num_candidates)
        ]
        made = search.step(candidates)
        for candidate, score in made.completed:
            parent = live[candidate.parent]
            search.keep(Hypothesis(score, True, (*parent.entries, _entry(candidate, entries[parent.id]))))
        search.settle([candidate.total for candidate in made.survivors])
        following, going_on = [], set()
        for candidate in made.survivors:
            parent, entry = live[candidate.parent], entries[live[candidate.parent].id]
            own = candidate.token == entry.token
            beam_id = parent.id if own else next(self._ids)
            beam = Beam(beam_id, (*parent.entries, _entry(candidate, entry)), candidate.total)
            following.append(beam)
            if own:
                going_on.add(parent.id)
            elif not search.is_done:
                self.run.fork(parent.id, self._reader(beam_id), [entry.token for entry in beam.entries])
        for parent in live:
            if parent.id not in going_on:
                self.run.drop(parent.id)
        return following

    def _reader(self, beam_id: str) -> Request:
        """A request that never ends by itself and reports the best tokens of each step."""
        params = SamplingParams(
            temperature=0.0,
            logprobs=self.adjustment.num_top(self.search.num_candidates),
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
