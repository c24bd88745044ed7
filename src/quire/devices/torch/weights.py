"""Weights as torch tensors, and how products round their inputs. Knows layouts; knows no operation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from quire.devices.protocol import Array, FloatArray, Matrix, WeightType
from quire.devices.reference.weights import ReferenceMatrix
from quire.errors import EngineError
from quire.weights.activations import Rounding
from quire.weights.layouts.base import LEAST
from quire.weights.schemes import Quantized, input_rounding
from quire.weights.tensor import QuantTensor

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class TorchMatrix(Matrix):
    """A weight [O, K] as float32, rounded to its type; or in that type, if it is a float one and `kept`."""

    def __init__(self, values: Any, rounding: Rounding | None) -> None:
        self.values, self.rounding = values, rounding

    @classmethod
    def pack(
        cls, parts: Sequence[Array | QuantTensor], dtype: WeightType, device: Any, kept: bool = False
    ) -> TorchMatrix:
        own = DTYPES[dtype] if kept and not isinstance(dtype, Quantized) else torch.float32
        if device.type == "meta":  # an outline: a shape without values
            shape = sum(part.shape[0] for part in parts), parts[0].shape[1]
            return cls(torch.empty(shape, dtype=own, device=device), input_rounding(dtype))
        rounded = ReferenceMatrix(parts, dtype)
        values = torch.from_numpy(np.ascontiguousarray(rounded.dequantize())).to(own)
        return cls(values.to(device), rounded.rounding)

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = self.values.shape
        return rows, columns

    @property
    def nbytes(self) -> int:
        return int(self.values.nbytes)

    def dequantize(self) -> FloatArray:
        values: FloatArray = self.values.float().cpu().numpy()
        return values

    def times(self, x: Any, bias: Any = None) -> Any:
        """x @ weight.T + bias in the weight's type: [K] -> [O], or [rows, K] -> [rows, O]."""
        if self.rounding is not None:
            x = rounded(x.float(), self.rounding)
        dtype = self.values.dtype
        return functional.linear(x.to(dtype), self.values, None if bias is None else bias.to(dtype))


def own_matrix(weight: Matrix) -> TorchMatrix:
    if not isinstance(weight, TorchMatrix):
        raise EngineError(
            f"the torch backend got a weight of {type(weight).__name__}; load the model with it"
        )
    return weight


def rounded(x: Any, rounding: Rounding) -> Any:
    """Round rows [.., K]; roundings other than int8 around 0 are the oracle's own, on the host."""
    width = x.shape[-1]
    if rounding == Rounding(number="int8", columns=rounding.columns):
        return round_int8_by(x, rounding.columns)
    return torch.from_numpy(rounding.round(x.reshape(-1, width).cpu().numpy())).to(x.device).reshape(x.shape)


def round_int8_by(x: Any, columns: int) -> Any:
    """Round rows [.., K] as `round_int8`, one scale per `columns`; 0: one for the whole row."""
    width = x.shape[-1]
    if columns == 0 or columns >= width:
        return round_int8(x)
    whole = functional.pad(x, (0, -width % columns))
    return round_int8(whole.reshape(*x.shape[:-1], -1, columns)).reshape(whole.shape)[..., :width]


def round_int8(x: Any) -> Any:
    """Round each row [..., K] to integers from -127 to 127 times its own scale."""
    most = x.abs().amax(-1, keepdim=True)
    inverse = torch.where(most >= float(LEAST), 127 / most.clamp(min=float(LEAST)), 0)
    return torch.round(x * inverse) * (most / 127)
