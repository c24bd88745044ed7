"""What a request brings is made once for its slots, and means what it means in slots that share nothing."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.devices.cpu.sampler import NativeSampler
from quire.devices.host import HostLogits
from quire.devices.reference.sampler import ReferenceSampler
from quire.devices.sampling import SlotSampling
from quire.devices.shared import Shared
from quire.params import SamplingParams
from tests.devices.test_sampler_native import POOLS, slots


def test_a_value_lives_from_its_first_slot_to_its_last() -> None:
    shared: Shared[list[int]] = Shared()
    made: list[str] = []

    def make(source: str) -> list[int]:
        made.append(source)
        return []

    first = shared.take(1, "a", "a", make)
    assert shared.take(2, "a", "a", make) is first
    assert shared.of(2) is first
    assert shared.take(2, "b", "b", make) is not first
    shared.clear(1)
    shared.clear(1)
    shared.take(3, "a", "a", make)
    assert made == ["a", "b", "a"]


def test_the_sampler_reads_the_lists_of_a_request_once() -> None:
    read: list[int] = []

    class Counted(NativeSampler):
        def _make_rules(self, state: SlotSampling) -> object:  # type: ignore[override]
            read.append(len(state.params.allowed_token_ids or ()))
            return super()._make_rules(state)

    sampler = Counted(50_000, POOLS[1])
    params, prompt = SamplingParams(allowed_token_ids=list(range(1, 50_000, 2))), [1, 2, 3]
    for slot in range(256):
        sampler.set(slot, SlotSampling(slot, params, prompt, stop_ids=(7, 8)))
    assert read == [25_000]


@settings(max_examples=150, deadline=None)
@given(st.data(), st.integers(2, 60))
def test_slots_of_a_request_draw_what_they_draw_alone(data: st.DataObject, vocab: int) -> None:
    state = data.draw(slots(vocab))
    outputs = data.draw(st.lists(st.lists(st.integers(0, vocab - 1), max_size=6), min_size=2, max_size=5))
    states = [replace(state, seed=state.seed ^ i, output_tokens=list(out)) for i, out in enumerate(outputs)]
    logits = np.random.default_rng(data.draw(st.integers(0, 99))).standard_normal((len(states), vocab))
    together, alone = NativeSampler(vocab, POOLS[2]), ReferenceSampler(vocab)
    for slot, one in enumerate(states):
        together.set(slot, replace(one, output_tokens=list(one.output_tokens)))
        alone.set(slot, replace(one, output_tokens=list(one.output_tokens)))
    together.clear(0)
    together.set(0, replace(states[0], output_tokens=list(outputs[0])))
    rows, places = HostLogits(logits.astype(np.float32)), [one.position for one in states]
    found = together.sample(rows, list(range(len(states))), places)
    expected = alone.sample(rows, list(range(len(states))), places)
    assert found.tokens == expected.tokens
    assert found.errors == expected.errors
