"""The formulas of layouts, compared with values written out by hand, and what every device must make of a tensor."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from quire.devices.reference.backend import ReferenceBackend
from quire.errors import EngineError
from quire.weights.layouts import AnyLayout, Blocks, Int4, Int8
from quire.weights.parts import chain, halves, part, row_range, transposed
from quire.weights.readers.mxfp4 import mxfp4_blocks
from quire.weights.schemes import Quantized
from quire.weights.tensor import QuantTensor
from tests.devices.native_cases import native, normal


def test_int8_is_a_scale_per_row() -> None:
    tensor = QuantTensor(Int8(), np.array([[0, 128, 255]], np.uint8), np.array([[0.5]], np.float32))
    assert tensor.dequantize().tolist() == [[-64.0, 0.0, 63.5]]


def test_int4_with_and_without_offsets() -> None:
    codes = np.zeros((1, 40), np.uint8)
    codes[0, [0, 39]] = 15, 15
    scales, zeros = np.array([[0.5, 2.0]], np.float32), np.array([[3.0, 1.0]], np.float32)
    by_symmetry = QuantTensor(Int4(32), codes, scales).dequantize()
    assert by_symmetry[0, [0, 1, 32, 39]].tolist() == [3.5, -4.0, -16.0, 14.0]
    by_zero_point = QuantTensor(Int4(32, False), codes, scales, zeros).dequantize()
    assert by_zero_point[0, [0, 1, 32, 39]].tolist() == [6.0, -1.5, -2.0, 28.0]
    by_offset = QuantTensor(Int4(32, False, "float32"), codes, scales, zeros).dequantize()
    assert by_offset[0, [0, 1, 32, 39]].tolist() == [4.5, -3.0, -1.0, 29.0]


def test_mxfp4_has_the_values_of_the_standard() -> None:
    codes = np.tile(np.arange(16, dtype=np.uint8), 2)
    packed = codes[0::2] | codes[1::2] << np.uint8(4)
    values = mxfp4_blocks(packed.reshape(1, 1, 16), np.array([[127]], np.uint8)).dequantize()
    positive = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    assert values[0, :16].tolist() == [*positive, *(-v for v in positive)]


@pytest.mark.parametrize("layout", [Int8(), Int4(32), Int4(64, False), Int4(32, False, "float32")], ids=repr)
@pytest.mark.parametrize("columns", [64, 130])
def test_a_tensor_that_is_packed_has_the_bits_that_the_kernel_rounds_to(layout: Any, columns: int) -> None:
    """Rounding here and packing the codes gives the same bytes as rounding in the packer."""
    values = normal(np.random.default_rng(columns), 37, columns)
    tensor, dtype = layout.quantize(values), Quantized(layout)
    packed, rounded = native().matrix([tensor], dtype), native().matrix([values], dtype)
    assert packed.dequantize().tobytes() == tensor.dequantize().tobytes()
    assert rounded.dequantize().tobytes() == tensor.dequantize().tobytes()
    halves_ = tensor.rows(np.arange(18)), tensor.rows(np.arange(18, 36))
    gated = native().gated_matrix(*halves_, dtype)
    assert gated.dequantize().tobytes() == tensor.dequantize()[:36].tobytes()
    assert ReferenceBackend().matrix([tensor], dtype).dequantize().tobytes() == tensor.dequantize().tobytes()


@pytest.mark.parametrize("layout", [Int8(), Int4(32, False), Blocks("mxfp4")], ids=repr)
def test_an_outline_has_the_fields_of_a_tensor(layout: AnyLayout) -> None:
    outline = layout.outline(6, 64)
    assert outline.shape == (6, 64)
    assert not outline.dequantize().any()
    picked = outline.rows(np.array([1, 1, 5]))
    assert picked.shape == (3, 64)


def test_codes_of_another_layout_are_refused() -> None:
    tensor = Int8().outline(4, 32)
    with pytest.raises(EngineError, match="int8 cannot be packed as int4"):
        native().matrix([tensor], Quantized(Int4(32)))
    with pytest.raises(EngineError, match="not of both"):
        native().matrix([tensor, np.zeros((4, 32), np.float32)], Quantized(Int8()))
    short = QuantTensor(Int4(32), np.zeros((4, 64), np.uint8), np.zeros((4, 1), np.float32))
    with pytest.raises(EngineError, match="one scale for each group"):
        native().matrix([short], Quantized(Int4(32)))
    with pytest.raises(EngineError, match="offsets"):
        native().matrix([Int4(32).outline(4, 64)], Quantized(Int4(32, False)))


def test_parts_that_only_pick_rows_are_known() -> None:
    turn = halves(8, 8)
    assert part("w", (16, 32), row_range(4, 6)).rows() is not None
    picked = part("w", (16, 32), chain(row_range(8, 16), turn)).rows()
    assert picked is not None
    assert picked.tolist() == [8, 10, 12, 14, 9, 11, 13, 15]
    stacked = part("w", (3, 4, 32), lambda array: array[2, 1::2]).rows()
    assert stacked is not None
    assert stacked.tolist() == [9, 11]
    assert part("w", (32, 32), transposed).rows() is None
    assert part("w", (1, 1), transposed).rows() is not None  # the same row
    assert part("w", (16, 32), lambda array: array[:, 8:]).rows() is None
    assert part("w", (16,), row_range(0, 2)).rows() is None
