"""Rows of several equal parts: combinations and magnitudes of the parts, and functions of columns and of whole rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.devices.cpu.backend import NativeBackend
from quire.devices.ops import Apply, Linear
from quire.devices.protocol import Backend, ColumnScale, SparseGELU
from quire.devices.reference.backend import ReferenceBackend
from quire.devices.stream_ops import Combine, CompareParts, MatchRMS, Mix, StreamGates
from quire.devices.torch.backend import TorchBackend
from quire.errors import EngineError
from tests.devices.native_cases import apply_rows, native, normal

REFERENCE = ReferenceBackend()
OTHERS: dict[str, Backend] = {"native": native(), "torch": TorchBackend(1)}


@pytest.fixture(params=OTHERS, scope="module")
def other(request: pytest.FixtureRequest) -> Backend:
    return OTHERS[request.param]


def compare(other: Backend, x: Any, op: Callable[[Any, Any], Any], width: int) -> Any:
    """The result of the reference, which `other` must equal, each row as it is alone."""
    want = apply_rows(REFERENCE, x, op, width)
    got = apply_rows(other, x, op, width)
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)
    assert apply_rows(other, x[-1:], op, width).tobytes() == got[-1:].tobytes()
    return want


@settings(deadline=None, max_examples=20)
@given(
    rows=st.integers(1, 20),
    vectors=st.integers(1, 5),
    made=st.integers(1, 5),
    width=st.sampled_from([1, 7, 1030]),
    residual=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_parts_are_combined(
    other: Backend, rows: int, vectors: int, made: int, width: int, residual: bool, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    x, factors = normal(rng, rows, vectors * width), normal(rng, made, vectors)
    factors[rng.random(factors.shape) < 0.3] = 0
    per_row = normal(rng, made * vectors, vectors * width) / np.float32((vectors * width) ** 0.5)

    def added(g: Any, t: Any) -> Any:
        return g(Combine(t, np.ones((made, vectors), np.float32))) if residual else None

    def combined(g: Any, t: Any) -> Any:
        return g(Combine(t, factors, added(g, t)))

    parts = x.reshape(rows, vectors, width).astype(np.float64)
    sums = parts.sum(axis=1, keepdims=True) if residual else 0
    want = compare(other, x, combined, made * width)
    plain = np.einsum("bv,rvw->rbw", factors, parts) + sums
    np.testing.assert_allclose(want, plain.reshape(rows, -1), rtol=1e-5, atol=1e-5)

    def mixed(backend: Backend) -> Any:
        weight = backend.matrix([per_row], "float32")
        return lambda g, t: g(Mix(t, g(Linear(t, weight)), vectors, added(g, t)))

    got = apply_rows(other, x, mixed(other), made * width)
    own = (x.astype(np.float64) @ per_row.T).reshape(rows, made, vectors)
    plain = np.einsum("rbv,rvw->rbw", own, parts) + sums
    np.testing.assert_allclose(got, plain.reshape(rows, -1), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(
        apply_rows(REFERENCE, x, mixed(REFERENCE), made * width), got, rtol=1e-4, atol=1e-4
    )


def test_a_part_left_out_may_hold_anything(other: Backend) -> None:
    x = np.array([[1.0, 2.0, np.inf, np.nan]], np.float32)
    factors = np.array([[2.0, 0.0], [-1.0, 0.0], [0.0, 0.0]], np.float32)
    got = apply_rows(other, x, lambda g, t: g(Combine(t, factors)), 6)
    np.testing.assert_array_equal(got, [[2, 4, -1, -2, 0, 0]])


def test_parts_take_the_magnitude_of_a_model(other: Backend) -> None:
    rng = np.random.default_rng(3)
    x = normal(rng, 9, 60) * np.repeat([1.0, 30.0, 1e-4], 20).astype(np.float32)
    pick = np.eye(1, 3, 1, dtype=np.float32)
    got = compare(other, x, lambda g, t: g(MatchRMS(t, g(Combine(t, pick)), 1e-5)), 60)
    rms = np.sqrt((got.reshape(9, 3, 20).astype(np.float64) ** 2).mean(axis=2))
    np.testing.assert_allclose(rms[:, 0], rms[:, 1], rtol=1e-5)
    assert (rms[:, 2] < 0.1 * rms[:, 1]).all()  # below the floor


def test_columns_are_scaled(other: Backend) -> None:
    x, factors = normal(np.random.default_rng(1), 5, 33), np.linspace(-2, 2, 33)
    want = compare(other, x, lambda g, t: g(Apply(t, ColumnScale(tuple(factors.tolist())))), 33)
    np.testing.assert_allclose(want, x * factors, rtol=1e-6)


@pytest.mark.parametrize("cutoff", [-0.5, 0.0, 1.645])
def test_sparse_gelu_keeps_the_top_of_each_row(other: Backend, cutoff: float) -> None:
    x = 3 * normal(np.random.default_rng(2), 7, 301) + 1
    want = compare(other, x, lambda g, t: g(Apply(t, SparseGELU(cutoff))), 301)
    bound = x.mean(axis=1) + cutoff * x.std(axis=1)
    np.testing.assert_array_equal(want > 0, x > bound[:, None])


@settings(deadline=None, max_examples=20)
@given(
    rows=st.integers(1, 9),
    n=st.integers(1, 6),
    parts=st.sampled_from([1, 2, None]),
    iterations=st.integers(1, 20),
    spread=st.sampled_from([0.1, 3.0, 100.0]),
    seed=st.integers(0, 2**31),
)
def test_streams_get_their_gates(
    other: Backend, rows: int, n: int, parts: int | None, iterations: int, spread: float, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    width = n * (parts or n + 2)
    x = np.float32(spread) * normal(rng, rows, width)
    factors, biases = normal(rng, width), normal(rng, width)
    function = StreamGates(n, iterations, 1e-6, 1.75, 0.25, tuple(factors.tolist()), tuple(biases.tolist()))
    want = compare(other, x, lambda g, t: g(Apply(t, function)), width)
    made = x.astype(np.float64) * factors + biases
    gates = 1 / (1 + np.exp(-made))
    np.testing.assert_allclose(want[:, :n], gates[:, :n] + 1e-6, rtol=1e-5, atol=1e-6)
    if parts == 1:
        return
    np.testing.assert_allclose(want[:, n : 2 * n], 1.75 * gates[:, n : 2 * n] + 0.25, rtol=1e-5, atol=1e-6)
    for row, logits in zip(want[:, 2 * n :], made[:, 2 * n :], strict=True):
        if parts is None:
            np.testing.assert_allclose(
                row.reshape(n, n).T, sinkhorn(logits.reshape(n, n), iterations), atol=2e-5
            )


@settings(deadline=None, max_examples=20)
@given(
    rows=st.integers(1, 9),
    parts=st.integers(1, 5),
    width=st.integers(1, 40),
    spread=st.sampled_from([0.0, 1e-4, 1.0, 30.0]),
    seed=st.integers(0, 2**31),
)
def test_parts_are_compared(
    other: Backend, rows: int, parts: int, width: int, spread: float, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    x = np.float32(spread) * normal(rng, rows, parts * width)
    factors = normal(rng, parts * width)

    def op(g: Any, t: Any) -> Any:
        return g(CompareParts(t, g(Apply(t, ColumnScale(tuple(factors.tolist())))), parts, 0.3, 1e-3))

    want = compare(other, x, op, parts)
    z = (x.astype(np.float64) ** 2 * factors).reshape(rows, parts, width).sum(2) * 0.3
    roots = np.sign(z) * np.sqrt(np.maximum(np.abs(z), 1e-3))
    near = np.abs(z) < 1e-6 * (x**2).sum(1).max()  # where rounding chooses the sign
    np.testing.assert_allclose(want[~near], (1 / (1 + np.exp(-roots)))[~near], rtol=1e-5, atol=1e-6)


def sinkhorn(logits: Any, iterations: int) -> Any:
    """Shares by row, then columns and rows divided in turn, columns last."""
    shares = np.exp(logits - logits.max(axis=1, keepdims=True))
    shares = shares / shares.sum(axis=1, keepdims=True) + 1e-6
    for i in range(iterations):
        shares = shares / (shares.sum(axis=1, keepdims=True) + 1e-6) if i else shares
        shares = shares / (shares.sum(axis=0, keepdims=True) + 1e-6)
    return shares


def test_parts_that_do_not_fit_are_refused() -> None:
    x = normal(np.random.default_rng(2), 2, 6)
    for op in (
        lambda g, t: g(Combine(t, np.ones((1, 4), np.float32))),
        lambda g, t: g(Combine(t, np.ones((1, 3), np.float32), t)),
        lambda g, t: g(Mix(t, t, 4)),
        lambda g, t: g(Apply(t, ColumnScale((1.0, 2.0)))),
        lambda g, t: g(Apply(t, StreamGates(3, 1, 0.0, 1.0, 0.0, (1.0,) * 3, (1.0,) * 3))),
        lambda g, t: g(MatchRMS(t, g(Combine(t, np.ones((2, 3), np.float32))), 0.0)),
        lambda g, t: g(CompareParts(t, t, 4, 1.0, 0.0)),
        lambda g, t: g(CompareParts(t, g(Combine(t, np.ones((1, 3), np.float32))), 1, 1.0, 0.0)),
    ):
        with pytest.raises((EngineError, ValueError)):
            apply_rows(NativeBackend(1), x, op, 6)
