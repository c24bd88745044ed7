"""Products with int8 and int4 weights: values and sums as the reference has them, the same bits on every path."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.devices.ops import Embed, Linear
from quire.devices.reference.backend import ReferenceBackend
from quire.weights.layouts import Int4, Int8
from quire.weights.schemes import Activations, Quantized
from tests.devices.native_cases import ISAS, apply_rows, gated, linear, native, normal, seen

BOTH: tuple[Activations, ...] = ("int8", "float")
TYPES = [
    *(Quantized(Int8(), activations) for activations in BOTH),
    *(
        Quantized(Int4(group, symmetric), activations)
        for group in (32, 64, 128)
        for symmetric in (True, False)
        for activations in BOTH
    ),
    Quantized(Int4(32, scales="float32")),
    Quantized(Int4(32, False, "float32"), "float"),
]
FEW = [
    Quantized(Int8()),
    Quantized(Int8(), "float"),
    Quantized(Int4(32)),
    Quantized(Int4(64, False), "float"),
    Quantized(Int4(32, False, "float32")),
]


@pytest.mark.parametrize("dtype", TYPES, ids=repr)
def test_dequantize_is_the_reference_bit_for_bit(dtype: Quantized) -> None:
    rng = np.random.default_rng(0)
    parts = [normal(rng, 21, 300) * np.exp(normal(rng, 21, 300)), normal(rng, 12, 300) - np.float32(2)]
    parts[0][0] = 0.0  # no scale
    parts[0][1, :64] = 1e-38  # nor here: too small for a reciprocal
    parts[0][2] = np.abs(parts[0][2])
    parts[0][3, 5] = -1e20
    native_matrix = native().matrix(parts, dtype)
    reference = ReferenceBackend().matrix(parts, dtype)
    assert native_matrix.dequantize().tobytes() == reference.dequantize().tobytes()
    gate, up = parts[0][:12], parts[1]
    assert (
        native().gated_matrix(gate, up, dtype).dequantize().tobytes()
        == ReferenceBackend().gated_matrix(gate, up, dtype).dequantize().tobytes()
    )


def test_rounding_is_within_half_a_step() -> None:
    values = normal(np.random.default_rng(1), 40, 256)
    near = {repr(dtype): np.abs(native().matrix([values], dtype).dequantize() - values) for dtype in TYPES}
    most = np.abs(values).max(axis=1, keepdims=True)
    assert (near[repr(Quantized(Int8()))] <= most / 127 * 0.5001).all()
    groups = values.reshape(40, 4, 64)
    step = (groups.max(2) - groups.min(2)) / 15
    assert (near[repr(Quantized(Int4(64, False)))].reshape(groups.shape) <= step[:, :, None] * 1.0001).all()


@pytest.mark.parametrize("isa", ISAS)
@settings(deadline=None, max_examples=60)
@given(
    dtype=st.sampled_from(TYPES),
    rows=st.integers(1, 45),
    outputs=st.integers(1, 90),
    columns=st.integers(1, 1300),
    with_bias=st.booleans(),
    threads=st.integers(1, 3),
    seed=st.integers(0, 2**31),
)
def test_linear_equals_the_reference(
    isa: str,
    dtype: Quantized,
    rows: int,
    outputs: int,
    columns: int,
    with_bias: bool,
    threads: int,
    seed: int,
) -> None:
    rng = np.random.default_rng(seed)
    x, w = normal(rng, rows, columns), normal(rng, outputs, columns) / np.float32(np.sqrt(columns))
    x, bias = seen(isa, x, dtype), normal(rng, outputs) if with_bias else None
    got = linear(native(isa, threads), x, w, dtype, bias=bias, activation="relu")
    want = linear(ReferenceBackend(), x, w, dtype, bias=bias, activation="relu")
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)
    half = outputs // 2 + 1
    got = gated(native(isa, threads), x, w[:half], w[-half:], dtype, activation="silu")
    want = gated(ReferenceBackend(), x, w[:half], w[-half:], dtype, activation="silu")
    np.testing.assert_allclose(got, want, rtol=3e-5, atol=3e-5)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", FEW, ids=repr)
@pytest.mark.parametrize(("outputs", "columns"), [(40, 1100), (17, 33), (130, 65)])
def test_a_row_alone_has_the_bits_it_has_in_any_batch(
    isa: str, dtype: Quantized, outputs: int, columns: int
) -> None:
    rng = np.random.default_rng(outputs)
    x, w = normal(rng, 40, columns), normal(rng, outputs, columns)
    x[0], x[1] = 0.0, -0.0
    x[2, ::3] *= np.float32(1e30)
    one = native(isa)
    alone = np.concatenate([linear(one, row[None], w, dtype) for row in x])
    for rows in range(2, 41):
        assert linear(one, x[:rows], w, dtype).tobytes() == alone[:rows].tobytes(), f"{rows} rows"
    half = outputs // 2
    halves = w[:half], w[half : 2 * half]
    alone = np.concatenate([gated(one, row[None], *halves, dtype, activation="silu") for row in x])
    for rows in (2, 5, 15, 29, 40):
        assert gated(one, x[:rows], *halves, dtype, activation="silu").tobytes() == alone[:rows].tobytes(), (
            f"{rows} rows"
        )


@pytest.mark.parametrize("dtype", FEW, ids=repr)
@pytest.mark.parametrize("rows", [1, 3, 9, 33, 200])
def test_threads_do_not_change_bits(dtype: Quantized, rows: int) -> None:
    rng = np.random.default_rng(rows)
    x, w = normal(rng, rows, 321), normal(rng, 200, 321)
    one = linear(native("auto", 1), x, w, dtype)
    for threads in (2, 3):
        assert linear(native("auto", threads), x, w, dtype).tobytes() == one.tobytes()


def test_int8_sums_have_the_same_bits_on_every_instruction_set() -> None:
    rng = np.random.default_rng(7)
    x, w = normal(rng, 19, 500), normal(rng, 70, 500)
    results = {isa: linear(native(isa), x, w, Quantized(Int8())).tobytes() for isa in ISAS if isa != "scalar"}
    assert len(set(results.values())) <= 1, list(results)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", FEW, ids=repr)
def test_not_a_number_stays_visible_and_in_its_row(isa: str, dtype: Quantized) -> None:
    x = np.ones((3, 40), np.float32)
    x[0, 39], x[2, 1] = np.nan, np.inf
    got = linear(native(isa), x, np.ones((2, 40), np.float32), dtype)
    assert np.isnan(got[0]).all()
    assert np.isfinite(got[1]).all()
    assert not np.isfinite(got[2]).any()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", FEW, ids=repr)
def test_a_table_embeds_its_dequantized_rows(isa: str, dtype: Quantized) -> None:
    values = normal(np.random.default_rng(3), 50, 73)
    rows = []
    for backend in (native(isa), ReferenceBackend()):
        table = backend.matrix([values], dtype)
        got = apply_rows(backend, values, lambda g, t, table=table: g(Embed(table)), 73)
        rows.append(got)
    np.testing.assert_array_equal(rows[0], rows[1])


@pytest.mark.parametrize("dtype", TYPES, ids=repr)
def test_exported_bytes_come_back_as_the_same_weight(dtype: Quantized) -> None:
    values = normal(np.random.default_rng(4), 33, 130)
    for backend in (native(), ReferenceBackend()):
        matrix = backend.matrix([values], dtype)
        about, data = backend.export(matrix)
        again = backend.restore(about, data)
        assert again.dequantize().tobytes() == matrix.dequantize().tobytes()
        x = normal(np.random.default_rng(5), 3, 130)
        got = [apply_rows(backend, x, lambda g, t, w=w: g(Linear(t, w)), 33) for w in (matrix, again)]
        assert got[0].tobytes() == got[1].tobytes()
