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
    """How the codes of a quantized weight become values (weights/layouts)."""

    @property
    def name(self) -> str:
        """The layout's name, also in csrc/linear/format.h."""

    @property
    def rounds(self) -> int:
        """Columns of activations that share a scale when they are rounded to int8; 0: the whole row."""

    def columns(self, width: int) -> int:
        """Columns of a row whose codes take `width` bytes."""

    @property
    def floats(self) -> bool:
        """Whether codes stand for floats, so that activations in int8 cannot multiply them."""

    @property
    def inputs(self) -> bool:
        """Whether tensors have `inputs`."""

    def format(self) -> dict[str, Any]:
        """The fields of a native `Format` by name."""

    def dequantize(self, tensor: QuantTensor) -> FloatArray:
        """The float32 values [O, K] of a tensor in this layout. Every device is tested against it."""

    def outline(self, rows: int, columns: int) -> QuantTensor:
        """A tensor of this shape whose values are all zero and take no memory."""


@dataclass(frozen=True, slots=True)
class Inputs:
    """The input that each column [K] multiplies, and the factor that it is multiplied with first."""

    order: NDArray[np.int32]
    factors: FloatArray

    def seen(self, x: FloatArray) -> FloatArray:
        """Activations [..., K] as the columns get them."""
        return x[..., self.order] * self.factors

    def restored(self, values: FloatArray) -> FloatArray:
        """The values [O, K] of columns as those of inputs."""
        out = np.empty_like(values)
        out[:, self.order] = values * self.factors
        return out

    def equals(self, other: Inputs) -> bool:
        return np.array_equal(self.order, other.order) and np.array_equal(self.factors, other.factors)


@dataclass(frozen=True, slots=True)
class Sparse:
    """Values that are added to a weight [O, K]: those of row r are at starts[r] to starts[r + 1] - 1 of `values`."""

    starts: NDArray[np.int32]
    columns: NDArray[np.int32]
    values: FloatArray

    def rows(self, picked: Rows) -> Sparse:
        counts = np.diff(self.starts)[picked]
        starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        places = np.repeat(self.starts[:-1][picked] - starts[:-1], counts) + np.arange(starts[-1])
        return Sparse(starts, self.columns[places], self.values[places])

    def add_to(self, values: FloatArray) -> None:
        """In the order of the values."""
        rows = np.repeat(np.arange(len(self.starts) - 1), np.diff(self.starts))
        np.add.at(values, (rows, self.columns), self.values)


@dataclass(frozen=True, slots=True)
class QuantTensor:
    """A weight [O, K] of integer codes [O, K] and what turns them into values, per group of columns: [O, G].

    `codes` are unsigned bytes, one per element; a layout may pack several of them, and scales, into a row's bytes. The
    layout gives the formula; `zeros` is None if it needs none. `inputs` are those of the columns if they are not the
    plain ones, `sparse` what is added to the values. All other fields have rows on axis 0, so rows can be picked
    without touching a value.
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
        """The tensor made of these rows, in this order."""
        zeros = None if self.zeros is None else self.zeros[picked]
        sparse = None if self.sparse is None else self.sparse.rows(picked)
        return QuantTensor(self.layout, self.codes[picked], self.scales[picked], zeros, self.inputs, sparse)


def nothing(dtype: Any, *shape: int) -> Array:
    """Zeros of this shape that take no memory."""
    return np.broadcast_to(np.zeros((), dtype), shape)
