"""int8: one scale per row."""

from __future__ import annotations

from typing import Any

import numpy as np

from quire.weights.layouts.base import PlainLayout
from quire.weights.layouts.rounding import LEAST
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
