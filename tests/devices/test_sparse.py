"""Sparse attention: right by formulas written plainly, and the same choice and bits however tokens come."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.devices.protocol import Backend, KVLayer, KVSpec
from quire.devices.reference.backend import ReferenceBackend
from quire.devices.torch.backend import TorchBackend
from tests.devices.sparse_cases import (
    FORMS,
    Form,
    Machine,
    Part,
    Weights,
    drawn,
    plain,
    without_choice,
)

BACKENDS: dict[str, Backend] = {"reference": ReferenceBackend(), "torch": TorchBackend(1)}


@pytest.fixture(params=BACKENDS, scope="module")
def backend(request: pytest.FixtureRequest) -> Backend:
    return BACKENDS[request.param]


def machine(
    backend: Backend, form: Form, seed: int, block_size: int = 16, whole: bool = False
) -> tuple[Machine, Weights, Any]:
    """A machine over 90 rows, whose cache is filled with NaN. `whole`: small whole numbers, whose scores tie."""
    rng = np.random.default_rng(seed)
    weights, x = Weights.drawn(form, rng), drawn(form, rng, 91)
    if whole:
        x = np.round(x)
    x[-1] = np.nan
    found = Machine(backend, form, weights, x, block_size=block_size, seed=seed)
    for seq in range(6):
        found.whole(np.full(100, 90), seq)
    return found, weights, x


def listed(chosen: Any, form: Form) -> list[list[list[int]]]:
    """The numbers of each query and group; -1 only after them, and all ascend."""
    rows = []
    for row in chosen.reshape(len(chosen), form.groups, -1):
        own = [[int(n) for n in numbers if n >= 0] for numbers in row]
        padded = [numbers + [-1] * (row.shape[1] - len(numbers)) for numbers in own]
        assert row.tolist() == padded
        rows.append(own)
    return rows


@pytest.mark.parametrize("block_size", [16, 4, 12, 128])
@pytest.mark.parametrize("name", FORMS)
def test_results_are_those_of_the_plain_formula(backend: Backend, name: str, block_size: int) -> None:
    form = FORMS[name]
    found, weights, x = machine(backend, form, 1, block_size)
    tokens = np.random.default_rng(2).integers(0, 90, 75)
    wanted, choices = plain(form, weights, x[tokens])
    got, chosen = found.whole(tokens)
    if form.chooses:
        assert listed(chosen, form) == choices
    np.testing.assert_allclose(got, wanted, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("name", [name for name, form in FORMS.items() if form.chooses])
def test_of_equal_scores_the_earlier_pool_goes_first(backend: Backend, name: str) -> None:
    """Keys that repeat, and products that relu makes 0."""
    form = replace(FORMS[name], turns=False)
    found, weights, x = machine(backend, form, 3)
    tokens = np.tile(np.random.default_rng(4).integers(0, 90, form.size), 80 // form.size)
    _, choices = plain(form, weights, x[tokens])
    assert listed(found.whole(tokens)[1], form) == choices


@settings(deadline=None, max_examples=8)
@given(
    name=st.sampled_from(sorted(FORMS)), seed=st.integers(0, 2**31), block_size=st.sampled_from([16, 8, 64])
)
def test_every_schedule_gives_the_same_bits(backend: Backend, name: str, seed: int, block_size: int) -> None:
    check_schedules(backend, FORMS[name], seed, block_size)


def check_schedules(backend: Backend, form: Form, seed: int, block_size: int) -> None:
    """Chunks and batches in any order, and tokens computed again, equal each sequence whole."""
    rng = np.random.default_rng(seed)
    found, _, _ = machine(backend, form, seed, block_size)
    tokens = {seq: rng.integers(0, 90, int(rng.integers(1, 70))) for seq in range(4)}
    whole = {seq: found.whole(own, 5) for seq, own in tokens.items()}
    done = dict.fromkeys(tokens, 0)
    while live := [seq for seq, own in tokens.items() if done[seq] < len(own)]:
        chosen = rng.permutation(live)[: int(rng.integers(1, len(live) + 1))].tolist()
        parts = [
            Part(seq, done[seq], int(rng.integers(done[seq] + 1, min(len(tokens[seq]), done[seq] + 30) + 1)))
            for seq in chosen
        ]
        shown = {seq: own.copy() for seq, own in tokens.items()}
        for part in parts:
            right = int(rng.integers(part.start, part.stop + 1)) if rng.random() < 0.4 else part.stop
            shown[part.seq][right : part.stop] = rng.integers(
                0, 90, part.stop - right
            )  # drafts that are wrong
            done[part.seq] = right
        for part, results in zip(parts, found.run(parts, shown), strict=True):
            for got, wanted in zip(results, whole[part.seq], strict=True):
                count = done[part.seq] - part.start
                assert got[:count].tobytes() == wanted[part.start :][:count].tobytes()


@pytest.mark.parametrize("name", [name for name, form in FORMS.items() if form.chooses and not form.attends])
def test_who_chooses_everything_has_the_bits_of_full_attention(backend: Backend, name: str) -> None:
    form = FORMS[name]
    tokens = np.random.default_rng(5).integers(0, 90, form.top_k * form.size)
    got = machine(backend, form, 6)[0].whole(tokens)[0]
    full = machine(backend, without_choice(form), 6)[0].whole(tokens)[0]
    assert got.tobytes() == full.tobytes()


def test_copied_blocks_have_their_entries(backend: Backend) -> None:
    form = FORMS["DeepSeek-V4 CSA"]
    found = machine(backend, form, 7)[0]
    tokens = np.random.default_rng(8).integers(0, 90, 60)
    wanted = found.whole(tokens, 0)[0]
    found.kv.copy_blocks(list(zip(found.tables[0].tolist(), found.tables[3].tolist(), strict=True)))
    got = found.run([Part(3, 37, 60)], {3: tokens})[0][0]
    assert got.tobytes() == wanted[37:].tobytes()


def test_bytes_count_entries_and_layers_without_values() -> None:
    layers = KVLayer(2, 16), KVLayer(1, 8, value_dim=8), KVLayer(1, 8, value_dim=8, every=4)
    spec = KVSpec(3, 2, 16, "bfloat16", layers=layers)
    assert [spec.layer_bytes(i) for i in range(3)] == [2 * 2 * 16 * 2, 16, 16]
    assert spec.bytes_per_token == 128 + 16 + 4
    assert spec.token_bytes(2) == 128 + 16 + 8  # a row in each block
    assert spec.token_bytes(6) == -(-(6 * 144 + 2 * 16) // 6)
    assert KVSpec(2, 1, 8, "int8", value_dim=6).bytes_per_token == 2 * 12


def test_entries_lie_where_their_last_position_does() -> None:
    layer = KVLayer(1, 8, value_dim=8, every=128)
    assert [layer.rows(size) for size in (16, 128, 200, 256)] == [1, 1, 2, 2]
