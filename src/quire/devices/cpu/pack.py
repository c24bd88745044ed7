"""Weights in native panels (csrc/linear): packed, described for an engine directory, and placed in mapped bytes.

Knows `quire._native` and layouts; knows no plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ml_dtypes
import msgspec
import numpy as np

from quire import _native
from quire.devices.cpu.errors import native_errors
from quire.devices.protocol import Array, FloatArray, Matrix
from quire.errors import EngineError, ModelError
from quire.weights.activations import Rounding
from quire.weights.layouts import AnyLayout, Blocks, Int4
from quire.weights.schemes import Quantized, WeightType, multiplies_integers
from quire.weights.tensor import QuantTensor

PAIRED = ("e4m3", "e4m3_32", "e4m3_128", "mxfp8", "mxfp4", "nvfp4", "nvfp4_div")  # kinds of blocks
FORMAT_FIELDS = ("layout", "group", "offsets", "narrow", "int8_rows", "inputs", "screened", "blocks",
                 "nonzeros", "rounding")  # fmt: skip


class NativeMatrix:
    """A weight in panels of 16 rows (csrc/linear/format.h)."""

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


def multiplies_pairs(layout: AnyLayout) -> bool:
    """Tell whether instruction sets with products of bfloat16 use them for a layout (csrc/linear/blocks/pairs.h)."""
    return isinstance(layout, Int4) or (isinstance(layout, Blocks) and layout.kind in PAIRED)


def packed_of(weight: Matrix) -> Any:
    """Return the native weight of a matrix. Raises EngineError if another backend made it."""
    if not isinstance(weight, NativeMatrix):
        raise EngineError(
            f"the native backend got a weight of {type(weight).__name__}; load the model with it"
        )
    return weight.packed


def format_of(dtype: WeightType, compact: bool, screened: bool) -> Any:
    """Return the native format of a type. `compact`: bfloat16 in 12 bits; `screened`: floats get a screen."""
    if isinstance(dtype, Quantized):
        rounding = dtype.activations if isinstance(dtype.activations, Rounding) else None
        return _native.Format(
            **dtype.layout.format(),
            int8_rows=multiplies_integers(dtype),
            rounding=None if rounding is None else msgspec.structs.astuple(rounding),
        )
    layout = "bfloat16_12" if compact and dtype == "bfloat16" else dtype
    return _native.Format(layout=layout, screened=screened)


def pack(parts: Sequence[Array | QuantTensor], format: Any, gated: bool, isa: str, pool: Any) -> NativeMatrix:
    """Stack parts on rows, in panels: floats are rounded to the format, quantized tensors are kept bit for bit."""
    tensors = [part for part in parts if isinstance(part, QuantTensor)]
    if tensors and len(tensors) != len(parts):
        raise EngineError("a weight is made of floats or of quantized tensors, not of both")
    with native_errors:
        if tensors and format.layout == "blocks":
            format, rows = _with_blocks(format, tensors), [np.ascontiguousarray(t.codes) for t in tensors]
            sparse = _sparse(tensors) if format.nonzeros else []
            packed = _native.pack_blocks(
                rows, tensors[0].shape[1], format, gated, _inputs(tensors[0]), sparse, pool
            )
            return NativeMatrix(packed, pool)
        if tensors:
            codes = [_codes(tensor, format.layout) for tensor in tensors]
            return NativeMatrix(_native.pack_codes(codes, format, gated, _inputs(tensors[0]), pool), pool)
        return NativeMatrix(_native.pack([_floats(part) for part in parts], format, gated, isa, pool), pool)


def outline(parts: Sequence[Array | QuantTensor], format: Any, gated: bool, pool: Any) -> NativeMatrix:
    """Return the matrix that `pack` would make, without values."""
    rows = sum(part.shape[0] for part in parts)
    tensors = [part for part in parts if isinstance(part, QuantTensor)]
    with native_errors:
        if format.layout == "blocks":
            format = _with_blocks(format, tensors)
        return NativeMatrix(_native.outline(rows, parts[0].shape[1], format, gated), pool)


def describe(packed: Any) -> dict[str, Any]:
    """Describe a packed weight as plain values."""
    rows, columns = packed.shape
    fields = {name: getattr(packed.format, name) for name in FORMAT_FIELDS}
    return {"rows": rows, "cols": columns, "gated": packed.gated, **fields}


def place(about: dict[str, Any], data: Array | None, pool: Any) -> NativeMatrix:
    """Return the matrix that `describe` described, in its packed bytes, or without values. Raises ModelError."""
    try:
        format = _native.Format(**{name: about[name] for name in FORMAT_FIELDS})
        shape = about["rows"], about["cols"], format, about["gated"]
        return NativeMatrix(_native.outline(*shape) if data is None else _native.packed(*shape, data), pool)
    except KeyError as error:
        raise ModelError(f"the description of a packed weight lacks {error}: {about}") from error
    except (ValueError, TypeError) as error:
        raise ModelError(f"a packed weight cannot be used: {error}") from error


def _with_blocks(format: Any, tensors: Sequence[QuantTensor]) -> Any:
    """Return the format of a weight of blocks, which names the kinds of its parts."""
    kinds = []
    for tensor in tensors:
        if not isinstance(tensor.layout, Blocks):
            raise EngineError(f"a weight of {tensor.layout.name} cannot be packed as blocks")
        kinds.append((tensor.layout.kind, tensor.shape[0]))
    return _native.Format(
        layout="blocks",
        int8_rows=format.int8_rows,
        inputs=format.inputs,
        blocks=kinds,
        nonzeros=sum(len(tensor.sparse.values) for tensor in tensors if tensor.sparse is not None),
        rounding=format.rounding,
    )


def _sparse(tensors: Sequence[QuantTensor]) -> list[tuple[Array, Array, Array]]:
    """Starts, columns and values of each part; a part without any has none."""
    none = np.zeros(0, np.int32), np.zeros(0, np.float32)
    return [
        (np.zeros(t.shape[0] + 1, np.int32), *none)
        if t.sparse is None
        else (t.sparse.starts, t.sparse.columns, t.sparse.values)
        for t in tensors
    ]


def _inputs(tensor: QuantTensor) -> tuple[Array, Array] | None:
    """Return the inputs of a weight's columns, which its parts share."""
    if tensor.inputs is None:
        return None
    return np.ascontiguousarray(tensor.inputs.order, np.int32), np.ascontiguousarray(tensor.inputs.factors)


def _codes(tensor: QuantTensor, layout: str) -> tuple[Array, Array, Array | None]:
    if tensor.layout.name != layout:
        raise EngineError(f"a weight of {tensor.layout.name} cannot be packed as {layout}")
    zeros = None if tensor.zeros is None else np.ascontiguousarray(tensor.zeros, np.float32)
    return np.ascontiguousarray(tensor.codes), np.ascontiguousarray(tensor.scales, np.float32), zeros


def _floats(part: Array | QuantTensor) -> tuple[Array, str]:
    """Return an array that the packer can read in place, and the type of its elements."""
    assert not isinstance(part, QuantTensor)
    array = part
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
