"""PlainLayout: the defaults that most layouts share."""

from __future__ import annotations

from typing import Literal

import ml_dtypes
import msgspec
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


class PlainLayout(msgspec.Struct, frozen=True, kw_only=True):
    """A layout with one code of one byte per element, whose products round activations by rows.

    `inputs`: columns have an order of their own, or inputs are multiplied with factors first.
    """

    inputs: bool = False

    @property
    def label(self) -> str:
        """The type's name in logs and tables."""
        return str(self.__struct_config__.tag)

    @property
    def rounds(self) -> int:
        """The number of activation columns that share a scale in int8; 0: the whole row."""
        return 0

    @property
    def floats(self) -> bool:
        """Whether codes stand for floats, so that activations in int8 cannot multiply them."""
        return False

    def columns(self, width: int) -> int:
        """Count the columns of a row whose codes take `width` bytes."""
        return width
