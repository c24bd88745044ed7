"""Draws: their distribution, their independence, and what they depend on. Run on the oracle and the native sampler."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from quire import _native
from quire.devices.cpu.sampler import NativeSampler
from quire.devices.host import HostLogits
from quire.devices.reference.logits import truncate
from quire.devices.reference.sampler import ReferenceSampler, gumbel, log_portable, philox
from quire.devices.sampling import Sampler, SlotSampling
from quire.errors import EngineError
from quire.params import SamplingParams

POOL = _native.ThreadPool(2)
Make = Callable[[int], Sampler]
SAMPLERS = [ReferenceSampler, lambda vocab: NativeSampler(vocab, POOL)]
both = pytest.mark.parametrize("make", SAMPLERS, ids=["reference", "native"])


def draws(
    make: Make, logits: np.ndarray, params: SamplingParams, count: int, first_seed: int = 0
) -> np.ndarray:
    """Tokens of `count` slots that differ in their seed alone."""
    sampler = make(len(logits))
    for slot in range(count):
        sampler.set(slot, SlotSampling(first_seed + slot, params))
    rows = HostLogits(np.tile(logits, (count, 1)))
    return np.array(sampler.sample(rows, list(range(count)), [0] * count).tokens)


def chi_square(counts: np.ndarray, expected: np.ndarray) -> float:
    """In standard deviations from its mean. Bins that expect fewer than 10 count as one."""
    assert not counts[expected == 0].any()
    rare = expected < 10
    if rare.any():
        counts = np.append(counts[~rare], counts[rare].sum())
        expected = np.append(expected[~rare], max(expected[rare].sum(), 1e-9))
    degrees = max(len(expected) - 1, 1)
    statistic = float(((counts - expected) ** 2 / expected).sum())
    return (statistic - degrees) / math.sqrt(2 * degrees)


@both
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.5),
        SamplingParams(temperature=2.0, top_k=7),
        SamplingParams(top_p=0.8),
        SamplingParams(min_p=0.1),
        SamplingParams(temperature=1.5, top_k=9, top_p=0.9, min_p=0.02),
    ],
    ids=["plain", "cold", "top_k", "top_p", "min_p", "all"],
)
def test_distribution(make: Make, params: SamplingParams) -> None:
    logits = (np.random.default_rng(5).standard_normal(20) * 1.5).astype(np.float32)
    count = 2000 if make is ReferenceSampler else 40_000
    counts = np.bincount(draws(make, logits, params, count), minlength=20)
    kept = truncate(logits, params)
    p = np.where(kept, np.exp((logits - logits.max()) / params.temperature), 0.0)
    assert abs(chi_square(counts, count * p / p.sum())) < 5


def test_large_vocabulary_distribution() -> None:
    """The pruned draw over many tokens: grouped by id, the counts follow the softmax."""
    logits = (np.random.default_rng(6).standard_normal(3000) * 2).astype(np.float32)
    p = np.exp(logits.astype(np.float64))
    p /= p.sum()
    tokens = draws(SAMPLERS[1], logits, SamplingParams(), 20_000)
    groups = np.arange(3000) % 30
    counts = np.bincount(groups[tokens], minlength=30)
    assert abs(chi_square(counts, 20_000 * np.bincount(groups, weights=p))) < 5


@both
def test_positions_and_seeds_are_independent(make: Make) -> None:
    """Pairs drawn at neighbouring positions, or with neighbouring seeds, are uniform over all pairs."""
    vocab, count = 4, 1000 if make is ReferenceSampler else 16_000
    sampler = make(vocab)
    row = HostLogits(np.zeros((count, vocab), np.float32))
    slots = list(range(count))
    for slot in range(count):
        sampler.set(slot, SlotSampling(slot, SamplingParams()))
    first, second = (np.array(sampler.sample(row, slots, [at] * count).tokens) for at in (0, 1))
    expected = np.full(16, count / 16)
    assert abs(chi_square(np.bincount(first * 4 + second, minlength=16), expected)) < 5
    neighbours = first[:-1] * 4 + first[1:]
    assert abs(chi_square(np.bincount(neighbours, minlength=16), np.full(16, (count - 1) / 16))) < 5


def test_greedy_is_the_argmax_with_the_lowest_id() -> None:
    logits = np.array([1.0, 5.0, 5.0, 2.0], np.float32)
    for make in SAMPLERS:
        assert draws(make, logits, SamplingParams(temperature=0.0), 3).tolist() == [1, 1, 1]
        biased = SamplingParams(temperature=0.0, logit_bias={3: 4.0})
        assert draws(make, logits, biased, 1).tolist() == [3]


def test_logprobs_are_those_of_the_raw_logits() -> None:
    logits = np.array([0.0, math.log(2.0), math.log(5.0)], np.float32)
    params = SamplingParams(temperature=0.0, logit_bias={0: 50.0}, logprobs=2)
    for make in SAMPLERS:
        sampler = make(3)
        sampler.set(4, SlotSampling(0, params))
        samples = sampler.sample(HostLogits(logits[None]), [4], [0])
        entry = samples.logprobs[0]
        assert (entry.token, entry.rank, entry.top_ids) == (0, 3, [2, 1])
        np.testing.assert_allclose(np.exp([entry.logprob, *entry.top]), [1 / 8, 5 / 8, 2 / 8], rtol=1e-6)


def test_philox_known_answers() -> None:
    """Vectors of the Random123 distribution (kat_vectors, philox4x32 10)."""
    ones = 0xFFFFFFFF
    for counter, seed, words in (
        ([0, 0, 0, 0], 0, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([ones] * 4, (ones << 32) | ones, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            (0x299F31D0 << 32) | 0xA4093822,
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ):
        assert [int(w[0]) for w in philox([np.array([c], np.uint64) for c in counter], seed)] == words


def test_one_bit_of_the_key_changes_all_of_the_noise() -> None:
    tokens = np.arange(2000)
    base = gumbel(0, 0, tokens)
    for seed, position in [(1, 0), (1 << 63, 0), (0, 1), (0, 1 << 40)]:
        other = gumbel(seed, position, tokens)
        assert abs(np.corrcoef(base, other)[0, 1]) < 0.1
        assert not (base == other).any()
    # Mean and variance of the standard Gumbel distribution: Euler's constant, pi^2 / 6.
    assert abs(base.mean() - 0.5772) < 0.1
    assert abs(base.var() - math.pi**2 / 6) < 0.3


def test_portable_log_is_accurate() -> None:
    rng = np.random.default_rng(2)
    x = np.concatenate(
        [rng.random(5000), 1 - 2.0 ** -np.arange(1.0, 53), 2.0 ** -np.arange(1.0, 53), [36.7, 1.0]]
    )
    np.testing.assert_allclose(log_portable(x), np.log(x), rtol=1e-14, atol=0)


@both
def test_tokens_that_are_taken_back_leave_no_trace(make: Make) -> None:
    vocab = 6
    params = SamplingParams(repetition_penalty=1.4, frequency_penalty=0.3, presence_penalty=0.2, min_tokens=3)
    rng = np.random.default_rng(3)
    rows = [HostLogits(rng.normal(size=(1, vocab)).astype(np.float32)) for _ in range(8)]

    def drawn(sampler: Sampler, start: int, stop: int) -> list[int]:
        return [sampler.sample(rows[i], [0], [2 + i]).tokens[0] for i in range(start, stop)]

    plain, other = make(vocab), make(vocab)
    for sampler in (plain, other):
        sampler.set(0, SlotSampling(7, params, prompt_tokens=[1, 4], stop_ids=(2,)))
    wanted = drawn(plain, 0, 8)
    assert drawn(other, 0, 3) == wanted[:3]
    other.extend(0, [4, 4, 0, 5])
    other.retract(0, 4)
    drawn(other, 3, 6)
    other.retract(0, 4)
    assert drawn(other, 2, 8) == wanted[2:]
    with pytest.raises(EngineError, match="does not have"):
        other.retract(0, 9)
