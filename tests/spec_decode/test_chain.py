"""Drafts by a head: which sequences it keeps following while drafts do not pay."""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any

import numpy as np

from quire.params import SamplingParams
from quire.spec_decode.acceptance import Odds, Tally
from quire.spec_decode.chain import ChainProposer
from quire.spec_decode.controller import PROBE_SHARE
from quire.spec_decode.proposer import Computed, SpecSequence, StepView
from quire.types import Request

HEAD: Any = SimpleNamespace(
    taps=(0,), draft_ids=None, max_len=None, features=lambda taps, rows: np.zeros((len(rows), 1), np.float32)
)
BLOCKS: Any = SimpleNamespace(filled=lambda blocks, start: start, overwritten=lambda blocks, kept: None)
NONE: Any = None


def sequence(slot: int) -> SpecSequence:
    sampling = SamplingParams(max_tokens=8)
    request = Request(id=str(slot), tokens=[1, 2, 3], sampling=sampling, max_tokens=8, seed=0, arrival=0.0)
    return SpecSequence(slot, request, 0, array("i", [1, 2, 3, 4]), Odds(Tally(0.99)))


def test_a_head_follows_few_new_sequences_while_drafts_do_not_pay() -> None:
    proposer = ChainProposer(HEAD, NONE, NONE, BLOCKS, NONE, 64)
    table, counts = np.zeros((64, 1), np.int32), [1] * 64

    def first_step(slot: int, pays: bool) -> None:
        seq = sequence(slot)
        proposer.start(seq)
        proposer.observe([Computed(seq, 0, range(3))], StepView(table, counts, drafting_pays=pays))

    for slot in range(PROBE_SHARE - 1):
        first_step(slot, False)
    assert proposer.may_sleep
    first_step(PROBE_SHARE - 1, False)
    assert not proposer.may_sleep  # one measures whether drafts pay again
    proposer.stop(sequence(PROBE_SHARE - 1))
    assert proposer.may_sleep
    first_step(PROBE_SHARE, True)
    assert not proposer.may_sleep
