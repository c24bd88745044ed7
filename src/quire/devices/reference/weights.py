"""The oracle's weights: values rounded as a backend would hold them. Knows arrays; knows no operation.

Quantized values are computed in float32, step by step as csrc/linear/matrix.cpp does, so both hold the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np

from quire.devices.host import Float64Array
from quire.devices.protocol import (
    GROUPS_OF_INT4,
    Array,
    FloatArray,
    FloatDtype,
    Matrix,
    Quantized,
    WeightType,
)
from quire.errors import EngineError

DTYPES: dict[FloatDtype, Any] = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16}
LEAST = np.float32(1e-30)  # magnitudes below it are held as zero: their reciprocal is not a number


class ReferenceMatrix:
    """A weight [O, K], its values rounded to `dtype` and held as float64."""

    def __init__(self, parts: Sequence[Array], dtype: WeightType) -> None:
        self.int8_rows = isinstance(dtype, Quantized) and dtype.int8_rows
        if parts[0].dtype in GROUPS_OF_INT4:
            values = np.concatenate([_values_of(part) for part in parts])
        else:
            floats = np.concatenate([np.asarray(part).astype(np.float32) for part in parts])
            values = round_weights(floats, dtype)
        self.values: Float64Array = values.astype(np.float64)

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = self.values.shape
        return rows, columns

    @property
    def nbytes(self) -> int:
        return self.values.nbytes

    @property
    def greedy_nbytes(self) -> int:
        return self.nbytes

    def dequantize(self) -> FloatArray:
        return self.values.astype(np.float32)

    def seen(self, row: FloatArray) -> Float64Array:
        """One row of activations [K] as products with this weight see it."""
        return (round_int8(row[None])[0] if self.int8_rows else row).astype(np.float64)


def own_matrix(weight: Matrix) -> ReferenceMatrix:
    if not isinstance(weight, ReferenceMatrix):
        raise EngineError(
            f"the reference backend got a weight of {type(weight).__name__}; load the model with it"
        )
    return weight


def _values_of(groups_OG: Array) -> FloatArray:
    """What GROUPS_OF_INT4 stand for: [O, 32 G]."""
    scale = groups_OG["scale"].astype(np.float64)[:, :, None]
    has_offset = groups_OG.dtype == GROUPS_OF_INT4[1]
    offset = groups_OG["offset"].astype(np.float64)[:, :, None] if has_offset else 8 * scale
    values: FloatArray = (scale * groups_OG["quanta"] - offset).astype(np.float32)
    return values.reshape(len(values), -1)


def round_weights(values_OK: FloatArray, dtype: WeightType) -> FloatArray:
    """The float32 values that a weight of this type stands for."""
    if not isinstance(dtype, Quantized):
        rounded: FloatArray = values_OK.astype(DTYPES[dtype]).astype(np.float32)
        return rounded
    return round_int8(values_OK) if dtype.bits == 8 else _round_int4(values_OK, dtype)


def round_int8(values_OK: FloatArray) -> FloatArray:
    """Each row to whole numbers from -127 to 127 times its own scale."""
    most = np.abs(values_OK).max(axis=1, keepdims=True)
    inverse = np.where(most >= LEAST, np.float32(127) / np.maximum(most, LEAST), np.float32(0))
    whole = np.rint(values_OK * inverse) + np.float32(0)  # an integer has no -0
    rounded: FloatArray = whole * (most / np.float32(127))
    return rounded


def _round_int4(values_OK: FloatArray, dtype: Quantized) -> FloatArray:
    """Each group of columns to 16 values: scale * (q - 8), or scale * q - offset."""
    rows, columns = values_OK.shape
    padded = np.pad(values_OK, ((0, 0), (0, -columns % dtype.group_size)))
    groups = padded.reshape(rows, -1, dtype.group_size)
    least = np.minimum(groups.min(axis=2, keepdims=True), np.float32(0))
    largest = np.maximum(groups.max(axis=2, keepdims=True), np.float32(0))
    if dtype.symmetric:
        scale = np.where(-least > largest, least, largest) / np.float32(-8)
    else:
        scale = (largest - least) / np.float32(15)
    scale = scale.astype(DTYPES[dtype.scales]).astype(np.float32)
    used = np.abs(scale) >= LEAST
    inverse = np.where(used, np.float32(1) / np.where(used, scale, np.float32(1)), np.float32(0))
    zero = np.float32(8) if dtype.symmetric else np.rint(-least * inverse)
    q = np.clip(np.rint(groups * inverse) + zero, 0, 15)
    # In float64, where scale * q is exact, and rounded once: a fused multiply-add.
    rounded = scale.astype(np.float64) * q - (scale * zero).astype(np.float64)
    flat: FloatArray = rounded.astype(np.float32).reshape(rows, -1)[:, :columns]
    return flat
