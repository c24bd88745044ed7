"""Rounds groups of columns to integers: scales, zero points and codes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from quire.weights.tensor import Array, Bytes, FloatArray

SHRINKS = np.arange(20, dtype=np.float32) * np.float32(0.02)  # parts of a range that a search cuts off


@dataclass(frozen=True, slots=True)
class Grid:
    """Codes of `bits` bits in groups of `group` columns.

    value = (code - zero) * scale, the scale as float16 holds it. Symmetric: zero is half the range.
    """

    bits: int
    group: int
    symmetric: bool

    @property
    def most(self) -> int:
        return (1 << self.bits) - 1

    def fit(self, least: FloatArray, largest: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Fit scales and zero points to ranges, which always include zero."""
        least, largest = np.minimum(least, 0), np.maximum(largest, 0)
        if self.symmetric:
            furthest = np.maximum(-least, largest)
            scales = _half(furthest * np.float32(2) / np.float32(self.most))
            return scales, np.full_like(scales, 1 << (self.bits - 1))
        scales = _half((largest - least) / np.float32(self.most))
        return scales, np.clip(np.rint(-least / scales), 0, self.most).astype(np.float32)

    def search(self, values: FloatArray, importance: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Search scales and zero points [O] of a group [O, g] whose range errs least, weighted by importance [g]."""
        least, largest = values.min(axis=1), values.max(axis=1)
        best = self.fit(least, largest)
        error = self._error(values, best, importance)
        for cut in SHRINKS[1:]:
            found = self.fit(least * (1 - cut), largest * (1 - cut))
            other = self._error(values, found, importance)
            better = other < error
            best = np.where(better, found[0], best[0]), np.where(better, found[1], best[1])
            error = np.minimum(error, other)
        return best

    def _error(
        self, values: FloatArray, found: tuple[FloatArray, FloatArray], importance: FloatArray
    ) -> FloatArray:
        scales, zeros = found[0][:, None], found[1][:, None]
        wrong = (self.codes(values, scales, zeros) - zeros) * scales - values
        error: FloatArray = (wrong * wrong) @ importance
        return error

    def codes(self, values: FloatArray, scales: FloatArray, zeros: FloatArray) -> FloatArray:
        """Round to codes, as floats; all arrays broadcast."""
        codes: FloatArray = np.clip(np.rint(values / scales) + zeros, 0, self.most)
        return codes

    def round(self, values: FloatArray) -> Rounded:
        """Round all groups of a weight [O, K] to nearest."""
        groups = values.reshape(len(values), -1, self.group)
        scales, zeros = self.fit(groups.min(axis=2), groups.max(axis=2))
        codes = self.codes(groups, scales[:, :, None], zeros[:, :, None])
        return Rounded(codes.reshape(values.shape).astype(np.uint8), scales, zeros.astype(np.uint8))


@dataclass(frozen=True, slots=True)
class Rounded:
    """Codes [O, K], and scales and zero points [O, G] of groups of neighbouring columns."""

    codes: Bytes
    scales: FloatArray
    zeros: Array

    def values(self) -> FloatArray:
        rows, columns = self.codes.shape
        groups = self.codes.reshape(rows, self.scales.shape[1], -1).astype(np.float32)
        values: FloatArray = (groups - self.zeros[:, :, None].astype(np.float32)) * self.scales[:, :, None]
        return values.reshape(rows, columns)


def _half(scales: FloatArray) -> FloatArray:
    """Round scales to float16; a group of zeros has scale 1."""
    held = scales.astype(np.float16).astype(np.float32)
    return np.where(held > 0, held, np.float32(1)).astype(np.float32)
