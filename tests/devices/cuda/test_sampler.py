"""Given the same logits, a device draws the token that the CPU draws, always."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quire import SamplingParams
from quire.devices.reference.sampler import ReferenceSampler, gumbel
from quire.devices.registry import make_backend
from quire.devices.sampling import SlotSampling
from quire.errors import EngineError
from tests.devices.test_sampler_native import copy, logits_of, same, slots

pytest.importorskip("triton", reason="the kernels of GPUs need triton")

import triton
import triton.language as tl

from quire.devices.cuda.interpreter import interpret
from quire.devices.cuda.kernels import sample
from quire.devices.host import HostLogits
from quire.devices.torch.run import TorchLogits


def sampler(vocab: int) -> Any:
    return make_backend(threads=1, device="interpreter").sampler(vocab)


def drawn(own: Any, logits: Any, states: list[SlotSampling], **more: Any) -> Any:
    for slot, state in enumerate(states):
        own.set(slot, copy(state))
    return own.sample(logits, list(range(len(states))), [state.position for state in states], **more).result()


@triton.jit
def noise(seeds, positions, out, SIZE: tl.constexpr):
    token = tl.arange(0, SIZE)[None, :]
    row = tl.arange(0, 4)[:, None]
    made = sample.gumbel(tl.load(seeds + row), tl.load(positions + row), token)
    tl.store(out + row * SIZE + token, made)


def test_noise_has_the_cpu_s_bits() -> None:
    seeds, positions = [0, 1, 2**63 + 5, 2**64 - 1], [0, 7, 131_072, 2**31 - 1]
    out = torch.empty(4, 4096, dtype=torch.float64)
    args = {
        "seeds": torch.from_numpy(np.array(seeds, np.uint64).view(np.int64)),
        "positions": torch.tensor(positions, dtype=torch.int32),
        "out": out,
    }
    interpret(noise, (1, 1, 1), args, {"SIZE": 4096})
    for row, seed, position in zip(out.numpy(), seeds, positions, strict=True):
        assert row.tobytes() == gumbel(seed, position, np.arange(4096)).tobytes()


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_tokens_and_logprobs_equal_the_reference(data: st.DataObject) -> None:
    vocab = data.draw(st.sampled_from([1, 2, 17, 33, 100, 1000]))
    states = data.draw(st.lists(slots(vocab), min_size=1, max_size=4))
    kind = data.draw(st.sampled_from(["normal", "ties", "flat", "holes", "wild"]))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    logits, more = logits_of(rng, len(states), vocab, kind), {}
    if data.draw(st.booleans()):
        more["masks_LW"] = rng.integers(0, 2**32, (len(states), (vocab + 31) // 32), dtype=np.uint32)
    tensor = torch.from_numpy(logits.copy())
    same(
        drawn(sampler(vocab), TorchLogits(tensor), states, **more),
        drawn(ReferenceSampler(vocab), HostLogits(logits), states, **more),
    )
    assert np.array_equal(tensor.numpy(), logits)


def test_a_hundred_thousand_rows_are_drawn_as_on_the_cpu() -> None:
    rng, cpu = np.random.default_rng(5), make_backend(threads=2, device="cpu")
    for vocab, kind, top_ks, top_ps in (
        (40, "normal", [0], [1.0]),
        (33, "ties", [0], [1.0]),
        (16, "ties", [0, 2, 5], [1.0]),
        (16, "normal", [0], [1.0, 0.9, 0.5]),
        (16, "holes", [0, 3, 7], [1.0, 0.8]),
    ):
        params = [
            SamplingParams(temperature=float(t), top_k=int(k), top_p=float(p), min_p=float(m))
            for t, k, p, m in zip(
                rng.choice([0.0, 0.3, 1.0, 2.0], 50), rng.choice(top_ks, 50), rng.choice(top_ps, 50),
                rng.choice([0.0, 0.0, 0.05], 50), strict=True,
            )
        ]  # fmt: skip
        states = [
            SlotSampling(int(rng.integers(2**63)), params[i % 50], [1] * (i % 7)) for i in range(20_000)
        ]
        logits = logits_of(rng, len(states), vocab, kind)
        here = drawn(sampler(vocab), TorchLogits(torch.from_numpy(logits)), states)
        assert here == drawn(cpu.sampler(vocab), HostLogits(logits), states)


def test_drafts_change_no_token() -> None:
    vocab, length, logits = 50, 9, logits_of(np.random.default_rng(3), 9, 50, "normal")
    params = SamplingParams(frequency_penalty=1.5, repetition_penalty=1.3, min_tokens=4)
    state = SlotSampling(11, params, [1, 2], [], stop_ids=(7,), bad_words=((5,), (9, 4)))
    plain = ReferenceSampler(vocab)
    plain.set(0, copy(state))
    tokens = [
        plain.sample(HostLogits(logits[i : i + 1]), [0], [2 + i]).result().tokens[0] for i in range(length)
    ]
    rows = TorchLogits(torch.from_numpy(logits))
    for wrong in (0, 4, length - 1):
        drafts = list(tokens)
        drafts[wrong] = (drafts[wrong] + 1) % vocab
        own = sampler(vocab)
        own.set(0, copy(state))
        found = own.sample(rows, [0] * length, list(range(2, 2 + length)), drafts).result().tokens
        assert found == tokens[: wrong + 1] + [-1] * (length - wrong - 1)
        own.retract(0, 1)
        assert own.sample(rows[wrong : wrong + 1], [0], [2 + wrong]).result().tokens == [tokens[wrong]]


def test_a_bad_row_fails_alone_and_misuse_is_refused() -> None:
    vocab, logits = 300, logits_of(np.random.default_rng(0), 4, 300, "normal")
    logits[1, 299], logits[2, 0] = np.nan, np.inf
    states = [SlotSampling(i, SamplingParams()) for i in range(4)]
    states[2] = SlotSampling(2, SamplingParams(allowed_token_ids=[4]))
    states[3] = SlotSampling(3, SamplingParams(allowed_token_ids=[4]), bad_words=((4,),))
    own = sampler(vocab)
    found = drawn(own, TorchLogits(torch.from_numpy(logits)), states)
    wanted = drawn(ReferenceSampler(vocab), HostLogits(logits), states)
    assert (found.tokens, found.errors) == (wanted.tokens, wanted.errors)
    row = TorchLogits(torch.zeros(1, vocab))
    for rows, given_slots, positions in (
        (row, [9], [0]),
        (row, [0], [5]),
        (TorchLogits(torch.zeros(1, 9)), [0], [0]),
    ):
        with pytest.raises(EngineError):
            own.sample(rows, given_slots, positions)
