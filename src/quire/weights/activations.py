"""Rounds activations as formats do before they are multiplied with quantized weights: the oracle of every device.

Knows numbers; knows no format and no device. csrc/rowwise/rounding.h says the same.
"""

from __future__ import annotations

from typing import Any, Literal

import ml_dtypes
import msgspec
import numpy as np

from quire.errors import ModelError
from quire.weights.layouts.base import LEAST
from quire.weights.tensor import FloatArray

# KeptActivations multiply weights that stay as a checkpoint quantized them: "checkpoint" rounds as its config says.
KeptActivations = Literal["float", "int8", "checkpoint"]
Number = Literal["int8", "e4m3", "e2m1"]
MOST = {"int8": np.float32(127), "e4m3": np.float32(448), "e2m1": np.float32(6)}
EXPONENT_OF_MOST = {"e4m3": 8, "e2m1": 2}


class Rounding(msgspec.Struct, frozen=True, kw_only=True):
    """Rounds rows of activations to numbers of few bits times a scale, nearest and ties to even.

    `columns` neighbouring elements share a scale (0: the whole row). Scales are
      float32   the largest magnitude divided by the largest number of the type
      powers    the same, rounded up to a power of two
      e8m0      a power of two after the rule of MX formats (OCP MX 1.0), halfway exponents rounded up
      e4m3      as NVFP4 has them: E4M3 numbers divided by `outer`
      fixed     `outer` for all
    `most`, unless it is 0, bounds the largest magnitude that a scale is made from. int8 with a `zero` or `asymmetric`
    spans a range that need not lie around 0: value = (code - zero) * scale.
    """

    number: Number
    scales: Literal["float32", "powers", "e8m0", "e4m3", "fixed"] = "float32"
    columns: int = 0
    outer: float = 1.0
    most: float = 0.0
    zero: int = 0
    asymmetric: bool = False

    @property
    def is_int8_by_row(self) -> bool:
        """Whether it rounds as products with int8 activations do."""
        return self == Rounding(number="int8")

    @property
    def is_int8_of_all(self) -> bool:
        """Whether it gives integers with one scale for all rows, which products of int8 can take as they are."""
        return self == Rounding(number="int8", scales="fixed", outer=self.outer)

    def round(self, x: FloatArray) -> FloatArray:
        """Round rows [R, K]. NaN and infinity make their group NaN."""
        rows, width = x.shape
        size = min(self.columns, width) or width
        groups = np.pad(x, ((0, 0), (0, -width % size))).reshape(-1, size)
        with np.errstate(invalid="ignore"):
            rounded = self._spanned(groups) if self.asymmetric else self._scaled(groups)
        return np.ascontiguousarray(rounded.reshape(rows, -1)[:, :width])

    def joined(self, other: Rounding) -> Rounding | None:
        """Merge the roundings of two weights with the same input; None if they differ.

        Of two fixed scales it is the wider one.
        """
        if msgspec.structs.replace(self, outer=other.outer) != other:
            return None
        wider = min if self.scales == "e4m3" else max  # a divisor
        return msgspec.structs.replace(self, outer=wider(self.outer, other.outer))

    def _scaled(self, x: FloatArray) -> FloatArray:
        if self.number == "int8" and self.scales == "float32":
            return round_int8(x)
        scales = self._scales(np.abs(x).max(axis=1, keepdims=True))
        ratios = np.where(scales > 0, x / np.where(scales > 0, scales, np.float32(1)), np.float32(0))
        ratios = np.where(np.isnan(scales), scales, ratios)
        if self.number == "int8":
            codes = np.clip(np.rint(ratios) + np.float32(self.zero), np.float32(-128), np.float32(127))
            return ((codes - np.float32(self.zero)) * scales).astype(np.float32)
        dtype = ml_dtypes.float8_e4m3fn if self.number == "e4m3" else ml_dtypes.float4_e2m1fn
        clipped = np.clip(ratios, -MOST[self.number], MOST[self.number])
        values: FloatArray = np.where(np.isnan(clipped), 0, clipped).astype(dtype).astype(np.float32) * scales
        return np.where(np.isnan(clipped), clipped, values).astype(np.float32)

    def _scales(self, most: FloatArray) -> FloatArray:
        """Scales of groups from their largest magnitudes [G, 1]."""
        if self.scales == "fixed":
            return np.where(np.isfinite(most), np.float32(self.outer), np.float32(np.nan))
        most = np.where(np.isfinite(most), most, np.float32(np.nan)).astype(np.float32)
        if self.scales == "e4m3":
            inner = np.minimum(most / MOST["e2m1"] * np.float32(self.outer), np.float32(448))
            held: FloatArray = (
                np.where(np.isnan(inner), 0, inner).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
            )
            return np.where(np.isnan(inner), inner, held / np.float32(self.outer)).astype(np.float32)
        if self.scales == "e8m0":
            bits = np.where(np.isnan(most), 0, most).astype(np.float32).view(np.uint32)
            up = np.uint32(0x00200000) if self.number == "e2m1" else np.uint32(0)
            exponents = np.maximum(((bits + up) >> 23).astype(np.int32) - EXPONENT_OF_MOST[self.number], 1)
            powers: FloatArray = (exponents.astype(np.uint32) << 23).view(np.float32)
            return np.where(np.isnan(most), most, powers).astype(np.float32)
        bounded = np.maximum(np.minimum(most, np.float32(self.most)) if self.most else most, LEAST)
        scales: FloatArray = (bounded / MOST[self.number]).astype(np.float32)
        if self.scales == "powers":
            bits = np.where(np.isnan(scales), 0, scales).astype(np.float32).view(np.uint32)
            whole: FloatArray = ((bits + np.uint32(0x007FFFFF)) & np.uint32(0xFF800000)).view(np.float32)
            return np.where(np.isnan(scales), scales, whole).astype(np.float32)
        return scales

    def _spanned(self, x: FloatArray) -> FloatArray:
        """int8 codes from the least value of each group to its largest."""
        least = np.minimum(x.min(axis=1, keepdims=True), np.float32(0))
        most = np.maximum(x.max(axis=1, keepdims=True), np.float32(0))
        scales = np.maximum(most - least, LEAST) / np.float32(255)
        zeros = np.float32(-128) - np.rint(least / scales)
        codes = np.clip(np.rint(x / scales) + zeros, np.float32(-128), np.float32(127))
        return np.where(np.isfinite(scales), (codes - zeros) * scales, np.float32(np.nan)).astype(np.float32)


def round_int8(values: FloatArray) -> FloatArray:
    """Round each row to integers from -127 to 127 times its own scale. NaN stays NaN."""
    most = np.abs(values).max(axis=-1, keepdims=True)
    inverse = np.where(most >= LEAST, np.float32(127) / np.maximum(most, LEAST), np.float32(0))
    whole = np.rint(values * inverse) + np.float32(0)  # an integer has no -0
    rounded: FloatArray = whole * (most / np.float32(127))
    return rounded


def stored_rounding(rounding: Rounding | None) -> dict[str, Any] | None:
    """Give a rounding as plain values, for a backend's description of a matrix."""
    return None if rounding is None else msgspec.structs.asdict(rounding)


def restored_rounding(stored: dict[str, Any] | None) -> Rounding | None:
    """Invert `stored_rounding`. Raises ModelError for anything else."""
    try:
        return None if stored is None else msgspec.convert(stored, Rounding)
    except msgspec.ValidationError as error:
        raise ModelError(f"the description of a packed weight has a wrong rounding: {error}") from error
