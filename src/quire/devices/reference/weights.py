"""The oracle's weights: values rounded as a backend would hold them. Knows layouts; knows no operation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np

from quire.devices.host import Float64Array
from quire.devices.protocol import Array, FloatArray, Matrix
from quire.errors import EngineError
from quire.weights.layouts import Int4, Int8
from quire.weights.schemes import Quantized, WeightType, input_rounding
from quire.weights.tensor import FloatDtype, QuantTensor

DTYPES: dict[FloatDtype, Any] = {
    "float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16
}  # fmt: skip


class ReferenceMatrix(Matrix):
    """A weight [O, K], its values rounded to `dtype` and held as float64, in the order of its columns."""

    def __init__(self, parts: Sequence[Array | QuantTensor], dtype: WeightType) -> None:
        layouts = [part.layout for part in parts if isinstance(part, QuantTensor)]
        self.inputs = next((part.inputs for part in parts if isinstance(part, QuantTensor)), None)
        self.rounding = input_rounding(dtype, layouts)
        self.values: Float64Array = np.concatenate([_rounded(part, dtype) for part in parts]).astype(
            np.float64
        )

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = self.values.shape
        return rows, columns

    @property
    def nbytes(self) -> int:
        return self.values.nbytes

    def dequantize(self) -> FloatArray:
        values: FloatArray = self.values.astype(np.float32)
        return values if self.inputs is None else self.inputs.restored(values)

    def seen(self, row: FloatArray) -> Float64Array:
        """Return one row of activations [K] in the precision that products with this weight use."""
        row = row if self.inputs is None else self.inputs.seen(row).astype(np.float32)
        rounded = row if self.rounding is None else self.rounding.round(row[None])[0]
        seen: Float64Array = rounded.astype(np.float64)
        return seen


def own_matrix(weight: Matrix) -> ReferenceMatrix:
    if not isinstance(weight, ReferenceMatrix):
        raise EngineError(
            f"the reference backend got a weight of {type(weight).__name__}; load the model with it"
        )
    return weight


def _rounded(part: Array | QuantTensor, dtype: WeightType) -> FloatArray:
    """Return the float32 values of a part of a weight, rounded to this type."""
    if isinstance(part, QuantTensor):
        return part.layout.dequantize(part)  # in the order of its columns
    floats: FloatArray = np.asarray(part).astype(np.float32)
    if not isinstance(dtype, Quantized):
        rounded: FloatArray = floats.astype(DTYPES[dtype]).astype(np.float32)
        return rounded
    if not isinstance(dtype.layout, (Int4, Int8)):
        raise EngineError(f"floats are not rounded to {dtype.layout.name}")
    return dtype.layout.quantize(floats).dequantize()
