"""Integers of four and eight bits, with a scale for each row or group."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np

from quire.weights.layouts.base import LEAST, PlainLayout, grouped, round_to
from quire.weights.tensor import FloatArray, QuantTensor, nothing


class Int8(PlainLayout, frozen=True, tag="int8"):
    """value = scale * (code - 128): 8 bits per weight."""

    @property
    def name(self) -> str:
        return "int8"

    def format(self) -> dict[str, Any]:
        return {"layout": self.name, "inputs": self.inputs}

    def quantize(self, values: FloatArray) -> QuantTensor:
        """Scale each row so that its largest magnitude becomes 127."""
        most = np.abs(values).max(axis=1, keepdims=True)
        inverse = np.where(most >= LEAST, np.float32(127) / np.maximum(most, LEAST), np.float32(0))
        codes = (np.rint(values * inverse).astype(np.int16) + 128).astype(np.uint8)
        return QuantTensor(self, codes, most / np.float32(127))

    def dequantize(self, tensor: QuantTensor) -> FloatArray:
        values: FloatArray = (tensor.codes.astype(np.float32) - np.float32(128)) * tensor.scales
        return values

    def outline(self, rows: int, columns: int) -> QuantTensor:
        return QuantTensor(self, nothing(np.uint8, rows, columns), nothing(np.float32, rows, 1))


class Int4(PlainLayout, frozen=True, tag="int4"):
    """value = scale * code - offset, where a symmetric layout has offset = 8 * scale and holds no zeros.

    Scales are held as `scales`. With bfloat16 `zeros` are zero points, so that offset = scale * zero; with float32 they
    are the offsets.
    """

    group_size: int = 64  # 32, 64 or 128
    symmetric: bool = True
    scales: Literal["float32", "bfloat16"] = "bfloat16"

    @property
    def name(self) -> str:
        return "int4"

    def format(self) -> dict[str, Any]:
        return {
            "layout": self.name,
            "group": self.group_size,
            "offsets": not self.symmetric,
            "narrow": self.scales == "bfloat16",
            "inputs": self.inputs,
        }

    def quantize(self, values: FloatArray) -> QuantTensor:
        """Round each group. Symmetric: the largest magnitude becomes -8, so that all 16 codes are used; else the range
        from the least value to the largest becomes 0 to 15.
        """
        groups = grouped(values, self.group_size)
        least = np.minimum(groups.min(axis=2), np.float32(0))
        largest = np.maximum(groups.max(axis=2), np.float32(0))
        if self.symmetric:
            exact = np.where(-least > largest, least, largest) / np.float32(-8)
        else:
            exact = (largest - least) / np.float32(15)
        scales = round_to(exact, self.scales)
        used = np.abs(scales) >= LEAST
        inverse = np.where(used, np.float32(1) / np.where(used, scales, np.float32(1)), np.float32(0))
        zeros = np.full_like(scales, 8) if self.symmetric else np.rint(-least * inverse)
        codes = np.clip(np.rint(groups * inverse[:, :, None]) + zeros[:, :, None], 0, 15)
        flat = codes.astype(np.uint8).reshape(len(values), -1)[:, : values.shape[1]]
        held = zeros if self.scales == "bfloat16" else scales * zeros
        return QuantTensor(self, flat, scales, None if self.symmetric else held)

    def dequantize(self, tensor: QuantTensor) -> FloatArray:
        """Compute in float64, where scale * code is exact, and round once: a fused multiply-add."""
        scales = tensor.scales.astype(np.float64)
        if tensor.zeros is None:
            offsets = 8 * scales
        elif self.scales == "bfloat16":
            offsets = (tensor.scales * tensor.zeros).astype(np.float64)
        else:
            offsets = tensor.zeros.astype(np.float64)
        codes = grouped(tensor.codes.astype(np.float32), self.group_size)
        values = (scales[:, :, None] * codes - offsets[:, :, None]).astype(np.float32)
        flat: FloatArray = values.reshape(len(values), -1)[:, : tensor.shape[1]]
        return flat

    def outline(self, rows: int, columns: int) -> QuantTensor:
        groups = nothing(np.float32, rows, -(-columns // self.group_size))
        return QuantTensor(self, nothing(np.uint8, rows, columns), groups, None if self.symmetric else groups)
