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
