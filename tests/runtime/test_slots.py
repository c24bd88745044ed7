"""Slot parts: which rows each reads in a step, and what it takes out of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import pytest

from quire import SamplingParams
from quire.devices.host import HostLogits
from quire.devices.protocol import Executable, FloatArray
from quire.devices.reference.sampler import ReferenceSampler
from quire.grammar.compiler import GrammarCompiler
from quire.grammar.part import GrammarPart
from quire.pooling.part import PoolingPart
from quire.runtime.inputs import InputBuilder, StepLayout
from quire.runtime.rows import StepRows
from quire.runtime.slots.protocol import SlotPart
from quire.runtime.slots.sampling import SamplingPart
from quire.runtime.slots.scoring import ScoringPart
from quire.types import NewSeq, Request, ScheduledBatch, ScheduledSeq, StepOutput

VOCAB = 40
GREEDY: dict[str, Any] = {"temperature": 0.0}


class AnyGrammar:
    """Stands for a compiler: compiles nothing."""

    def compile(self, text: str) -> None: ...


class Executed:
    """An executable that has run: random logits, `max_rows` at a time."""

    def __init__(self, rows: int, max_rows: int, seed: int = 0) -> None:
        self.all = np.random.default_rng(seed).standard_normal((rows, VOCAB)).astype(np.float32)
        self.pieces: list[tuple[int, int]] = []
        self.max_rows = max_rows

    def logits(self, start: int, stop: int) -> HostLogits:
        assert 0 <= start < stop <= len(self.all)
        assert stop - start <= self.max_rows
        self.pieces.append((start, stop))
        return HostLogits(self.all[start:stop])

    def hidden(self) -> FloatArray:
        return self.all

    def rows(self) -> StepRows:
        first = self.logits(0, min(len(self.all), self.max_rows))
        return StepRows(cast(Executable, self), first, len(self.all), self.max_rows)


def new(slot: int, params: dict[str, Any], tokens: Sequence[int] = (5, 6), **more: Any) -> NewSeq:
    request = Request(
        id=str(slot), tokens=list(tokens), sampling=SamplingParams(**params), seed=1, max_tokens=4, **more
    )
    return NewSeq(slot, request, 0, list(tokens))


def make_parts() -> list[SlotPart]:
    sampling = SamplingPart(ReferenceSampler(VOCAB))
    grammar = GrammarPart(sampling, VOCAB, cast(GrammarCompiler, AnyGrammar()))
    return [sampling, grammar, ScoringPart(sampling.sampler), PoolingPart(None, {})]


def lay_out(*seqs: ScheduledSeq) -> StepLayout:
    return InputBuilder(8, 8).lay_out(ScheduledBatch(1, [], list(seqs), [], []), {}, ())


@pytest.mark.parametrize(
    ("params", "more", "whole"),
    [
        ({}, {}, True),
        ({**GREEDY, "logprobs": 1}, {}, True),
        ({**GREEDY, "prompt_logprobs": 1}, {}, True),
        ({**GREEDY, "min_tokens": 2}, {}, True),
        (GREEDY, {"bad_words_token_ids": ((1,),)}, True),
        (GREEDY, {"grammar": "start: /a/"}, True),
        ({}, {"pooling": "last"}, False),
    ],
)
def test_the_largest_logit_is_enough_until_a_slot_needs_more(
    params: dict[str, Any], more: dict[str, Any], whole: bool
) -> None:
    parts = make_parts()

    def largest_is_enough() -> bool:
        return all(part.greedy for part in parts)

    for part in parts:
        part.set(new(0, GREEDY))
        part.set(new(1, GREEDY))
    assert largest_is_enough()
    for part in parts:
        part.set(new(2, params, **more))
    assert largest_is_enough() != whole
    for part in parts:
        part.clear(2)
        part.clear(7)
    assert largest_is_enough()


def collect(part: SlotPart, rows: StepRows, first: int, output: StepOutput) -> None:
    """Launch and collect at once."""
    found = part.launch(rows, first)
    assert found is not None
    found(output)


def test_each_part_reads_its_own_rows() -> None:
    parts = make_parts()
    for seq in (
        new(0, {}),
        new(1, {"prompt_logprobs": 1}, range(6)),
        new(2, {}, range(4), pooling="mean"),
        new(3, {}, range(4), pooling="cls"),
        new(4, {}, range(4), pooling="last"),
    ):
        for part in parts:
            part.set(seq)
    step = lay_out(
        ScheduledSeq(0, 1, [6], [30, 31], [], True),  # tokens 0..2
        ScheduledSeq(1, 2, [2, 3], [], [], False),  # 3..4
        ScheduledSeq(2, 0, [0, 1, 2], [], [], False),  # 5..7
        ScheduledSeq(3, 0, [0, 1], [], [], False),  # 8..9
        ScheduledSeq(4, 2, [2, 3], [], [], True),  # 10..11
    )
    assert [part.rows(step) for part in parts] == [[0, 1, 2], [], [3, 4], [5, 6, 7, 8, 11]]
    whole = lay_out(ScheduledSeq(1, 0, [0, 1, 2, 3, 4, 5], [], [], True))
    assert [part.rows(whole) for part in parts] == [[5], [], [0, 1, 2, 3, 4], []]


@pytest.mark.parametrize("max_rows", [1, 2, 3, 5, 64])
def test_drafts_are_accepted_while_they_equal_what_is_drawn(max_rows: int) -> None:
    """Whatever the pieces: tokens, logprobs and the sampler's own history are those of drawing one by one."""
    params = {"logprobs": 2, "repetition_penalty": 1.5, "frequency_penalty": 0.5, "seed": 1}
    done = Executed(12, max_rows)

    def draw(rows: StepRows, first: int, drafts: list[list[int]], part: SamplingPart) -> StepOutput:
        """Slots 0, 1, ... sampled with these drafts."""
        output = StepOutput(1, {})
        seqs = [ScheduledSeq(slot, 1, [6], draft, [], True) for slot, draft in enumerate(drafts)]
        part.rows(lay_out(*seqs))
        collect(part, rows, first, output)
        return output

    def fresh() -> SamplingPart:
        part = SamplingPart(ReferenceSampler(VOCAB))
        for slot in range(3):
            part.set(new(slot, params))
        return part

    wanted: list[list[int]] = []
    logprobs = []
    for slot, first in enumerate((0, 4, 8)):  # four rows per slot, one after the other
        one_by_one, tokens, scores = fresh(), [], []
        for row in range(4):
            output = StepOutput(1, {})
            one_by_one.rows(lay_out(ScheduledSeq(slot, 1 + row, [6], [], [], True)))
            collect(one_by_one, done.rows(), first + row, output)
            tokens += output.tokens[slot]
            scores += output.logprobs[slot]
        wanted.append(tokens)
        logprobs.append(scores)
    bad = [(token + 1) % VOCAB for token in wanted[1]]
    part = fresh()
    output = draw(done.rows(), 0, [wanted[0][:3], [wanted[1][0], *bad[1:3]], [bad[0], *wanted[2][1:3]]], part)
    accepted = [4, 2, 1]
    assert output.tokens == {slot: wanted[slot][:count] for slot, count in enumerate(accepted)}
    assert output.logprobs == {slot: logprobs[slot][:count] for slot, count in enumerate(accepted)}
    for slot, count in enumerate(accepted):  # the history holds what was accepted, and nothing else
        state = cast(ReferenceSampler, part.sampler)._slots[slot]
        assert state.output_tokens == wanted[slot][:count]


def test_a_row_that_fails_behind_a_draft_fails_in_its_own_step() -> None:
    done = Executed(2, 64)
    done.all[1] = np.nan
    part = SamplingPart(ReferenceSampler(VOCAB))
    part.set(new(0, GREEDY))
    best = int(done.all[0].argmax())
    output = StepOutput(1, {})
    part.rows(lay_out(ScheduledSeq(0, 1, [6], [best], [], True)))
    collect(part, done.rows(), 0, output)
    assert output == StepOutput(1, {0: [best]})
    output = StepOutput(2, {})
    part.rows(lay_out(ScheduledSeq(0, 2, [best], [3], [], True)))
    done.all[0] = np.nan
    collect(part, done.rows(), 0, output)
    assert output.tokens == {}
    assert "NaN" in output.errors[0]


def test_rows_are_computed_once_for_parts_that_share_a_piece() -> None:
    done = Executed(10, 4)
    rows = done.rows()
    for numbers in (range(3), range(3, 7), [7, 9]):
        found = [(part, logits.numpy()) for part, logits in rows.logits(numbers)]
        assert [i for part, _ in found for i in range(part.start, part.stop)] == list(range(len(numbers)))
        np.testing.assert_array_equal(
            np.concatenate([values for _, values in found]), done.all[list(numbers)]
        )
    assert done.pieces == [(0, 4), (4, 8), (9, 10)]
    assert rows.hidden(2, 4) is not None
