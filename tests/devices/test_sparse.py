"""Sparse attention: right by formulas written plainly, and the same choice and bits however tokens come."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.devices.cpu.backend import NativeBackend
from quire.devices.graph import record
from quire.devices.ops import Attend, Embed, Linear, SelectRows
from quire.devices.protocol import Attention, Backend, KVDtype, KVLayer, KVSpec, Limits
from quire.devices.reference.backend import ReferenceBackend
from quire.devices.sparse_ops import Choose, StoreKeys
from quire.devices.torch.backend import TorchBackend
from quire.devices.torch.cache import TorchKVCache
from quire.errors import EngineError
from quire.weights.activations import round_int8
from tests.devices.native_cases import ISAS, native
from tests.devices.sparse_cases import (
    FORMS,
    Form,
    Machine,
    Part,
    Weights,
    choice,
    drawn,
    index_keys,
    plain,
    without_choice,
)

BACKENDS: dict[str, Backend] = {
    "reference": ReferenceBackend(),
    "torch": TorchBackend(1),
    **{isa: native(isa) for isa in ISAS},
}
DTYPES: tuple[KVDtype, ...] = ("float32", "bfloat16", "float16", "int8", "fp8_e4m3", "fp8_e5m2")


@pytest.fixture(params=BACKENDS, scope="module")
def backend(request: pytest.FixtureRequest) -> Backend:
    return BACKENDS[request.param]


def machine(
    backend: Backend,
    form: Form,
    seed: int,
    block_size: int = 16,
    dtype: KVDtype = "float32",
    length: int = 128,
) -> tuple[Machine, Weights, Any]:
    """A machine over 90 rows, whose cache is filled with NaN."""
    rng = np.random.default_rng(seed)
    weights, x = Weights.drawn(form, rng), drawn(form, rng, 91)
    x[-1] = np.nan
    found = Machine(backend, form, weights, x, dtype, block_size, seed, length)
    if isinstance(found.kv, TorchKVCache):
        for side in found.kv.keys + found.kv.values:
            side.fill_(np.nan)
    for seq in range(6 if isinstance(backend, NativeBackend) else 0):  # the reference begins so
        found.whole(np.full(length, 90), seq)
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
    check_schedules(backend, FORMS[name], seed, block_size, DTYPES[seed % len(DTYPES)])


def check_schedules(backend: Backend, form: Form, seed: int, block_size: int, dtype: KVDtype) -> None:
    """Chunks and batches in any order, and tokens computed again, equal each sequence whole."""
    rng = np.random.default_rng(seed)
    found, _, _ = machine(backend, form, seed, block_size, dtype)
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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", [name for name, form in FORMS.items() if form.chooses and not form.attends])
def test_who_chooses_everything_has_the_bits_of_full_attention(
    backend: Backend, name: str, dtype: KVDtype
) -> None:
    form = FORMS[name]
    every = form.top_k * form.size
    tokens = np.random.default_rng(5).integers(0, 90, every + 20)
    got = machine(backend, form, 6, dtype=dtype)[0].whole(tokens)[0]
    full = machine(backend, without_choice(form), 6, dtype=dtype)[0].whole(tokens)[0]
    assert got[:every].tobytes() == full[:every].tobytes()


def rounded(x: Any, dtype: KVDtype) -> Any:
    if dtype == "int8":
        return round_int8(x)
    kind = {"fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}.get(dtype, dtype)
    return x.astype(kind).astype(np.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "form",
    [
        Form(top_k=7, turns=False, normed=False),
        Form(top_k=3, size=8, index_heads=4, groups=2, relu=False, turns=False, normed=False),
    ],
)
def test_keys_are_chosen_as_the_cache_keeps_them(backend: Backend, form: Form, dtype: KVDtype) -> None:
    found, weights, x = machine(backend, form, 11, dtype=dtype)
    tokens = np.random.default_rng(12).integers(0, 90, 70)
    kept, first = x[tokens].copy(), sum(form.widths[:2])
    kept[:, first : first + form.index_dim] = rounded(kept[:, first : first + form.index_dim], dtype)
    assert listed(found.whole(tokens)[1], form) == plain(form, weights, kept)[1]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("isa", ISAS)
def test_every_cache_has_results_near_those_of_the_reference(isa: str, name: str, dtype: KVDtype) -> None:
    form = replace(FORMS[name], chooses=FORMS[name].chooses and dtype == "float32")  # near ties, else
    tokens = np.random.default_rng(13).integers(0, 90, 70)
    got, wanted = (
        machine(one, form, 14, dtype=dtype)[0].whole(tokens)[0]
        for one in (native(isa), BACKENDS["reference"])
    )
    near = {"float32": 2e-5, "bfloat16": 0.04, "float16": 3e-3, "int8": 0.04}.get(dtype, 0.3)
    np.testing.assert_allclose(got, wanted, rtol=near, atol=near)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", ["DeepSeek-V3.2", "MiniMax-M3", "Qwen4-exp", "DeepSeek-V4 CSA"])
def test_threads_share_long_contexts_without_changing_a_bit(isa: str, name: str) -> None:
    form = replace(FORMS[name], top_k=40)
    tokens = np.random.default_rng(15).integers(0, 90, 2300)
    one, several = (machine(native(isa, threads), form, 16, length=2304)[0] for threads in (1, 3))
    wanted = one.whole(tokens)
    for got, whole in zip(several.whole(tokens, 1), wanted, strict=True):
        assert got.tobytes() == whole.tobytes()
    for got, whole in zip(several.run([Part(1, 2299, 2300)], {1: tokens})[0], wanted, strict=True):
        assert got.tobytes() == whole[-1:].tobytes()
    _, weights, x = machine(native(isa), form, 16)
    bounds = np.cumsum(form.widths)[:-1]
    _, q, key, gates, by_head = np.split(x[tokens].astype(np.float64), bounds, axis=1)
    index = index_keys(form, weights, key, gates)
    last = [choice(form, weights, q[-1], by_head[-1], index, 2299, g) for g in range(form.groups)]
    assert listed(wanted[1][-1:], form) == [last]


def test_operations_that_do_not_fit_the_cache_are_refused() -> None:
    layers = KVLayer(1, 8, value_dim=8), KVLayer(1, 8, value_dim=8, every=4), KVLayer(1, 16, value_dim=16)
    spec = KVSpec(4, 2, 16, "float32", layers=(*layers, KVLayer(2, 4)))
    x, bias = np.ones((4, 8), np.float32), np.ones((4, 8), np.float32)
    wrong: list[Any] = [
        lambda g, t: StoreKeys(t, 9),
        lambda g, t: StoreKeys(t, 3),
        lambda g, t: StoreKeys(t, 1),
        lambda g, t: StoreKeys(t, 0, size=4, raw=0),
        lambda g, t: StoreKeys(t, 1, size=4, raw=2, bias=bias),
        lambda g, t: StoreKeys(t, 1, size=4, raw=2, bias=bias[:3], gates=t),
        lambda g, t: StoreKeys(t, 1, size=4, raw=0, bias=bias, gates=t),
        lambda g, t: StoreKeys(t, 1, size=4, raw=1),
        lambda g, t: Choose(t, 0, 2, 4),
        lambda g, t: Choose(t, 0, 1, 0),
        lambda g, t: Choose(t, 0, 1, 4, t),
        lambda g, t: Choose(t, 1, 1, 4, size=8),
        lambda g, t: Choose(t, 0, 1, 4, groups=2),
        lambda g, t: Choose(t, 3, 1, 4),
        lambda g, t: Attend(t, 0, 1, Attention(1.0), chosen=t, groups=2),
        lambda g, t: Attend(t, 0, 1, Attention(1.0, window=3), chosen=t),
        lambda g, t: Attend(t, 0, 1, Attention(1.0), entries=2),
        lambda g, t: Attend(t, 3, 2, Attention(1.0), entries=1),
        lambda g, t: Attend(t, 1, 1, Attention(1.0)),
    ]
    backend = native()
    for op in wrong:
        table, head = backend.matrix([x], "float32"), backend.matrix([x], "float32")

        def body(g: Any, op: Any = op, table: Any = table) -> Any:
            return g(SelectRows(g(op(g, g(Embed(table))))))

        def logits(g: Any, hidden: Any, head: Any = head) -> Any:
            return g(Linear(hidden, head))

        graph = record(body, logits, 4, 8)
        with pytest.raises(EngineError, match=r"store_keys|choose|attention"):
            backend.compile(graph, backend.kv_cache(spec, 4, 4), Limits(4, 1, 4))


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
