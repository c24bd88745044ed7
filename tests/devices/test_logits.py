"""The stages and truncations by hand-computed examples."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from quire.devices.reference.logits import STAGES, exp_portable, log_softmax, truncate, weights
from quire.devices.sampling import SlotSampling, takes_largest
from quire.params import SamplingParams


def after_stages(logits: list[float], slot: SlotSampling, mask: list[int] | None = None) -> list[float]:
    row = np.array(logits, dtype=np.float32)
    bits = None if mask is None else np.array(mask, dtype=np.uint32)
    for stage in STAGES:
        stage(row, slot, bits)
    return [round(x, 5) for x in row.tolist()]


def kept(logits: list[float], **params: float) -> list[int]:
    row = np.array(logits, dtype=np.float32)
    return np.flatnonzero(truncate(row, SamplingParams(**params))).tolist()


NONE = -math.inf


def test_stage_order() -> None:
    assert [stage.__name__ for stage in STAGES] == [
        "allowed_tokens",
        "token_mask",
        "bad_words",
        "min_tokens",
        "logit_bias",
        "repetition_penalty",
        "frequency_and_presence",
    ]


def test_penalties() -> None:
    params = SamplingParams(repetition_penalty=2.0, frequency_penalty=0.5, presence_penalty=0.25)
    slot = SlotSampling(0, params, prompt_tokens=[0, 1], output_tokens=[1, 2, 2])
    # 0: prompt only, halved. 1: negative, doubled, once in the output. 2: halved, twice. 3: untouched.
    assert after_stages([4.0, -1.0, 3.0, 5.0], slot) == [2.0, -2.75, 0.25, 5.0]


def test_bias_comes_before_the_penalties() -> None:
    slot = SlotSampling(0, SamplingParams(repetition_penalty=2.0, logit_bias={0: -5.0, 1: 1.0}), [0])
    assert after_stages([4.0, 0.0], slot) == [-2.0, 1.0]


def test_allowed_and_mask() -> None:
    slot = SlotSampling(0, SamplingParams(allowed_token_ids=[0, 2, 3]))
    assert after_stages([1.0, 2.0, 3.0, 4.0], slot, [0b0111]) == [1.0, NONE, 3.0, NONE]
    wide = after_stages([0.0] * 40, SlotSampling(0, SamplingParams()), [1 << 31, 1 << 7])
    assert [i for i, x in enumerate(wide) if x == 0.0] == [31, 39]


@pytest.mark.parametrize(
    ("output", "forbidden"),
    [([], {5}), ([1], {5, 2}), ([1, 2], {5, 3}), ([2], {5}), ([1, 2, 1], {5, 2}), ([0, 1, 2], {5, 3})],
)
def test_bad_words(output: list[int], forbidden: set[int]) -> None:
    """The prompt does not count: a bad word must complete within the output."""
    slot = SlotSampling(0, SamplingParams(), [1, 2], output, bad_words=((5,), (1, 2), (1, 2, 3)))
    row = after_stages([0.0] * 6, slot)
    assert {i for i, x in enumerate(row) if x == NONE} == forbidden


def test_min_tokens() -> None:
    slot = SlotSampling(0, SamplingParams(min_tokens=2), [0], [0], stop_ids=(1, 3))
    assert after_stages([0.0] * 4, slot) == [0.0, NONE, 0.0, NONE]
    slot.output_tokens.append(2)
    assert after_stages([0.0] * 4, slot) == [0.0] * 4


def test_top_k_breaks_ties_by_id() -> None:
    assert kept([1.0, 3.0, 2.0, 2.0, 2.0], top_k=3) == [1, 2, 3]
    assert kept([1.0, 3.0], top_k=9) == [0, 1]


def test_top_p_is_the_smallest_set_that_reaches() -> None:
    half = [math.log(p) for p in (0.125, 0.5, 0.25, 0.125)]
    assert kept(half, top_p=0.49) == [1]
    assert kept(half, top_p=0.51) == [1, 2]
    assert kept(half, top_p=0.8) == [0, 1, 2]
    assert kept(half, top_p=0.9) == [0, 1, 2, 3]
    assert kept([0.0] * 4, top_p=0.5) == [0, 1]
    assert kept([0.0] * 4, top_p=0.51) == [0, 1, 2]
    assert kept([9.0, 1.0], top_p=1e-9) == [0]


def test_top_p_counts_what_min_p_and_top_k_left() -> None:
    row = [math.log(p) for p in (0.4, 0.3, 0.2, 0.1)]
    assert kept(row, top_p=0.55) == [0, 1]
    assert kept(row, top_p=0.55, top_k=2) == [0]
    assert kept(row, min_p=0.6) == [0, 1]
    assert kept(row, min_p=0.3, top_p=0.75) == [0, 1]
    assert kept(row, min_p=1.0) == [0]


def test_temperature_widens_the_nucleus() -> None:
    row = [2.0, 0.0, -2.0]
    assert kept(row, top_p=0.7, temperature=1.0) == [0]
    assert kept(row, top_p=0.7, temperature=4.0) == [0, 1]


def test_forbidden_tokens_are_never_kept() -> None:
    assert kept([NONE, 0.0, NONE], top_p=0.999) == [1]
    assert kept([NONE, 0.0, NONE]) == [1]


def test_portable_exp_is_accurate() -> None:
    t = -np.abs(np.random.default_rng(0).standard_normal(20_000) * 20).astype(np.float32)
    t = t[t > -80]
    exact = np.exp(t.astype(np.float64))
    assert np.abs(exp_portable(t) / exact - 1).max() < 2.5e-7
    assert exp_portable(np.array([0.0], np.float32))[0] == 1.0
    assert exp_portable(np.array([-np.inf], np.float32))[0] < 1e-34


def test_weights_stay_exact_in_any_order() -> None:
    assert int(weights(np.zeros(4, np.float32)).sum()) == 4 << 34
    many = weights(np.zeros(1 << 21, np.float32))
    assert int(many.sum()) == 1 << 53


def test_log_softmax() -> None:
    row = np.array([0.0, math.log(3.0), NONE], np.float32)
    np.testing.assert_allclose(np.exp(log_softmax(row)), [0.25, 0.75, 0.0], rtol=1e-6)


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({}, True),
        ({"temperature": 1e-6, "top_k": 5, "top_p": 0.5, "max_tokens": 3, "seed": 1}, True),
        ({"temperature": 0.5}, False),
        ({"logprobs": 0}, False),
        ({"allowed_token_ids": [1]}, False),
        ({"min_tokens": 1}, False),
        ({"logit_bias": {1: 1.0}}, False),
        ({"logit_bias": {}}, True),
        ({"repetition_penalty": 1.1}, False),
        ({"frequency_penalty": -0.1}, False),
        ({"presence_penalty": 0.1}, False),
    ],
)
def test_what_the_largest_logit_is_enough_for(params: dict[str, Any], expected: bool) -> None:
    """Where it is, no stage changes a logit."""
    greedy = SamplingParams(**{"temperature": 0.0, **params})
    assert takes_largest(greedy, ()) is expected
    assert not takes_largest(greedy, ((1, 2),))
    if expected:
        slot = SlotSampling(0, greedy, [0, 1], [1], stop_ids=(2,))
        assert after_stages([4.0, -1.0, 3.0], slot) == [4.0, -1.0, 3.0]
