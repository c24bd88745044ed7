"""Parts of checkpoint tensors: the tensor, its shape, and the rows that a weight takes from it. Knows no family."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

import numpy as np

from quire.weights.checkpoint import Checkpoint
from quire.weights.layouts import AnyLayout
from quire.weights.tensor import Array, QuantTensor, Rows

Take = Callable[..., Array]


@dataclass(frozen=True, slots=True)
class Part:
    """A weight as the backend wants it, made from one tensor or several.

    `tensors` are (name, shape in the checkpoint); `take` gets the arrays and returns [O, K] or [O], of which `columns`
    are kept. A `take` that computes values, rather than picking them, gives the result's `shape`.
    """

    tensors: tuple[tuple[str, tuple[int, ...]], ...]
    take: Take | None = None
    shape: tuple[int, ...] | None = None
    columns: range | None = None

    def read(self, checkpoint: Checkpoint) -> Array:
        """Read the values. Only the rows taken from a quantized tensor are decoded."""
        if self.layout(checkpoint) is not None:
            return self.quantized(checkpoint).dequantize()
        return self.taken(*(checkpoint.get(name) for name, _ in self.tensors))

    def cut(self, rows: range | None = None, columns: range | None = None) -> Part:
        """Keep only these rows, or columns, of the result."""
        if rows is None and columns is None:
            return self
        take = self.take
        if rows is not None:

            def take(*arrays: Array) -> Array:
                return self.all_columns(*arrays)[rows.start : rows.stop]

        shape = self.shape
        if shape is not None:
            kept = (shape[0] if rows is None else len(rows), *shape[1:])
            shape = kept if columns is None else (kept[0], len(columns))
        if columns is None:
            columns = self.columns
        elif self.columns is not None:
            columns = self.columns[columns.start : columns.stop]
        return Part(self.tensors, take, shape, columns)

    def layout(self, checkpoint: Checkpoint) -> AnyLayout | None:
        """Find the part's quantized layout; None if it is not quantized, or not made of whole rows."""
        if len(self.tensors) != 1 or self.shape is not None:
            return None
        layout = checkpoint.layout(self.tensors[0][0])
        return None if layout is None or self.rows() is None else layout

    def quantized(self, checkpoint: Checkpoint, outline: bool = False) -> QuantTensor:
        """Read the part as the checkpoint quantized it, if it has a `layout`; with `outline`, without values."""
        (name, shape), rows, layout = self.tensors[0], self.rows(), checkpoint.layout(self.tensors[0][0])
        assert layout is not None
        assert rows is not None
        return layout.outline(len(rows), shape[-1]) if outline else checkpoint.quantized(name, rows)

    def outline(self) -> Array:
        """Make an array of the result's shape that takes no memory."""
        if self.shape is not None:
            return np.broadcast_to(np.float32(0), self.shape)
        return self.taken(*(np.broadcast_to(np.float32(0), shape) for _, shape in self.tensors))

    def rows(self) -> Rows | None:
        """Find the rows that the part takes from its only tensor, leading axes flattened; None if it changes rows.

        Found by applying `take` to a column of row numbers.
        """
        _, shape = self.tensors[0]
        if len(shape) < 2:
            return None
        numbers = np.arange(prod(shape[:-1]), dtype=np.intp).reshape(*shape[:-1], 1)
        taken, outline = self.taken(numbers), self.outline()
        whole = taken.ndim == 2 and taken.shape[1] == 1 and outline.shape == (len(taken), shape[-1])
        return taken[:, 0] if whole else None

    def all_columns(self, *arrays: Array) -> Array:
        """Apply `take` to the tensors' arrays and keep all columns."""
        return arrays[0] if self.take is None else self.take(*arrays)

    def taken(self, *arrays: Array) -> Array:
        """Apply `take` to the tensors' arrays and keep the part's columns."""
        taken = self.all_columns(*arrays)
        return taken if self.columns is None else taken[:, self.columns.start : self.columns.stop]


def part(name: str, shape: tuple[int, ...], take: Take | None = None) -> Part:
    return Part(((name, shape),), take)


def chain(*takes: Take | None) -> Take | None:
    """Compose takes, from left to right."""
    given = [take for take in takes if take is not None]
    if len(given) < 2:
        return given[0] if given else None

    def all_of(array: Array) -> Array:
        for take in given:
            array = take(array)
        return array

    return all_of


def transposed(array: Array) -> Array:
    return array.T


def row_range(start: int, stop: int) -> Take:
    return lambda array: array[start:stop]


def rows_of_groups(groups: int, start: int, stop: int) -> Take:
    """Take rows start..stop-1 of each of `groups` equal groups of rows."""

    def take(array: Array) -> Array:
        grouped = array.reshape(groups, -1, *array.shape[1:])[:, start:stop]
        return grouped.reshape(-1, *array.shape[1:])

    return take


def padded_rows(size: int, wide: int) -> Take:
    """Take groups of `size` rows, each followed by zeros up to `wide` rows."""

    def take(array: Array) -> Array:
        grouped = array.reshape(-1, size, *array.shape[1:])
        wanted = (len(grouped), wide, *array.shape[1:])
        if not array.strides[0]:  # an outline
            return np.broadcast_to(np.float32(0), (len(grouped) * wide, *array.shape[1:]))
        padded = np.zeros(wanted, array.dtype)
        padded[:, :size] = grouped
        return padded.reshape(-1, *array.shape[1:])

    return take


def halves(head_dim: int, rotary_dim: int) -> Take:
    """Reorder rows of heads whose rotary pairs are neighbours (2 i, 2 i + 1) to pairs (i, i + rotary_dim / 2).

    Scores do not change if queries and keys are reordered alike.
    """

    def take(array: Array) -> Array:
        if not any(array.strides):
            return array  # an outline, whose rows are all alike
        rest = array.shape[1:]
        heads = array.reshape(-1, head_dim, *rest)
        pairs = heads[:, :rotary_dim].reshape(-1, rotary_dim // 2, 2, *rest).swapaxes(1, 2)
        turned = pairs.reshape(-1, rotary_dim, *rest)
        if rotary_dim < head_dim:
            turned = np.concatenate([turned, heads[:, rotary_dim:]], axis=1)
        return turned.reshape(-1, *rest)

    return take
