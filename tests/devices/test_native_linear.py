"""Native matrix products: equal to float64 within rounding, and each row's bits its own in any company."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.devices.ops import Linear
from quire.devices.protocol import Activation, FloatDtype
from quire.devices.reference.backend import ReferenceBackend
from quire.errors import EngineError
from tests.devices.native_cases import (
    ISAS,
    apply_rows,
    gated,
    linear,
    native,
    normal,
    rounds_activations,
    seen,
    to_bf16,
)

ACTIVATIONS: list[Activation | None] = [None, "silu", "gelu", "gelu_tanh", "relu"]
DTYPES: list[FloatDtype] = ["float32", "float16", "bfloat16"]


def held(w: Any, dtype: FloatDtype) -> Any:
    """The weights as a matrix of this type holds them."""
    return to_bf16(w) if dtype == "bfloat16" else w.astype(dtype).astype(np.float32)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@settings(deadline=None, max_examples=25)
@given(
    rows=st.integers(1, 45),
    outputs=st.integers(1, 90),
    columns=st.integers(1, 400),
    activation=st.sampled_from(ACTIVATIONS),
    with_bias=st.booleans(),
    with_residual=st.booleans(),
    threads=st.integers(1, 3),
    seed=st.integers(0, 2**31),
)
def test_linear_equals_the_reference(
    isa: str,
    dtype: FloatDtype,
    rows: int,
    outputs: int,
    columns: int,
    activation: Activation | None,
    with_bias: bool,
    with_residual: bool,
    threads: int,
    seed: int,
) -> None:
    rng = np.random.default_rng(seed)
    x, w = normal(rng, rows, columns), normal(rng, outputs, columns) / np.float32(np.sqrt(columns))
    bias = normal(rng, outputs) if with_bias else None
    # A residual must be a tensor of the plan: the input's own columns through a second weight.
    back = normal(rng, outputs, columns) / np.float32(np.sqrt(columns))
    results = []
    for backend in (native(isa, threads), ReferenceBackend()):
        weight, second = backend.matrix([w], dtype), backend.matrix([back], "float32")

        def op(g: Any, t: Any, weight: Any = weight, second: Any = second) -> Any:
            residual = g(Linear(t, second)) if with_residual else None
            return g(Linear(t, weight, bias, activation, residual))

        results.append(apply_rows(backend, seen(isa, x, dtype), op, outputs))
    np.testing.assert_allclose(results[0], results[1], rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@settings(deadline=None, max_examples=20)
@given(
    rows=st.integers(1, 40),
    half=st.integers(1, 70),
    columns=st.integers(1, 350),
    activation=st.sampled_from(ACTIVATIONS[1:]),
    with_bias=st.booleans(),
    limit=st.sampled_from([0.0, 0.4]),
    seed=st.integers(0, 2**31),
)
def test_gated_linear_equals_the_reference(
    isa: str,
    dtype: FloatDtype,
    rows: int,
    half: int,
    columns: int,
    activation: Activation,
    with_bias: bool,
    limit: float,
    seed: int,
) -> None:
    rng = np.random.default_rng(seed)
    x = seen(isa, normal(rng, rows, columns), dtype)
    gate, up = (normal(rng, half, columns) / np.float32(np.sqrt(columns)) for _ in range(2))
    bias = normal(rng, 2 * half) if with_bias else None
    options = {"activation": activation, "bias": bias, "limit": limit}
    got = gated(native(isa), x, gate, up, dtype, **options)
    want = gated(ReferenceBackend(), x, gate, up, dtype, **options)
    np.testing.assert_allclose(got, want, rtol=3e-5, atol=3e-5)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("outputs", "columns"), [(40, 600), (17, 33), (96, 288), (130, 65)])
def test_a_row_alone_has_the_bits_it_has_in_any_batch(
    isa: str, dtype: FloatDtype, outputs: int, columns: int
) -> None:
    rng = np.random.default_rng(outputs)
    x, w = normal(rng, 40, columns), normal(rng, outputs, columns)
    # Zeros of both signs and huge values: padding and blocks of K must not touch them.
    x[0] = 0.0
    x[1] = -0.0
    x[2, ::3] *= np.float32(1e30)
    alone = np.concatenate([linear(native(isa), row[None], w, dtype) for row in x])
    for rows in range(2, 41):
        got = linear(native(isa), x[:rows], w, dtype)
        assert got.tobytes() == alone[:rows].tobytes(), f"{rows} rows"
    half = outputs // 2
    alone = np.concatenate(
        [gated(native(isa), row[None], w[:half], w[half : 2 * half], dtype, activation="silu") for row in x]
    )
    for rows in (2, 5, 15, 29, 40):
        got = gated(native(isa), x[:rows], w[:half], w[half : 2 * half], dtype, activation="silu")
        assert got.tobytes() == alone[:rows].tobytes(), f"{rows} rows"


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 3, 9, 33, 200])
def test_threads_do_not_change_bits(isa: str, dtype: FloatDtype, rows: int) -> None:
    rng = np.random.default_rng(rows)
    x, w = normal(rng, rows, 321), normal(rng, 200, 321)
    one = linear(native(isa, 1), x, w, dtype)
    for threads in (2, 3):
        assert linear(native(isa, threads), x, w, dtype).tobytes() == one.tobytes()


@pytest.mark.parametrize("isa", ISAS)
def test_bfloat16_dot_sets_round_activations_and_others_do_not(isa: str) -> None:
    x, w = np.full((1, 2), 1.0 + 2.0**-12, np.float32), np.ones((1, 2), np.float32)
    exact = linear(native(isa), x, w, "bfloat16")[0, 0] == 2.0 + 2.0**-11
    assert exact != rounds_activations(isa)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("activation", ACTIVATIONS[1:])
def test_activations_over_their_whole_range(isa: str, activation: Activation) -> None:
    x = np.concatenate(
        [np.linspace(-120, 120, 4001), np.linspace(-4, 4, 4001), [0.0, -0.0, 1e-30, -1e-30, 1e4]]
    )
    x = x.astype(np.float32)[:, None]
    identity = np.ones((1, 1), np.float32)
    results = []
    for backend in (native(isa), ReferenceBackend()):
        weight = backend.matrix([identity], "float32")
        results.append(apply_rows(backend, x, lambda g, t, w=weight: g(Linear(t, w, None, activation)), 1))
    # gelu's 1 + erf cancels for negative x, in float32 anywhere: there the error is absolute.
    np.testing.assert_allclose(results[0], results[1], rtol=3e-6, atol=1e-6)


@pytest.mark.parametrize("isa", ISAS)
def test_silu_where_e_to_the_x_is_almost_infinite(isa: str) -> None:
    x = np.linspace(-88.65, -87.5, 116, dtype=np.float32)[:, None]
    got = linear(native(isa), x, np.ones((1, 1), np.float32), "float32", activation="silu")
    exact = x.astype(np.float64)
    np.testing.assert_allclose(got, exact / (1 + np.exp(-exact)), rtol=1e-6, atol=0)


@pytest.mark.parametrize("isa", ISAS)
def test_not_a_number_stays_visible(isa: str) -> None:
    x = np.array([[1.0, np.nan], [1.0, 2.0], [np.inf, 1.0]], np.float32)
    w = np.array([[1.0, 1.0], [0.5, -1.0]], np.float32)
    for activation in ACTIVATIONS:
        got = linear(native(isa), x, w, "float32", activation=activation)
        assert np.isnan(got[0]).all(), activation
        assert np.isfinite(got[1]).all()
        assert np.isposinf(got[2]).all()


@settings(deadline=None, max_examples=40)
@given(
    parts=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    columns=st.integers(1, 80),
    source=st.sampled_from([np.float32, np.float16, ml_dtypes.bfloat16]),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 2**31),
)
def test_dequantize_gives_back_the_rounded_rows(
    parts: list[int], columns: int, source: Any, dtype: FloatDtype, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    arrays = [(normal(rng, rows, columns) * 10.0 ** rng.integers(-6, 4)).astype(source) for rows in parts]
    matrix = native().matrix(arrays, dtype)
    want = held(np.concatenate(arrays).astype(np.float32), dtype)
    assert matrix.shape == want.shape
    assert matrix.dequantize().tobytes() == want.tobytes()
    pair = [arrays[0], arrays[0][::-1]]
    want = held(np.concatenate(pair).astype(np.float32), dtype)
    assert native().gated_matrix(pair[0], pair[1], dtype).dequantize().tobytes() == want.tobytes()


def test_every_float16_is_widened_exactly() -> None:
    bits = np.arange(1 << 16, dtype=np.uint16).view(np.float16).reshape(256, 256)
    got = native().matrix([bits], "float32").dequantize()
    np.testing.assert_array_equal(got, bits.astype(np.float32))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("columns", [33, 600])
def test_float16_takes_half_the_memory_and_has_the_bits_of_float32(isa: str, columns: int) -> None:
    rng = np.random.default_rng(columns)
    x, w = normal(rng, 80, columns), (normal(rng, 50, columns) * np.float32(1e-4)).astype(np.float16)
    narrow, wide = native(isa).matrix([w], "float16"), native(isa).matrix([w], "float32")
    assert narrow.packed.format.layout == "float16"
    assert narrow.nbytes <= wide.nbytes * (columns + 1) / columns / 2
    for rows in (1, 2, 7, 80):
        got, wanted = (linear(native(isa), x[:rows], w, dtype) for dtype in ("float16", "float32"))
        assert got.tobytes() == wanted.tobytes(), rows


def test_rounding_to_float16_is_to_nearest_even_and_values_out_of_range_make_it_bfloat16() -> None:
    bits = np.random.default_rng(0).integers(0, 1 << 32, (64, 512), np.uint32)
    bits[0, :6] = [0x387FE000, 0x33000000, 0x33000001, 0x477FEFFF, 0x7FC00000, 0x33C00000]
    values = bits.view(np.float32)
    with np.errstate(all="ignore"):
        inside = np.where(np.abs(values) < 65520, values, np.float32(np.inf))
        wanted = inside.astype(np.float16).astype(np.float32)
    inside[0, 4], wanted[0, 4] = np.nan, np.nan
    got = native().matrix([inside], "float16")
    assert got.packed.format.layout == "float16"
    np.testing.assert_array_equal(got.dequantize(), wanted)
    values[0, 0] = 65520
    assert native().matrix([values], "float16").packed.format.layout == "bfloat16"


def test_rounding_to_bfloat16_is_to_nearest_even_and_keeps_nan() -> None:
    bits = np.array(
        [0x3F808000, 0x3F818000, 0x3F808001, 0x3F807FFF, 0x7F7FFFFF, 0x7F800001, 0xFFC00000], np.uint32
    )
    values = bits.view(np.float32)[None]
    got = native().matrix([values], "bfloat16").dequantize()
    np.testing.assert_array_equal(got, to_bf16(values))


def test_weights_are_read_in_place_whatever_their_strides(tmp_path: Any) -> None:
    rng = np.random.default_rng(0)
    w = normal(rng, 20, 30)
    np.save(tmp_path / "w.npy", w)
    mapped = np.load(tmp_path / "w.npy", mmap_mode="r")
    wide = np.zeros((20, 64), np.float32)
    wide[:, 3:33] = w
    swapped = w.astype(">f4")
    for source in (
        mapped,
        wide[:, 3:33],
        np.asfortranarray(w),
        swapped,
        w[::-1][::-1],
        np.repeat(w, 2, 0)[::2],
    ):
        assert native().matrix([source], "float32").dequantize().tobytes() == w.tobytes()


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([np.zeros((2, 3), np.float64)], "float64"),
        ([np.zeros(3, np.float32)], "2 dimensions"),
        ([np.zeros((2, 3), np.float32), np.zeros((2, 4), np.float32)], "columns"),
        ([], "at least one part"),
        ([np.zeros((0, 3), np.float32)], "at least one row"),
    ],
)
def test_what_is_no_weight_is_refused(parts: list[Any], message: str) -> None:
    with pytest.raises(EngineError, match=message):
        native().matrix(parts, "float32")


def test_a_gated_weight_needs_equal_halves() -> None:
    with pytest.raises(EngineError, match="equal shape"):
        native().gated_matrix(np.zeros((2, 3), np.float32), np.zeros((3, 3), np.float32), "float32")
