"""How a step is laid out."""

from __future__ import annotations

import numpy as np
import pytest

from quire.errors import EngineError
from quire.runtime.inputs import InputBuilder
from quire.types import UNSEEN, ScheduledBatch, ScheduledSeq


def batch(*seqs: ScheduledSeq) -> ScheduledBatch:
    return ScheduledBatch(1, [], list(seqs), [], [])


def test_drafts_follow_the_tokens() -> None:
    builder = InputBuilder(4, 3)
    step = builder.lay_out(
        batch(
            ScheduledSeq(2, 0, [5, 6, 7], [], [9], False),
            ScheduledSeq(0, 10, [8], [1, 2], [4, 3], True),
            ScheduledSeq(3, 2, [4], [], [], True),
        ),
        {},
        (),
    )
    inputs = builder.build(step, [4, 5, 6], greedy=True)
    assert inputs.tokens_T.tolist() == [5, 6, 7, 8, 1, 2, 4]
    assert inputs.positions_T.tolist() == [0, 1, 2, 10, 11, 12, 2]
    assert inputs.cu_q_B1.tolist() == [0, 3, 6, 7]
    assert inputs.kv_len_B.tolist() == [3, 13, 3]
    assert inputs.slots_B.tolist() == [2, 0, 3]
    assert inputs.logit_rows_L.tolist() == [4, 5, 6]
    assert inputs.greedy
    assert inputs.block_table_SM[[2, 0], :2].tolist() == [[9, 0], [4, 3]]


def test_a_freed_slot_gets_a_new_block_table() -> None:
    builder = InputBuilder(2, 3)
    builder.lay_out(batch(ScheduledSeq(1, 0, [5], [], [7, 8], True)), {}, ())
    builder.lay_out(batch(ScheduledSeq(1, 1, [5], [], [6], True)), {}, ())
    builder.clear(1)
    step = builder.lay_out(batch(ScheduledSeq(1, 0, [5], [], [2], True)), {}, ())
    assert builder.build(step, [], greedy=False).block_table_SM[1].tolist() == [2, 8, 6]


def test_unseen_tokens_are_the_last_sample() -> None:
    builder = InputBuilder(3, 3)
    step = builder.lay_out(
        batch(
            ScheduledSeq(0, 4, [7, UNSEEN, UNSEEN], [3], [], True),
            ScheduledSeq(1, 4, [UNSEEN], [], [], True),
            ScheduledSeq(2, 4, [UNSEEN], [], [], True),
        ),
        {0: (11, 12), 1: (13,)},
        {2},
    )
    assert step.tokens == [7, 11, 12, 3, 13, 0]
    assert np.all(step.ends == [8, 5, 5])


@pytest.mark.parametrize("tokens", [[UNSEEN], [UNSEEN, 5, UNSEEN], [1, UNSEEN, UNSEEN, UNSEEN]])
def test_unseen_tokens_must_be_those_of_the_sample(tokens: list[int]) -> None:
    seqs = batch(ScheduledSeq(0, 4, tokens, [], [], True))
    with pytest.raises(EngineError, match="unseen tokens at its end, and 2 were sampled"):
        InputBuilder(1, 3).lay_out(seqs, {0: (1, 2)}, ())


def test_unseen_tokens_and_appended_blocks_are_named_for_a_device_that_has_the_others() -> None:
    builder = InputBuilder(3, 3, mirrored=True)
    first = batch(ScheduledSeq(1, 0, [5, 6], [], [7, 8], True), ScheduledSeq(0, 0, [4], [], [2], True))
    found = builder.build(builder.lay_out(first, None, ()), [1], greedy=True)
    assert found.unseen_U2 is None
    assert found.appended_C3 is not None
    assert found.appended_C3.tolist() == [[1, 0, 7], [1, 1, 8], [0, 0, 2]]
    # A step that is laid out and then fails; its blocks are replaced before the next one is built.
    builder.lay_out(batch(ScheduledSeq(0, 1, [UNSEEN], [], [9], True)), None, ())
    builder.clear(0)
    later = batch(ScheduledSeq(0, 0, [4, 3], [], [5, 6], True), ScheduledSeq(1, 2, [UNSEEN], [], [], True))
    found = builder.build(builder.lay_out(later, None, ()), [1, 2], greedy=True)
    assert found.unseen_U2 is not None
    assert found.unseen_U2.tolist() == [[2, 1]]
    assert found.tokens_T.tolist() == [4, 3, 0]
    assert found.appended_C3 is not None
    assert sorted(found.appended_C3.tolist()) == [[0, 0, 5], [0, 1, 6]]
