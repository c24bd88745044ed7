"""bfloat16 weights in 12 bits: every value comes back, and every product has the bits of 16-bit weights."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.devices.cpu.pack import NativeMatrix
from quire.devices.ops import Embed, Linear
from quire.errors import ModelError
from tests.devices.native_cases import ISAS, apply_rows, gated, linear, native, normal

COMPACT = "bfloat16_12"


def layout(matrix: NativeMatrix) -> str:
    return str(matrix.packed.format.layout)


def weights(rng: np.random.Generator, outputs: int, columns: int, strange: int) -> Any:
    """Weights as of a trained model, some rows zero, `strange` values of any bits but NaN and infinity."""
    w = (normal(rng, outputs, columns) / np.float32(np.sqrt(columns))).astype(ml_dtypes.bfloat16)
    w[rng.random(outputs) < 0.1] = 0
    bits = rng.integers(0, 1 << 16, strange, np.uint16)
    bits[bits & 0x7F80 == 0x7F80] = 0x0001
    small = bits & 0x7F80 < 0x4000  # below 2, so that sums stay finite
    w[rng.integers(0, outputs, strange), rng.integers(0, columns, strange)] = np.where(
        small, bits, bits & 0xBFFF
    ).view(ml_dtypes.bfloat16)
    return w


@pytest.mark.parametrize("isa", ISAS)
@settings(deadline=None, max_examples=30)
@given(
    rows=st.one_of(st.integers(1, 16), st.integers(17, 120)),
    outputs=st.integers(1, 90),
    columns=st.integers(64, 700),
    strange=st.integers(0, 12),
    threads=st.integers(1, 3),
    seed=st.integers(0, 2**31),
)
def test_products_have_the_bits_of_16_bit_weights(
    isa: str, rows: int, outputs: int, columns: int, strange: int, threads: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    x, w = normal(rng, rows, columns), weights(rng, outputs, columns, strange)
    assert layout(native(isa, threads, True).matrix([w], "bfloat16")) == COMPACT
    compact, plain = (linear(native(isa, threads, c), x, w, "bfloat16") for c in (True, False))
    assert compact.tobytes() == plain.tobytes()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("rows", [1, 4, 5, 14, 15, 30, 80])
def test_gated_products_have_the_bits_of_16_bit_weights(isa: str, rows: int) -> None:
    rng = np.random.default_rng(rows)
    x, (gate, up) = normal(rng, rows, 330), (weights(rng, 50, 330, 3) for _ in range(2))
    compact, plain = (
        gated(native(isa, 2, c), x, gate, up, "bfloat16", activation="silu") for c in (True, False)
    )
    assert compact.tobytes() == plain.tobytes()


@pytest.mark.parametrize("isa", ISAS)
def test_embeddings_have_the_values_of_16_bit_weights(isa: str) -> None:
    w = weights(np.random.default_rng(0), 70, 200, 20)
    backend = native(isa, 2, True)
    table = backend.matrix([w], "bfloat16")
    assert layout(table) == COMPACT
    got = apply_rows(backend, np.zeros((70, 1), np.float32), lambda g, _: g(Embed(table)), 200)
    assert got.tobytes() == w.astype(np.float32).tobytes()


@settings(deadline=None, max_examples=40)
@given(
    outputs=st.integers(1, 70),
    columns=st.integers(1, 400),
    source=st.sampled_from([np.float32, np.float16, ml_dtypes.bfloat16]),
    seed=st.integers(0, 2**31),
)
def test_every_value_comes_back(outputs: int, columns: int, source: Any, seed: int) -> None:
    w = weights(np.random.default_rng(seed), outputs, columns, 8).astype(source)
    matrix = native(compact=True).matrix([w], "bfloat16")
    want = w.astype(ml_dtypes.bfloat16).astype(np.float32)
    assert matrix.dequantize().tobytes() == want.tobytes()


def test_all_bits_are_kept_not_numbers_too() -> None:
    w = np.zeros((16, 64 * 1024), np.uint16)
    w[3] = np.arange(1 << 16, dtype=np.uint16)
    w[3, 1024:-1024] = 0x3C00  # or there would be more escapes than a panel may have
    matrix = native(compact=True).matrix([w.view(ml_dtypes.bfloat16)], "bfloat16")
    assert layout(matrix) == COMPACT
    assert (matrix.dequantize().view(np.uint32) >> 16).astype(np.uint16).tobytes() == w.tobytes()


def test_three_quarters_of_the_bytes() -> None:
    w = weights(np.random.default_rng(0), 160, 1024, 0)
    assert native(compact=True).matrix([w], "bfloat16").nbytes < 0.77 * w.nbytes


@pytest.mark.parametrize("columns", [1, 8, 16])
def test_short_rows_stay_in_16_bits(columns: int) -> None:
    w = weights(np.random.default_rng(0), 40, columns, 0)
    assert layout(native(compact=True).matrix([w], "bfloat16")) == "bfloat16"


def test_weights_of_many_exponents_stay_in_16_bits() -> None:
    rng = np.random.default_rng(0)
    w = (normal(rng, 40, 512) * np.exp(rng.uniform(-40, 40, (40, 512)))).astype(ml_dtypes.bfloat16)
    matrix = native(compact=True).matrix([w], "bfloat16")
    assert layout(matrix) == "bfloat16"
    assert matrix.dequantize().tobytes() == w.astype(np.float32).tobytes()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("rows", [1, 20, 80])
def test_damaged_bytes_are_not_followed(isa: str, rows: int) -> None:
    """A list of escapes that is out of order, without an end or beyond the panel spoils only its own panel."""
    rng = np.random.default_rng(0)
    backend, w, x = native(isa, 2, True), weights(rng, 48, 512, 0), normal(rng, rows, 512)
    about, data = backend.export(backend.matrix([w], "bfloat16"))
    memory = np.empty(len(data) + 64, np.uint8)
    copy = memory[-memory.ctypes.data % 64 :][: len(data)]
    copy[:] = data
    panel = len(copy) // 3
    copy[panel + 512 * 24 : 2 * panel] = rng.integers(0, 256, panel - 512 * 24, np.uint8)
    got, want = (
        apply_rows(backend, x, lambda g, t, m=m: g(Linear(t, m)), 48)
        for m in (backend.restore(about, copy), backend.matrix([w], "bfloat16"))
    )
    for columns in (slice(0, 16), slice(32, 48)):
        assert got[:, columns].tobytes() == want[:, columns].tobytes()


def test_a_panel_of_another_size_is_refused() -> None:
    backend = native(compact=True)
    about, data = backend.export(backend.matrix([weights(np.random.default_rng(0), 32, 256, 0)], "bfloat16"))
    assert about["layout"] == COMPACT
    with pytest.raises(ModelError, match="another size"):
        backend.restore(about, data[:-64])
