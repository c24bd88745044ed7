"""Packs weights into the layouts of the native kernels (csrc/simd/kernels.h, MatrixView)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np

from quire.devices.protocol import GROUPS_OF_INT4, Array, FloatArray, Matrix
from quire.errors import EngineError, ModelError


class NativeMatrix:
    """A weight in panels of 16 rows (csrc/simd/kernels.h, MatrixView)."""

    def __init__(self, packed: Any, pool: Any) -> None:
        self.packed = packed
        self._pool = pool

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = self.packed.shape
        return rows, columns

    @property
    def nbytes(self) -> int:
        return int(self.packed.nbytes)

    @property
    def greedy_nbytes(self) -> int:
        return int(self.packed.screen_nbytes) or self.nbytes

    def dequantize(self) -> FloatArray:
        values: FloatArray = self.packed.dequantize(self._pool)
        return values


def packed_of(weight: Matrix) -> Any:
    if not isinstance(weight, NativeMatrix):
        raise EngineError(
            f"the native backend got a weight of {type(weight).__name__}; load the model with it"
        )
    return weight.packed


def packable(array: Array) -> tuple[Array, str]:
    """An array the packer can read in place, and the type of its elements."""
    if array.ndim != 2:
        raise EngineError(f"a weight must have 2 dimensions, got shape {array.shape}")
    if not array.dtype.isnative or array.strides[1] != array.itemsize or array.strides[0] < 0:
        array = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("="))
    if array.strides[0] % array.itemsize:
        array = array.copy()
    if array.dtype == ml_dtypes.bfloat16:
        return array.view(np.uint16), "bfloat16"
    if array.dtype in (np.float16, np.float32):
        return array, str(array.dtype)
    raise EngineError(f"a weight must be float32, float16 or bfloat16, got {array.dtype}")


def shape_of(parts: Sequence[Array]) -> tuple[int, int]:
    group = 32 if parts[0].dtype in GROUPS_OF_INT4 else 1
    return sum(part.shape[0] for part in parts), parts[0].shape[1] * group


def pack_groups(parts: Sequence[Array], gated: bool) -> Array:
    """Pack GROUPS_OF_INT4 into a weight's 64-byte aligned bytes (csrc/simd/kernels.h, MatrixView, i4, group 32)."""
    rows_OG = list(parts) if gated else [np.concatenate(parts)]
    panels = []
    for rows in rows_OG:
        padded = np.zeros((-(-len(rows) // 16) * 16, rows.shape[1]), rows.dtype)
        padded[: len(rows)] = rows
        panels.append(padded.reshape(-1, 16, rows.shape[1]).swapaxes(1, 2))  # [panel, G, 16]
    stacked = np.stack(panels, axis=1).reshape(-1, *panels[0].shape[1:])
    # Eight columns a step: four in low halves of bytes, four in high halves.
    quanta = stacked["quanta"].reshape(*stacked.shape, 4, 2, 4)
    halves = quanta[..., 0, :] | quanta[..., 1, :] << np.uint8(4)
    fields = [np.ascontiguousarray(stacked["scale"]).view(np.uint8)]
    if stacked.dtype == GROUPS_OF_INT4[1]:
        fields.append(np.ascontiguousarray(stacked["offset"]).view(np.uint8))
    fields.append(halves.swapaxes(2, 3).reshape(*stacked.shape[:2], -1))
    groups = np.concatenate(fields, axis=-1).reshape(-1)
    memory = np.empty(groups.nbytes + 63, np.uint8)
    start = -memory.ctypes.data % 64
    memory[start : start + groups.nbytes] = groups
    return memory[start : start + groups.nbytes]


# csrc/simd/kernels.h: layout, group, and these
Format = tuple[str, int, bool, bool, bool, bool]
FLAGS = ("offsets", "narrow", "int8_rows", "screened")


def read_description(about: dict[str, Any]) -> tuple[int, int, Format, bool]:
    """Rows, columns, format and whether gated: as `NativeBackend.export` describes a matrix."""
    try:
        offsets, narrow, int8_rows, screened = (bool(about[name]) for name in FLAGS)
        format = str(about["layout"]), int(about["group"]), offsets, narrow, int8_rows, screened
        return int(about["rows"]), int(about["cols"]), format, bool(about["gated"])
    except (KeyError, TypeError, ValueError) as error:
        raise ModelError(f"not the description of a packed weight: {about}") from error
