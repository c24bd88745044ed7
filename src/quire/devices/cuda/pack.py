"""Weights as tensors of a device, in the order in which its kernels read them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
import torch

from quire.devices.protocol import Array, FloatArray, Matrix, WeightType
from quire.errors import ConfigError, EngineError, ModelError
from quire.weights.schemes import Quantized
from quire.weights.tensor import FloatDtype, QuantTensor

DTYPES: dict[FloatDtype, Any] = {
    "float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16
}  # fmt: skip


class CudaMatrix:
    """A weight [O, K] in its type. If `gated`, rows of the gate and of the up projection alternate."""

    def __init__(self, values: Any, gated: bool = False) -> None:
        self.values, self.gated = values, gated

    @classmethod
    def pack(
        cls, parts: Sequence[Array | QuantTensor], dtype: WeightType, device: Any, gated: bool = False
    ) -> CudaMatrix:
        """Round parts to `dtype` and stack them. ConfigError for a type that no kernel multiplies."""
        if isinstance(dtype, Quantized):
            raise ConfigError(
                f"no kernel of this device multiplies {dtype.layout.name} weights: leave --quantization out (quantized "
                "checkpoints are held as floats), or choose --device cpu"
            )
        columns = parts[0].shape[1]
        if device.type == "meta":
            rows = sum(part.shape[0] for part in parts)
            return cls(torch.empty(rows, columns, dtype=DTYPES[dtype], device=device), gated)
        tensors = [_tensor(part).to(device).to(DTYPES[dtype]) for part in parts]
        if not gated:
            return cls(torch.cat(tensors), gated)
        return cls(torch.stack(tensors, 1).reshape(-1, columns), gated)

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
        values = self.values.float()
        if self.gated:
            values = torch.cat([values[::2], values[1::2]])
        found: FloatArray = values.cpu().numpy()
        return found

    def describe(self) -> dict[str, Any]:
        """What `restore` needs beside the bytes."""
        return {"shape": list(self.shape), "dtype": str(self.values.dtype)[6:], "gated": self.gated}


def restore(about: dict[str, Any], data: Array, device: Any) -> CudaMatrix:
    """The matrix of a description and its bytes. ModelError if they disagree."""
    dtype, shape = DTYPES.get(about["dtype"]), tuple(about["shape"])
    if dtype is None or data.nbytes != int(np.prod(shape)) * dtype.itemsize:
        raise ModelError(f"a weight of {data.nbytes} bytes is described as {about}")
    if device.type == "meta":
        return CudaMatrix(torch.empty(shape, dtype=dtype, device=device), about["gated"])
    values = torch.from_numpy(np.array(data)).view(dtype).reshape(shape)
    return CudaMatrix(values.to(device), about["gated"])


def own_matrix(weight: Matrix) -> CudaMatrix:
    """Check that a weight is this backend's."""
    if not isinstance(weight, CudaMatrix):
        raise EngineError(f"a GPU's backend got a weight of {type(weight).__name__}; load the model with it")
    return weight


def _tensor(part: Array | QuantTensor) -> Any:
    """A part as a tensor of the host, in its own type."""
    array = part.layout.dequantize(part) if isinstance(part, QuantTensor) else np.ascontiguousarray(part)
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(np.array(array))
