"""mxfp4: FP4 elements with one power of two for each 32 columns (OCP Microscaling Formats 1.0)."""

from __future__ import annotations

from typing import Any

import numpy as np

from quire.weights.layouts.base import PlainLayout
from quire.weights.layouts.rounding import grouped
from quire.weights.tensor import FloatArray, QuantTensor, nothing

GROUP = 32
# Twice the values of E2M1, so that they are integers. Scales are halved in exchange.
DOUBLED = np.array([0, 1, 2, 3, 4, 6, 8, 12, -0.0, -1, -2, -3, -4, -6, -8, -12], np.float32)


class MXFP4(PlainLayout, frozen=True, tag="mxfp4"):
    """value = scale * DOUBLED[code]: 4.25 bits per weight. Scales are powers of two."""

    @property
    def name(self) -> str:
        return "mxfp4"

    def format(self) -> dict[str, Any]:
        return {"layout": self.name}

    def dequantize(self, tensor: QuantTensor) -> FloatArray:
        with np.errstate(over="ignore"):  # the largest scales make infinities
            values = grouped(DOUBLED[tensor.codes], GROUP) * tensor.scales[:, :, None]
        flat: FloatArray = values.reshape(len(values), -1)[:, : tensor.shape[1]]
        return flat

    def outline(self, rows: int, columns: int) -> QuantTensor:
        return QuantTensor(
            self, nothing(np.uint8, rows, columns), nothing(np.float32, rows, -(-columns // GROUP))
        )
