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
from quire.weights.layouts.rounding import LEAST
from quire.weights.schemes import input_rounding
from quire.weights.tensor import QuantTensor


class TorchMatrix:
    """A weight [O, K] as float32, rounded to its type."""

    def __init__(self, values: Any, rounding: Rounding | None) -> None:
        self.values, self.rounding = values, rounding

    @classmethod
    def pack(cls, parts: Sequence[Array | QuantTensor], dtype: WeightType, device: Any) -> TorchMatrix:
        if device.type == "meta":  # an outline: a shape without values
            shape = sum(part.shape[0] for part in parts), parts[0].shape[1]
            return cls(torch.empty(shape, device=device), input_rounding(dtype))
        rounded = ReferenceMatrix(parts, dtype)
        return cls(torch.tensor(np.ascontiguousarray(rounded.dequantize()), device=device), rounded.rounding)

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = self.values.shape
        return rows, columns

    @property
    def nbytes(self) -> int:
        return int(self.values.nbytes)

    @property
    def greedy_nbytes(self) -> int:
        return self.nbytes

    def dequantize(self) -> FloatArray:
        values: FloatArray = self.values.cpu().numpy()
        return values

    def times(self, row: Any) -> Any:
        """weight @ row: [K] -> [O]."""
        if self.rounding is not None:
            row = rounded_row(row, self.rounding)
        return torch.mv(self.values, row)


def own_matrix(weight: Matrix) -> TorchMatrix:
    if not isinstance(weight, TorchMatrix):
        raise EngineError(
            f"the torch backend got a weight of {type(weight).__name__}; load the model with it"
        )
    return weight


def rounded_row(row: Any, rounding: Rounding) -> Any:
    """A row [K]; roundings other than int8 around 0 are the oracle's own, on the host."""
    if rounding == Rounding(number="int8", columns=rounding.columns):
        return round_int8_by(row, rounding.columns)
    return torch.from_numpy(rounding.round(row.cpu().numpy()[None])[0]).to(row.device)


def round_int8_by(row: Any, columns: int) -> Any:
    """Round a row [K] as `round_int8`, one scale per `columns`; 0: one for the whole row."""
    width = len(row)
    if columns == 0 or columns >= width:
        return round_int8(row)
    whole = functional.pad(row, (0, -width % columns))
    return round_int8(whole.reshape(-1, columns)).reshape(-1)[:width]


def round_int8(x: Any) -> Any:
    """Round each row [..., K] to integers from -127 to 127 times its own scale."""
    most = x.abs().amax(-1, keepdim=True)
    inverse = torch.where(most >= float(LEAST), 127 / most.clamp(min=float(LEAST)), 0)
    return torch.round(x * inverse) * (most / 127)
