"""The contents of a checkpoint: arrays of floats, and quantized weights. Knows values; knows no file and no device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
FloatArray = NDArray[np.float32]
Bytes = NDArray[np.uint8]
Rows = NDArray[np.intp]

FloatDtype = Literal["float32", "float16", "bfloat16"]


class Layout(Protocol):
    """Turns the codes of a quantized weight into values (weights/layouts)."""

    @property
    def name(self) -> str:
        """The layout's name, also in csrc/linear/format.h."""

    @property
    def rounds(self) -> int:
        """The number of activation columns that share a scale in int8; 0: the whole row."""

    def columns(self, width: int) -> int:
        """Count the columns of a row whose codes take `width` bytes."""

    @property
    def floats(self) -> bool:
        """Whether codes stand for floats, so that activations in int8 cannot multiply them."""

    @property
    def inputs(self) -> bool:
        """Whether tensors have `inputs`."""

    def format(self) -> dict[str, Any]:
        """Give the fields of a native `Format` by name."""

    def dequantize(self, tensor: QuantTensor) -> FloatArray:
        """Decode a tensor in this layout to float32 [O, K]. Every device is tested against it."""

    def outline(self, rows: int, columns: int) -> QuantTensor:
        """Make a tensor of this shape whose values are all zero and take no memory."""


@dataclass(frozen=True, slots=True)
class Inputs:
    """The input that each column [K] multiplies, and the factor that it is multiplied with first."""

    order: NDArray[np.int32]
    factors: FloatArray

    def seen(self, x: FloatArray) -> FloatArray:
        """Bring activations [..., K] into the order and scale of the columns."""
        return x[..., self.order] * self.factors

    def restored(self, values: FloatArray) -> FloatArray:
        """Bring the columns' values [O, K] back into the order and scale of the inputs."""
        out = np.empty_like(values)
        out[:, self.order] = values * self.factors
        return out

    def equals(self, other: Inputs) -> bool:
        return np.array_equal(self.order, other.order) and np.array_equal(self.factors, other.factors)


@dataclass(frozen=True, slots=True)
class Sparse:
    """Values added to a weight [O, K]: row r has values[starts[r]:starts[r + 1]]."""

    starts: NDArray[np.int32]
    columns: NDArray[np.int32]
    values: FloatArray

    def rows(self, picked: Rows) -> Sparse:
        counts = np.diff(self.starts)[picked]
        starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        places = np.repeat(self.starts[:-1][picked] - starts[:-1], counts) + np.arange(starts[-1])
        return Sparse(starts, self.columns[places], self.values[places])

    def add_to(self, values: FloatArray) -> None:
        """Add the values to an array, in their order."""
        rows = np.repeat(np.arange(len(self.starts) - 1), np.diff(self.starts))
        np.add.at(values, (rows, self.columns), self.values)


@dataclass(frozen=True, slots=True)
class QuantTensor:
    """A weight [O, K] of integer codes [O, K], with the scales that turn them into values, per group of columns [O, G].

    `codes` are unsigned bytes, one per element; a layout may pack several of them, and scales, into a row's bytes. The
    layout gives the formula; `zeros` is None if it needs none. `inputs`, if not None, reorders or scales the inputs of
    columns; `sparse` is added to the values. All other fields have rows on axis 0, so rows can be picked without
    touching a value.
    """

    layout: Layout
    codes: Bytes
    scales: FloatArray
    zeros: FloatArray | None = None
    inputs: Inputs | None = None
    sparse: Sparse | None = None

    @property
    def shape(self) -> tuple[int, int]:
        rows, width = self.codes.shape
        return rows, self.layout.columns(width)

    def dequantize(self) -> FloatArray:
        values = self.layout.dequantize(self)
        return values if self.inputs is None else self.inputs.restored(values)

    def rows(self, picked: Rows) -> QuantTensor:
        """Pick these rows, in this order."""
        zeros = None if self.zeros is None else self.zeros[picked]
        sparse = None if self.sparse is None else self.sparse.rows(picked)
        return QuantTensor(self.layout, self.codes[picked], self.scales[picked], zeros, self.inputs, sparse)


def nothing(dtype: Any, *shape: int) -> Array:
    """Make zeros of this shape that take no memory."""
    return np.broadcast_to(np.zeros((), dtype), shape)
