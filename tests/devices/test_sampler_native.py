"""The native sampler against the numpy oracle: the same tokens, whatever the parameters, batch and ISA."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire import _native
from quire.devices.cpu.sampler import NativeSampler
from quire.devices.host import HostLogits
from quire.devices.reference.sampler import ReferenceSampler
from quire.devices.sampling import Sampler, Samples, SlotSampling
from quire.errors import EngineError
from quire.params import SamplingParams

ISAS = _native.available_isas()
POOLS = {threads: _native.ThreadPool(threads) for threads in (1, 2, 3)}


@st.composite
def params(draw: st.DrawFn, vocab: int) -> SamplingParams:
    token = st.integers(0, vocab - 1)
    return SamplingParams(
        temperature=draw(st.sampled_from([0.0, 1e-6, 0.05, 0.7, 1.0, 1.0, 3.0, 1000.0])),
        top_k=draw(st.sampled_from([0, 0, 1, 2, 5, 40, vocab - 1, vocab + 7])),
        top_p=draw(st.sampled_from([1.0, 1.0, 0.999999, 0.95, 0.5, 0.01])),
        min_p=draw(st.sampled_from([0.0, 0.0, 0.01, 0.3, 1.0])),
        presence_penalty=draw(st.sampled_from([0.0, 0.0, 1.3, -0.7])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.0, 0.9, -1.1])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.0, 1.7, 0.4])),
        logit_bias=draw(st.none() | st.dictionaries(token, st.floats(-9, 9), max_size=4)),
        allowed_token_ids=draw(st.none() | st.none() | st.lists(token, min_size=1, max_size=20)),
        min_tokens=draw(st.sampled_from([0, 0, 1, 6])),
        logprobs=draw(st.sampled_from([None, 0, 3, 300, -1])),
    )


@st.composite
def slots(draw: st.DrawFn, vocab: int) -> SlotSampling:
    tokens = st.lists(st.integers(0, vocab - 1), max_size=6)
    return SlotSampling(
        seed=draw(st.integers(0, 2**64 - 1)),
        params=draw(params(vocab)),
        prompt_tokens=draw(tokens),
        output_tokens=draw(tokens),
        stop_ids=tuple(draw(tokens)),
        bad_words=tuple(tuple(w) for w in draw(st.lists(tokens.filter(bool), max_size=3))),
    )


def logits_of(rng: np.random.Generator, rows: int, vocab: int, kind: str) -> np.ndarray:
    x = rng.standard_normal((rows, vocab)).astype(np.float32) * np.float32(rng.choice([0.1, 1, 4, 30]))
    if kind == "ties":
        x = np.round(x)
    elif kind == "flat":
        x[:] = x[:, :1]
    elif kind == "holes":
        x[rng.random(x.shape) < 0.5] = -np.inf
    elif kind == "wild":
        x = np.clip(x, -30, 30) * np.float32(1e37)
    return np.ascontiguousarray(x, dtype=np.float32)


def copy(state: SlotSampling) -> SlotSampling:
    return SlotSampling(
        state.seed,
        state.params,
        list(state.prompt_tokens),
        list(state.output_tokens),
        state.stop_ids,
        state.bad_words,
    )


def same(a: Samples, b: Samples) -> None:
    assert a.tokens == b.tokens
    assert a.errors == b.errors
    assert a.logprobs.keys() == b.logprobs.keys()
    for row, x in a.logprobs.items():
        y = b.logprobs[row]
        assert (x.token, x.rank, x.top_ids) == (y.token, y.rank, y.top_ids)
        np.testing.assert_allclose([x.logprob, *x.top], [y.logprob, *y.top], rtol=1e-6, atol=2e-6)


def step(
    sampler: Sampler,
    states: list[SlotSampling],
    logits: np.ndarray,
    best_L: np.ndarray | None = None,
    **more: np.ndarray,
) -> Samples:
    for slot, state in enumerate(states):
        sampler.set(slot, copy(state))
    rows, positions = HostLogits(logits, best_L), [state.position for state in states]
    return sampler.sample(rows, list(range(len(states))), positions, **more)


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_tokens_and_logprobs_equal_the_reference(data: st.DataObject) -> None:
    vocab = data.draw(st.sampled_from([1, 2, 3, 15, 16, 17, 33, 100, 1000, 2500, 5000]))
    states = data.draw(st.lists(slots(vocab), min_size=1, max_size=3))
    kind = data.draw(st.sampled_from(["normal", "ties", "flat", "holes", "wild"]))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    logits = logits_of(rng, len(states), vocab, kind)
    masks = None
    if data.draw(st.booleans()):
        masks = rng.integers(0, 2**32, (len(states), (vocab + 31) // 32), dtype=np.uint32)
    more = {}
    if data.draw(st.booleans()):  # as an executable finds it
        known = [(row < np.inf).all() and rng.random() < 0.8 for row in logits]
        more["best_L"] = np.where(known, logits.argmax(axis=1), -1).astype(np.int32)
    isa, threads = data.draw(st.sampled_from(ISAS)), data.draw(st.sampled_from([1, 2, 3]))
    before = logits.copy()
    native = NativeSampler(vocab, POOLS[threads], isa)
    same(
        step(native, states, logits, masks_LW=masks, **more),
        step(ReferenceSampler(vocab), states, logits, masks_LW=masks),
    )
    np.testing.assert_array_equal(logits, before)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", ["normal", "flat", "ties"])
def test_large_vocabulary(isa: str, kind: str) -> None:
    vocab = 151_936
    options = [
        SamplingParams(),
        SamplingParams(temperature=0.6, top_k=20, top_p=0.95, logprobs=5),
        SamplingParams(top_p=0.9),
        SamplingParams(top_p=0.999, temperature=2.0),
        SamplingParams(top_k=60_000, repetition_penalty=1.2),
        SamplingParams(min_p=0.05, presence_penalty=0.5),
        SamplingParams(temperature=0.0, logprobs=20),
    ]
    states = [SlotSampling(i, p, [1, 2, 3], [5, 6, 5]) for i, p in enumerate(options)]
    rng = np.random.default_rng(7)
    logits = logits_of(rng, len(states), vocab, "normal" if kind == "normal" else kind)
    same(
        step(NativeSampler(vocab, POOLS[2], isa), states, logits),
        step(ReferenceSampler(vocab), states, logits),
    )


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([1, 2, 3]))
def test_a_row_depends_on_its_slot_alone(seed: int, threads: int) -> None:
    vocab, rows = 700, 6
    rng = np.random.default_rng(seed)
    logits = logits_of(rng, rows, vocab, "normal")
    states = [
        SlotSampling(
            int(rng.integers(2**63)), SamplingParams(top_p=0.9, temperature=0.5 + i, logprobs=2), [3] * i
        )
        for i in range(rows)
    ]
    together = step(NativeSampler(vocab, POOLS[threads]), states, logits)
    for i in range(rows):
        alone = step(NativeSampler(vocab, POOLS[1]), states[i : i + 1], logits[i : i + 1])
        assert alone.tokens[0] == together.tokens[i]
        assert alone.logprobs[0] == together.logprobs[i]


@pytest.mark.parametrize("make", [ReferenceSampler, lambda v: NativeSampler(v, POOLS[2])])
def test_drafts_change_no_token(make: object) -> None:
    """Rows fed with right drafts are drawn as if one by one; after a wrong draft nothing is drawn."""
    vocab, length = 50, 12
    rng = np.random.default_rng(3)
    logits = logits_of(rng, length, vocab, "normal")
    state = SlotSampling(
        11,
        SamplingParams(frequency_penalty=1.5, repetition_penalty=1.3, min_tokens=4),
        [1, 2],
        [],
        stop_ids=(7,),
        bad_words=((5,), (9, 4)),
    )
    plain = make(vocab)  # type: ignore[operator]
    plain.set(0, copy(state))
    tokens = [plain.sample(HostLogits(logits[i : i + 1]), [0], [2 + i]).tokens[0] for i in range(length)]
    for wrong in (0, 4, length - 1):
        drafts = list(tokens)
        drafts[wrong] = (drafts[wrong] + 1) % vocab
        sampler = make(vocab)  # type: ignore[operator]
        sampler.set(0, copy(state))
        positions = list(range(2, 2 + length))
        drawn = sampler.sample(HostLogits(logits), [0] * length, positions, drafts).tokens
        assert drawn == tokens[: wrong + 1] + [-1] * (length - wrong - 1)
        if wrong + 1 < length:
            at = wrong + 1
            later = sampler.sample(HostLogits(logits[at : at + 1]), [0], [2 + at])
            assert later.tokens[0] == tokens[at]


@pytest.mark.parametrize("make", [ReferenceSampler, lambda v: NativeSampler(v, POOLS[2])])
def test_a_bad_row_fails_alone(make: object) -> None:
    vocab = 300
    logits = logits_of(np.random.default_rng(0), 5, vocab, "normal")
    good = logits.copy()
    logits[1, 299] = np.nan
    logits[2, 0] = np.inf
    states = [SlotSampling(i, SamplingParams(logprobs=1)) for i in range(5)]
    states[3] = SlotSampling(3, SamplingParams(allowed_token_ids=[4]), bad_words=((4,),))
    sampler = make(vocab)  # type: ignore[operator]
    samples = step(sampler, states, logits)
    assert sorted(samples.errors) == [1, 2, 3]
    assert "NaN" in samples.errors[1]
    assert "NaN" in samples.errors[2]
    assert "forbidden" in samples.errors[3]
    assert samples.tokens[1:4] == [-1, -1, -1]
    expected = step(make(vocab), states, good)  # type: ignore[operator]
    assert [samples.tokens[i] for i in (0, 4)] == [expected.tokens[i] for i in (0, 4)]
    scores = sampler.logprobs(HostLogits(logits), np.zeros(5, np.int32), 2)
    assert [bool(np.isnan(s.logprob)) for s in scores] == [False, True, True, False, False]


@pytest.mark.parametrize("make", [ReferenceSampler, lambda v: NativeSampler(v, POOLS[2])])
def test_misuse_is_refused(make: object) -> None:
    sampler = make(10)  # type: ignore[operator]
    row, slot, at = HostLogits(np.zeros((1, 10), np.float32)), [0], [0]
    with pytest.raises(EngineError, match="never set"):
        sampler.sample(row, slot, at)
    for state in (
        SlotSampling(0, SamplingParams(logit_bias={10: 1.0})),
        SlotSampling(0, SamplingParams(allowed_token_ids=[3, 11])),
        SlotSampling(0, SamplingParams(), stop_ids=(12,)),
        SlotSampling(0, SamplingParams(), bad_words=((1, 10),)),
        SlotSampling(0, SamplingParams(), bad_words=((),)),
        SlotSampling(0, SamplingParams(), [10]),
    ):
        with pytest.raises(EngineError):
            sampler.set(0, state)
    sampler.set(0, SlotSampling(0, SamplingParams()))
    sampler.set(1, SlotSampling(0, SamplingParams()))
    for bad in (
        (HostLogits(row.values[:, :9].copy()), slot, at),
        (HostLogits(row.values.astype(np.float64)), slot, at),
        (HostLogits(np.zeros((10, 1), np.float32).T.repeat(2, axis=1)[:, ::2]), slot, at),
        (row, [0, 0], at),
        (row, slot, [1]),
        (HostLogits(np.zeros((2, 10), np.float32)), [0, 0], [0, 1]),
        (HostLogits(row.values, np.zeros(2, np.int32)), slot, at),
        (row.values, slot, at),
    ):
        with pytest.raises(EngineError):
            sampler.sample(*bad)
    with pytest.raises(EngineError, match="masks"):
        sampler.sample(row, slot, at, masks_LW=np.zeros((1, 2), np.uint32))
    with pytest.raises(EngineError, match="targets"):
        sampler.logprobs(row, np.array([10], np.int32), 0)
    with pytest.raises(EngineError, match="adjacent"):
        sampler.sample(HostLogits(np.zeros((3, 10), np.float32)), [0, 1, 0], [0, 0, 0], [0, 0, 0])
    assert sampler.sample(row, slot, at).tokens[0] >= 0
    sampler.clear(0)
    sampler.clear(0)
    with pytest.raises(EngineError, match="never set"):
        sampler.sample(row, slot, [1])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("vocab", [1, 17, 5000])
def test_prompt_logprobs(isa: str, vocab: int) -> None:
    rng = np.random.default_rng(vocab)
    logits = logits_of(rng, 5, vocab, "normal")
    targets = rng.integers(0, vocab, 5).astype(np.int32)
    for num_top in (0, 1, 10, -1):
        native = NativeSampler(vocab, POOLS[3], isa).logprobs(HostLogits(logits), targets, num_top)
        reference = ReferenceSampler(vocab).logprobs(HostLogits(logits), targets, num_top)
        for x, y in zip(native, reference, strict=True):
            assert (x.token, x.rank, x.top_ids) == (y.token, y.rank, y.top_ids)
            np.testing.assert_allclose([x.logprob, *x.top], [y.logprob, *y.top], rtol=1e-6, atol=2e-6)


def test_log_probabilities_have_the_same_bits_in_every_isa() -> None:
    logits = logits_of(np.random.default_rng(1), 4, 5001, "normal")
    targets = np.arange(4, dtype=np.int32)
    results = [NativeSampler(5001, POOLS[2], isa).logprobs(HostLogits(logits), targets, 7) for isa in ISAS]
    assert all(result == results[0] for result in results)
