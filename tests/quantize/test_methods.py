"""The methods on single weights: each errs less than rounding to nearest, and its tensors read back as its values."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from quire.quantize.awq import awq_factors, rounded_to_ranges, smooth_factors
from quire.quantize.gptq import gptq, gptq_tables
from quire.quantize.grid import Grid
from quire.quantize.methods import BITS, Method, Name, fit_tables
from quire.quantize.stats import InputStats
from quire.weights.checkpoint import open_checkpoint
from quire.weights.checkpoint.safetensors import write_safetensors
from quire.weights.layouts import Int8
from quire.weights.readers import find_quantization
from quire.weights.tensor import FloatArray

ROWS, COLUMNS = 64, 128


def inputs(count: int = 600, seed: int = 0) -> FloatArray:
    """Rows whose columns depend on each other, and of which a few are much larger."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((count, COLUMNS)) @ rng.standard_normal((COLUMNS, COLUMNS)) / 8
    x[:, ::17] *= 12
    return x.astype(np.float32)


def weight(seed: int = 1) -> FloatArray:
    return np.random.default_rng(seed).standard_normal((ROWS, COLUMNS)).astype(np.float32) * np.float32(0.05)


def stats_of(x: FloatArray) -> InputStats:
    stats = InputStats.of(COLUMNS, True)
    for sample in np.split(x, 4):
        stats.add(sample, 64)
    return stats


def error(x: FloatArray, rounded: FloatArray, w: FloatArray) -> float:
    return float(np.square(x @ (rounded - w).T).mean())


def test_statistics_are_sums_over_all_rows() -> None:
    x = inputs()
    stats = stats_of(x)
    assert stats.hessian is not None
    np.testing.assert_allclose(stats.hessian, x.T @ x, rtol=1e-3, atol=1e-1)
    np.testing.assert_allclose(stats.mean / stats.count, np.abs(x).mean(axis=0), rtol=1e-4)
    factors = np.linspace(0.5, 2, COLUMNS, dtype=np.float32)
    np.testing.assert_allclose(stats.scaled(factors).most, np.abs(x / factors).max(axis=0), rtol=1e-5)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
def test_gptq_errs_less_than_rounding(bits: int, symmetric: bool) -> None:
    x, w, grid = inputs(), weight(), Grid(bits, 32, symmetric)
    stats, other = stats_of(x), inputs(seed=0)
    assert stats.hessian is not None
    found = gptq(w, stats.hessian, grid, 0.01)
    assert error(other, found.values(), w) < 0.6 * error(other, grid.round(w).values(), w)
    assert int(found.codes.max()) < 1 << bits


def test_gptq_takes_inputs_that_are_always_zero_and_refuses_nothing_else() -> None:
    x, w, grid = inputs(), weight(), Grid(4, 32, True)
    x[:, 5] = 0
    stats = stats_of(x)
    assert stats.hessian is not None
    assert error(x, gptq(w, stats.hessian, grid, 0.01).values(), w) < error(x, grid.round(w).values(), w)
    few = stats_of(inputs(8))  # fewer rows than columns: only damping makes it solvable
    assert few.hessian is not None
    assert np.isfinite(gptq(w, few.hessian, grid, 0.01).values()).all()


def test_factors_and_clips_of_awq_err_less_than_none() -> None:
    x, w, grid = inputs(), weight(), Grid(4, 32, False)
    stats = stats_of(x)
    plain = error(x, grid.round(w).values(), w)
    factors = awq_factors([w], stats, grid)
    assert factors.std() > 0
    scaled = error(x, grid.round(w * factors).values() / factors, w)
    assert scaled < 0.8 * plain
    cut = rounded_to_ranges(w * factors, stats.scaled(factors), grid).values() / factors
    assert error(x, cut, w) < 0.95 * scaled


def test_factors_of_smoothquant_err_less_than_none() -> None:
    x, w = inputs(), weight()

    def int8(values: FloatArray) -> FloatArray:
        return Int8().quantize(values).dequantize()

    def product(factors: FloatArray) -> float:
        return float(np.square(int8(x / factors) @ int8(w * factors).T - x @ w.T).mean())

    factors = smooth_factors([w], stats_of(x))
    assert product(factors) < 0.6 * product(np.ones(COLUMNS, np.float32))


@pytest.mark.parametrize("bits", [3, 4])
def test_tables_are_near_the_best_and_follow_the_importance(bits: int) -> None:
    w = weight()
    importance = np.random.default_rng(3).random((ROWS, COLUMNS)).astype(np.float32) ** 4
    codes, tables = fit_tables(w, importance, bits)
    values = np.take_along_axis(tables, codes.astype(np.intp), axis=1)
    nearest = np.abs(w[:, :, None] - tables[:, None, :]).argmin(axis=2)
    assert (np.abs(w - values) <= np.abs(w - np.take_along_axis(tables, nearest, axis=1)) + 1e-6).all()
    even, plain = fit_tables(w, np.ones(COLUMNS, np.float32), bits)
    other = np.take_along_axis(plain, even.astype(np.intp), axis=1)
    assert (importance * np.square(w - values)).sum() < 0.9 * (importance * np.square(w - other)).sum()
    assert (
        np.square(w - other).sum() < 0.75 * np.square(w - Grid(bits, COLUMNS, False).round(w).values()).sum()
    )


@pytest.mark.parametrize("bits", [3, 4])
def test_codes_of_tables_that_make_up_for_errors_err_less(bits: int) -> None:
    x, w = inputs(), weight()
    stats = stats_of(x)
    assert stats.hessian is not None
    codes, tables = fit_tables(w, np.diag(stats.hessian), bits)
    better, _ = gptq_tables(w, stats.hessian, tables, 0.01, np.zeros(w.shape, bool))
    plain, found = (np.take_along_axis(tables, c.astype(np.intp), axis=1) for c in (codes, better))
    assert error(x, found, w) < 0.6 * error(x, plain, w)


def test_a_table_of_few_values_is_exact() -> None:
    steps = np.array([-0.5, -0.25, 0.0, 0.125, 0.25, 0.75], np.float32)
    w = steps[np.random.default_rng(0).integers(0, 6, (8, 64))]
    codes, tables = fit_tables(w, np.ones(64, np.float32), 3)
    np.testing.assert_array_equal(np.take_along_axis(tables, codes.astype(np.intp), axis=1), w)


CASES = [
    (name, bits, symmetric)
    for name, known in BITS.items()
    for bits in known
    for symmetric in ((True, False) if name in ("gptq", "rtn") else (True,))
]


CASES = [
    *((name, bits, symmetric, 0.0) for name, bits, symmetric in CASES),
    ("squeezellm", 3, True, 0.45),
    ("squeezellm", 4, True, 5.0),
]


@pytest.mark.parametrize(("name", "bits", "symmetric", "outliers"), CASES)
def test_what_is_written_reads_back_as_the_values(
    name: Name, bits: int, symmetric: bool, outliers: float, tmp_path: Path
) -> None:
    method = Method.of(name, bits, 32, symmetric, 0.01, outliers)
    w = weight()
    w[3, :40] = 0
    assert not method.unfit(*w.shape)
    tensors, values = method.encode(w, stats_of(inputs()), None, float(np.abs(w).max()))
    named = {f"a.{suffix}": array for suffix, array in tensors.items()}
    write_safetensors(tmp_path / "model.safetensors", {**named, "norm": np.ones(4, np.float32)})
    found = find_quantization({"quantization_config": method.section([])}, "config.json", None)
    assert found is not None
    checkpoint = found.reader()(open_checkpoint(tmp_path))
    assert set(checkpoint.names()) == {"a.weight", "norm"}
    got = checkpoint.get("a.weight").astype(np.float32)
    np.testing.assert_array_equal(got, values)
    layout = checkpoint.layout("a.weight")
    assert layout is not None
    np.testing.assert_array_equal(checkpoint.quantized("a.weight", np.arange(ROWS)).dequantize(), values)
    assert ("vals" in tensors) == (outliers > 0)


@pytest.mark.parametrize("bits", [3, 4])
def test_outliers_beside_the_tables_are_exact_and_the_rest_errs_less(bits: int) -> None:
    """The share that was asked for; what stands out stays as it is, compensation of other columns aside."""
    x, w = inputs(), weight()
    w[np.arange(ROWS), np.arange(ROWS)] = 3.0  # one of each row stretches its table
    errors = []
    for share in (0.0, 0.2, 2.0, 5.0):
        tensors, values = Method.of("squeezellm", bits, 32, True, 0.01, share).encode(w, stats_of(x), None, 1)
        count = len(tensors.get("vals", ()))
        assert count == pytest.approx(share / 100 * w.size, abs=2)
        errors.append(error(inputs(seed=0), values, w))
        if share >= 2.0:
            held = np.zeros(w.shape, bool)
            held[np.repeat(np.arange(ROWS), np.diff(tensors["rows"])), tensors["cols"]] = True
            assert held[np.arange(ROWS), np.arange(ROWS)].all()
    assert errors[0] > errors[2] > errors[3]
    assert errors[3] < 0.7 * errors[0]
