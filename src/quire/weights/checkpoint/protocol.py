"""The interface of every checkpoint: names, shapes, values, and quantized tensors in their own form. Knows no model."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from quire.errors import ModelError
from quire.weights.activations import KeptActivations, Rounding
from quire.weights.layouts import AnyLayout
from quire.weights.tensor import Array, QuantTensor, Rows

MAX_NAME = 256  # characters
MAX_TENSORS = 1 << 17  # of a file
FLOAT64, FLOAT32 = np.dtype(np.float64), np.dtype(np.float32)
MAX_SIZE = 1 << 48  # of a tensor, if empty axes count as one


def check_entry(path: Path, name: str, shape: Sequence[int]) -> None:
    """Raise ModelError for a name that no model has, and for sizes that no array can have."""
    if len(name) > MAX_NAME:
        raise ModelError(f"{path}: the name of tensor {name[:80]}... is longer than {MAX_NAME} characters")
    if math.prod(max(size, 1) for size in shape) > MAX_SIZE:
        raise ModelError(f"{path}: tensor {name}: sizes {list(shape)} are too large")


def held(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the type in which a file's numbers are held: float64 is read as float32."""
    return FLOAT32 if dtype == FLOAT64 else dtype


class Checkpoint(Protocol):
    """Named tensors on disk. Opening reads headers only; only `get` and `quantized` read values.

    A reader of a quantization format (weights/readers) is a `Checkpoint` around another one. It presents quantized
    tensors under the names, shapes and dtypes of the weights that they encode.
    """

    def names(self) -> Iterable[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def dtype(self, name: str) -> np.dtype[Any]:
        """The type of the values that `get` returns."""

    def path(self, name: str) -> Path:
        """The file that holds the tensor."""

    def get(self, name: str) -> Array:
        """The values, C-contiguous and aligned: a read-only view of the file if its order and type allow."""

    @property
    def activations(self) -> KeptActivations:
        """The activations that multiply its quantized tensors, unless the user chooses others."""

    def layout(self, name: str) -> AnyLayout | None:
        """The layout of a quantized tensor [..., O, K]; None for other tensors."""

    def quantized(self, name: str, rows: Rows) -> QuantTensor:
        """These rows of a quantized tensor, whose leading axes count as one."""

    def rounding(self, name: str) -> Rounding | None:
        """How the checkpoint's format rounds the activations that a quantized tensor multiplies; None: not at all."""


class Unquantized:
    """What a `Checkpoint` says of tensors that are not quantized, or whose activations are not rounded."""

    @property
    def activations(self) -> KeptActivations:
        return "float"

    def layout(self, name: str) -> AnyLayout | None:
        return None

    def quantized(self, name: str, rows: Rows) -> QuantTensor:
        raise KeyError(name)

    def rounding(self, name: str) -> Rounding | None:
        return None
