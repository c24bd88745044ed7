"""HQQ (Badri and Shaji 2023) and torchao, whose weights are objects of a library taken apart into tensors.

Names of types in a file are compared with a list; nothing is imported or called for them.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from math import prod
from typing import Any

import numpy as np

from quire.weights.checkpoint.protocol import Checkpoint
from quire.weights.layouts import Blocks, Int8
from quire.weights.layouts.blocks.make import affine_kind, affine_rows, byte_kind, byte_rows
from quire.weights.layouts.blocks.scaled import pairs
from quire.weights.readers.fields import E4M3, FLOATS, I8, I32, I64, U8, Fields
from quire.weights.readers.grouped import Groups, packed_groups
from quire.weights.readers.packed_modules import ModuleCheckpoint, Packed
from quire.weights.readers.scaled import FP8, finite_fp8, multiplied
from quire.weights.tensor import Array, Bytes, FloatArray, QuantTensor

HQQ_USED = ("W_q", "scale", "zero", "shape", "nbits", "group_size", "axis", "packing")
HQQ_IGNORED = ("channel_wise", "compute_dtype", "encoded_state_dict", "offload_meta", "optimize", "quant_scale",
               "quant_zero", "round_zero", "stores_quant_config", "unpack_view_dtype", "view_as_float")  # fmt: skip
TORCHAO_USED = ("_weight_qdata", "_weight_scale", "_weight_zero_point", "_weight_act_pre_scale")
TORCHAO_IGNORED = ("_weight_act_quant_scale", "_weight_act_quant_zero_point")  # of activations


def hqq_checkpoint(checkpoint: Checkpoint, settings: Mapping[str, Any]) -> Checkpoint:
    return ModuleCheckpoint(checkpoint, _hqq_module, HQQ_USED, HQQ_IGNORED)


def _number(fields: Fields, suffix: str) -> int:
    fields.check(suffix, (I32, I64), (), (1,))
    return int(fields.get(suffix).reshape(())[()])


def _hqq_module(fields: Fields) -> Packed:
    fields.check("shape", (I64, I32), (2,))
    rows, columns = (int(size) for size in fields.get("shape"))
    bits, size, axis = (_number(fields, suffix) for suffix in ("nbits", "group_size", "axis"))
    if bits not in (1, 2, 3, 4, 8) or axis not in (0, 1):
        raise fields.wrong("nbits", "1, 2, 3, 4 or 8, with an axis of 0 or 1")
    if min(rows, columns, size) < 1 or rows * columns > 1 << 40 or rows * columns % size:
        raise fields.wrong("shape", f"a matrix of whole groups of {size}")
    groups = rows * columns // size
    height, width = (groups, size) if axis == 1 else (size, groups)
    word = I32 if bits == 3 else U8
    fields.check("W_q", (word, *FLOATS))
    held = {1: -(-height // 8), 2: -(-height // 4), 3: -(-height // 10), 4: -(-height // 2), 8: height}[bits]
    if fields.is_of("W_q", *FLOATS):  # view_as_float: the same bytes under another type
        width_held = width * word.itemsize // fields.dtype("W_q").itemsize
        fields.check("W_q", FLOATS, (held, width_held))
    else:
        fields.check("W_q", (word,), (held, width))
    wanted = (groups, 1) if axis == 1 else (1, groups)
    fields.check("scale", FLOATS, wanted)
    fields.check("zero", FLOATS, wanted)
    decode = partial(_hqq_values, fields, bits, height, (rows, columns))
    kind = affine_kind(bits, columns, size) if axis == 1 and columns % size == 0 else None
    if kind is None:
        return Packed((rows, columns), decode)
    layout = Blocks(kind)
    return Packed(
        (rows, columns), decode, layout, partial(_hqq_tensor, fields, bits, (rows, columns), size, layout)
    )


def _hqq_tensor(fields: Fields, bits: int, shape: tuple[int, int], size: int, layout: Blocks) -> QuantTensor:
    rows, columns = shape
    codes = _hqq_codes(fields, bits, rows * columns // size).reshape(shape)
    scales, zeros = (fields.floats(name).reshape(rows, -1) for name in ("scale", "zero"))
    return layout.tensor(affine_rows(layout.kind, codes, scales, zeros, size))


def _hqq_codes(fields: Fields, bits: int, height: int) -> Bytes:
    """Unpack rows of codes from equal parts of a word, the first part in the highest bits."""
    packed = np.ascontiguousarray(fields.get("W_q")).view(I32 if bits == 3 else U8)
    each = 10 if bits == 3 else 8 // bits
    shifts = np.arange(each - 1, -1, -1, dtype=packed.dtype) * packed.dtype.type(bits)
    parts = packed[None] >> shifts[:, None, None] & packed.dtype.type((1 << bits) - 1)
    codes: Bytes = parts.reshape(-1, packed.shape[1])[:height].astype(np.uint8)
    return codes


def _hqq_values(fields: Fields, bits: int, height: int, shape: tuple[int, int]) -> FloatArray:
    codes = _hqq_codes(fields, bits, height).astype(np.float32)
    values: FloatArray = (codes - fields.floats("zero")) * fields.floats("scale")
    return values.reshape(shape)


def torchao_checkpoint(checkpoint: Checkpoint, settings: Mapping[str, Any]) -> Checkpoint:
    return ModuleCheckpoint(checkpoint, _torchao_module, TORCHAO_USED, TORCHAO_IGNORED)


def _torchao_module(fields: Fields) -> Packed:
    """Read a torchao module: Int4Tensor has float zero points; the others have codes of the weight's own shape."""
    four_bits = fields.is_of("_weight_zero_point", *FLOATS)
    return multiplied(fields, (_int4_tensor if four_bits else _whole_codes)(fields), "_weight_act_pre_scale")


def _int4_tensor(fields: Fields) -> Packed:
    """Read two signed codes per byte, the first in the low half; value = code * scale + zero, both [K / g, O]."""
    fields.check("_weight_qdata", (I8, U8))
    found, scales = fields.shape("_weight_qdata"), fields.shape("_weight_scale")
    fields.check("_weight_scale", FLOATS)
    columns = found[-1] * 2
    if len(found) != 2 or len(scales) != 2 or scales[1] != found[0] or not scales[0] or columns % scales[0]:
        raise fields.wrong("_weight_scale", f"one for each group of columns of {[found[0], columns]}")
    fields.check("_weight_zero_point", FLOATS, scales)
    read = partial(_int4_groups, fields, columns // scales[0])
    return packed_groups((found[0], columns), 4, columns // scales[0], False, None, read, offsets=True)


def _int4_groups(fields: Fields, size: int) -> Groups:
    codes = pairs(fields.get("_weight_qdata").view(np.uint8)) ^ np.uint8(8)
    scales, zeros = (
        np.ascontiguousarray(fields.floats(name).T) for name in ("_weight_scale", "_weight_zero_point")
    )
    return Groups(codes, scales, 0, size, offsets=np.float32(8) * scales - zeros)


def _whole_codes(fields: Fields) -> Packed:
    """Read codes of the weight's own shape, signed or float8; scales by row or by group."""
    fields.check("_weight_qdata", (I8, *FP8))
    fields.check("_weight_scale", FLOATS)
    shape, scales = fields.shape("_weight_qdata"), fields.shape("_weight_scale")
    if len(shape) != 2 or len(scales) != 2 or scales[0] not in (1, shape[0]) or shape[1] % scales[1]:
        raise fields.wrong("_weight_scale", f"one for each row, or group of a row, of {list(shape)}")
    if "_weight_zero_point" in fields:
        fields.check("_weight_zero_point", (I8,), scales)
    rows, columns = shape
    decode = partial(_torchao_groups, fields)
    if not fields.is_of("_weight_qdata", I8):
        group = columns // scales[1]
        kind = byte_kind("e4m3" if fields.is_of("_weight_qdata", E4M3) else "e5m2", columns, group)
        if kind is None or "_weight_zero_point" in fields:
            return Packed((rows, columns), decode)
        layout = Blocks(kind)
        return Packed((rows, columns), decode, layout, partial(_torchao_fp8, fields, layout, group))
    zeros = "_weight_zero_point" in fields and bool(fields.get("_weight_zero_point").any())
    if scales == (rows, 1) and not zeros:
        return Packed((rows, columns), decode, Int8(), partial(_torchao_int8, fields))
    if scales[0] == rows and _are_four_bits(fields):
        read = partial(_torchao_int4, fields, columns // scales[1])
        held = fields.dtype("_weight_scale")
        return packed_groups((rows, columns), 4, columns // scales[1], not zeros, None, read, scales=held)
    return Packed((rows, columns), decode)


def _are_four_bits(fields: Fields) -> bool:
    codes = fields.get("_weight_qdata")
    return prod(codes.shape) > 0 and int(codes.min()) >= -8 and int(codes.max()) <= 7


def _torchao_groups(fields: Fields) -> FloatArray:
    codes, scales = fields.get("_weight_qdata").astype(np.float32), fields.floats("_weight_scale")
    size = codes.shape[1] // scales.shape[1]
    if "_weight_zero_point" in fields:
        codes = codes - fields.get("_weight_zero_point").astype(np.float32).repeat(size, 1)
    values: FloatArray = codes * scales.repeat(size, 1)
    return values


def _torchao_fp8(fields: Fields, layout: Blocks, group: int) -> QuantTensor:
    codes = finite_fp8(fields, "_weight_qdata").view(np.uint8)
    scales = fields.floats("_weight_scale")
    return layout.tensor(
        byte_rows(layout.kind, codes, np.broadcast_to(scales, (len(codes), scales.shape[1])), group)
    )


def _torchao_int8(fields: Fields) -> QuantTensor:
    codes = fields.get("_weight_qdata").view(np.uint8) ^ np.uint8(128)
    return QuantTensor(Int8(), codes, fields.floats("_weight_scale"))


def _torchao_int4(fields: Fields, size: int) -> Groups:
    codes = (fields.get("_weight_qdata") + np.int8(8)).astype(np.uint8)
    zeros: Array | int = 8
    if "_weight_zero_point" in fields:
        zeros = fields.get("_weight_zero_point").astype(np.int16) + 8
    return Groups(codes, fields.floats("_weight_scale"), zeros, size)
