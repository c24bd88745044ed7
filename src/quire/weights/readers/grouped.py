"""Weights of integer codes with a scale, and optionally a zero point, for each group of columns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import numpy as np

from quire.errors import ModelError
from quire.weights.layouts import AnyLayout, Blocks, Int4, Int8
from quire.weights.layouts.blocks.make import affine_kind, affine_rows, byte_kind, byte_rows
from quire.weights.readers.fields import BF16, F32, Fields
from quire.weights.readers.packed_modules import Packed
from quire.weights.tensor import Array, FloatArray, Inputs, QuantTensor

NATIVE_GROUPS = (32, 64, 128)


@dataclass(frozen=True, slots=True)
class Groups:
    """value = (code - zero) * scale: codes uint8 [O, K], scales float32 [O, G], zeros integers [O, G] or one for all.

    `order` is the group of each column, or None if groups are runs of `size` columns. `offsets` [O, G] take the place
    of zeros: value = code * scale - offset.
    """

    codes: Array
    scales: FloatArray
    zeros: Array | int
    size: int
    order: Array | None = None
    offsets: FloatArray | None = None

    def spread(self, values: Array) -> Array:
        """Repeat values of groups [O, G] for their columns [O, K]."""
        columns = self.codes.shape[1]
        if self.order is not None:
            return values[:, self.order]
        return np.repeat(values, min(self.size, columns), axis=1)[:, :columns]

    def dequantize(self) -> FloatArray:
        codes = self.codes.astype(np.float32)
        if self.offsets is not None:
            moved: FloatArray = codes * self.spread(self.scales) - self.spread(self.offsets)
            return moved
        zeros = self.zeros if isinstance(self.zeros, int) else self.spread(self.zeros.astype(np.float32))
        values: FloatArray = (codes - np.float32(zeros)) * self.spread(self.scales)
        return values

    def tensor(self, layout: AnyLayout) -> QuantTensor:
        """Convert to a layout; smaller groups repeat the scales. Columns are put in the order of groups."""
        if self.order is not None:
            columns = np.argsort(self.order, kind="stable").astype(np.int32)
            plain = replace(self, codes=np.ascontiguousarray(self.codes[:, columns]), order=None)
            inputs = Inputs(columns, np.ones(len(columns), np.float32))
            return replace(plain.tensor(layout), inputs=inputs)
        if isinstance(layout, Int8):
            return QuantTensor(layout, self.codes, self.scales)
        if isinstance(layout, Blocks) and layout.kind.startswith("affine"):
            zeros = np.broadcast_to(self.zeros, self.scales.shape).astype(np.float32)
            return layout.tensor(affine_rows(layout.kind, self.codes, self.scales, zeros, self.size))
        if isinstance(layout, Blocks):
            return layout.tensor(byte_rows(layout.kind, self.codes, self.scales, self.size))
        assert isinstance(layout, Int4)
        times = -(-self.codes.shape[1] // layout.group_size) // max(1, self.scales.shape[1])
        scales = np.repeat(self.scales, max(1, times), axis=1)
        if self.offsets is not None:
            return QuantTensor(layout, self.codes, scales, np.repeat(self.offsets, max(1, times), axis=1))
        if layout.symmetric:
            return QuantTensor(layout, self.codes, scales)
        zeros = np.repeat(np.broadcast_to(self.zeros, self.scales.shape), max(1, times), axis=1)
        zeros = zeros.astype(np.float32)
        return QuantTensor(
            layout, self.codes, scales, zeros if layout.scales == "bfloat16" else scales * zeros
        )


def packed_groups(
    shape: tuple[int, int],
    bits: int,
    size: int,
    symmetric: bool,
    order: Array | None,
    read: Callable[[], Groups],
    offsets: bool = False,
    scales: np.dtype[Any] | None = None,
) -> Packed:
    """Make a weight that stays in codes if a layout holds it: up to 4 bits as int4, 8 bits as bytes.

    `order` is the group of each column if groups are not runs; to be held, they must be of one size. `offsets`: groups
    have offsets instead of zeros, which only int4 holds. `scales` is the type of scales in the file: bfloat16 stays,
    and int4 would round products of float32 with zero points.
    """
    ordered, columns = order is not None, shape[1]
    layout: AnyLayout | None = None
    kind = None
    if order is not None and len(set(np.bincount(order).tolist())) > 1:
        return Packed(shape, lambda: read().dequantize())
    exact = symmetric or scales != F32
    if bits <= 4 and exact and (group := _native_group(size, columns)):
        held: Literal["float32", "bfloat16"] = "bfloat16" if scales == BF16 and not offsets else "float32"
        layout = Int4(group, symmetric and bits == 4, held, inputs=ordered)
    elif bits == 8 and size >= columns and symmetric:
        layout = Int8()
    elif columns % size == 0 and not offsets:
        kind = (
            byte_kind("int8", columns, size) if bits == 8 and symmetric else affine_kind(bits, columns, size)
        )
    if kind is not None:
        layout = Blocks(kind, inputs=ordered)
    codes = None if layout is None else partial(_tensor, read, layout)
    return Packed(shape, lambda: read().dequantize(), layout, codes)


def _tensor(read: Callable[[], Groups], layout: AnyLayout) -> QuantTensor:
    return read().tensor(layout)


def _native_group(size: int, columns: int) -> int | None:
    """Choose the layout's group that holds groups of `size` columns: the same, or a part of a larger one."""
    if size in NATIVE_GROUPS:
        return size
    whole = min(size, columns)
    fits = [group for group in NATIVE_GROUPS if whole % group == 0 and columns % whole == 0]
    return max(fits, default=None)


def check_order(fields: Fields, suffix: str, groups: int) -> Array:
    """Read the group of each column from a tensor. Raises ModelError if one is out of range."""
    order = fields.get(suffix)
    if order.size and not (int(order.min()) >= 0 and int(order.max()) < groups):
        raise fields.wrong(suffix, f"groups from 0 to {groups - 1}")
    return order.astype(np.intp)


def is_plain(order: Array, size: int) -> bool:
    """Whether groups are runs of `size` columns."""
    return bool((order == np.arange(len(order)) // size).all())


def group_count(fields: Fields, suffix: str, columns: int, size: int, found: int) -> None:
    """Refuse a number of groups that does not match the columns."""
    if not 1 <= size < 1 << 31 or found != -(-columns // size):
        raise fields.wrong(suffix, f"one for each group of {size} of {columns} columns")


def refuse(where: str, what: str) -> ModelError:
    return ModelError(f"{where}: {what}; use another version of the model")
