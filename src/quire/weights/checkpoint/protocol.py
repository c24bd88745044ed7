"""What every checkpoint offers: names, shapes, values, and quantized tensors as they are. Knows no model."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from quire.weights.layouts import AnyLayout
from quire.weights.tensor import Array, QuantTensor, Rows


class Checkpoint(Protocol):
    """Named tensors on disk. Opening reads headers only; only `get` and `quantized` read values.

    A reader of a quantization format (weights/readers) is a `Checkpoint` around another one. It gives quantized tensors
    the names, shapes and dtypes of the weights that they stand for.
    """

    def names(self) -> Iterable[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def dtype(self, name: str) -> np.dtype[Any]:
        """Of values as `get` returns them."""

    def path(self, name: str) -> Path:
        """The file that holds the tensor."""

    def get(self, name: str) -> Array:
        """The values, C-contiguous and aligned: a read-only view of the file if they lie so on disk."""

    def layout(self, name: str) -> AnyLayout | None:
        """The layout of a quantized tensor [..., O, K]; None for all others."""

    def quantized(self, name: str, rows: Rows) -> QuantTensor:
        """These rows of a quantized tensor, whose leading axes count as one."""


class Unquantized:
    """The part of a `Checkpoint` that holds no quantized tensors."""

    def layout(self, name: str) -> AnyLayout | None:
        return None

    def quantized(self, name: str, rows: Rows) -> QuantTensor:
        raise KeyError(name)
