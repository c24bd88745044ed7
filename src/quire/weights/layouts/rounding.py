"""Rounding shared by several layouts."""

from __future__ import annotations

from typing import Literal

import ml_dtypes
import numpy as np

from quire.weights.tensor import FloatArray

LEAST = np.float32(1e-30)  # smaller magnitudes are held as zero: their reciprocal may not be a number


def round_to(values: FloatArray, dtype: Literal["float32", "bfloat16"]) -> FloatArray:
    """Round values to a type; the result is float32."""
    if dtype == "float32":
        return values
    rounded: FloatArray = values.astype(ml_dtypes.bfloat16).astype(np.float32)
    return rounded


def grouped(values: FloatArray, group_size: int) -> FloatArray:
    """Split columns into groups: [O, K] -> [O, G, group_size], zero padded."""
    padded = np.pad(values, ((0, 0), (0, -values.shape[1] % group_size)))
    return padded.reshape(len(values), -1, group_size)
