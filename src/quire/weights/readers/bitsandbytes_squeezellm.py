"""Weights whose codes point into a table: bitsandbytes (NF4, FP4, and its int8) and SqueezeLLM.

bitsandbytes (Dettmers et al. 2023, arXiv:2305.14314) counts blocks along the flattened weight. SqueezeLLM (Kim et al.
2023, arXiv:2306.07629) has a table for each row, and outliers in a separate sparse matrix.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any

import msgspec
import numpy as np

from quire.weights.checkpoint.protocol import Checkpoint
from quire.weights.layouts import Blocks, Int8
from quire.weights.layouts.blocks.make import lut_rows, table_rows
from quire.weights.layouts.blocks.scaled import FP4, NF4
from quire.weights.readers.fields import FLOATS, I8, I32, U8, Fields, num_words, unpack
from quire.weights.readers.grouped import refuse
from quire.weights.readers.packed_modules import ModuleCheckpoint, Packed
from quire.weights.tensor import Bytes, FloatArray, QuantTensor, Sparse

STATE = "weight.quant_state.bitsandbytes__"
BNB_USED = ("weight", "weight.absmax", "weight.quant_map", "weight.nested_absmax", "weight.nested_quant_map",
            f"{STATE}nf4", f"{STATE}fp4", "SCB", "weight_format")  # fmt: skip
MAX_STATE = 1 << 16  # bytes
TABLES = {"nf4": NF4, "fp4": FP4}


class BlockState(msgspec.Struct, frozen=True, kw_only=True):
    """Describes a 4-bit weight, as bitsandbytes writes it."""

    shape: tuple[int, ...]
    blocksize: int
    quant_type: str | None = None
    nested_blocksize: int | None = None
    nested_offset: float | None = None


def bitsandbytes_checkpoint(checkpoint: Checkpoint, settings: Mapping[str, Any]) -> Checkpoint:
    return ModuleCheckpoint(checkpoint, _bitsandbytes_module, BNB_USED)


def _bitsandbytes_module(fields: Fields) -> Packed | None:
    if "SCB" in fields:
        return _int8_module(fields)
    state_name = next((f"{STATE}{kind}" for kind in ("nf4", "fp4") if f"{STATE}{kind}" in fields), None)
    if state_name is None:
        return None
    fields.check(state_name, (U8,))
    if len(fields.shape(state_name)) != 1 or fields.shape(state_name)[0] > MAX_STATE:
        raise fields.wrong(state_name, "a short text")
    try:
        state = msgspec.json.decode(fields.get(state_name).tobytes(), type=BlockState)
    except (msgspec.MsgspecError, ValueError) as error:
        raise fields.wrong(state_name, f"JSON with shape and blocksize ({error})") from error
    if state.quant_type is not None and not state_name.endswith(f"__{state.quant_type}"):
        raise fields.wrong(state_name, f"of its own type, not {state.quant_type!r:.40}")
    shape, size = state.shape, state.blocksize
    if len(shape) != 2 or min(shape) < 1 or prod(shape) > 1 << 40 or not 1 <= size <= 1 << 16:
        raise fields.wrong(state_name, f"of a matrix in blocks, not {list(shape)[:8]} in blocks of {size}")
    count = prod(shape)
    bytes_held = prod(fields.shape("weight")) * fields.dtype("weight").itemsize
    if bytes_held != -(-count // 2):
        raise fields.wrong("weight", f"{-(-count // 2)} bytes for {list(shape)}")
    blocks = -(-count // size)
    fields.check("weight.quant_map", FLOATS, (16,))
    if "weight.nested_absmax" in fields:
        nested = state.nested_blocksize
        if nested is None or not 1 <= nested <= 1 << 16 or state.nested_offset is None:
            raise fields.wrong(state_name, "with nested_blocksize and nested_offset")
        fields.check("weight.absmax", (U8,), (blocks,))
        fields.check("weight.nested_quant_map", FLOATS, (256,))
        fields.check("weight.nested_absmax", FLOATS, (-(-blocks // nested),))
    else:
        fields.check("weight.absmax", FLOATS, (blocks,))
    decode = partial(_block_values, fields, state)
    kind = state_name.rpartition("_")[2]
    if shape[1] % 64 or size % 64 or count % size or not _is_plain_table(fields, kind):
        return Packed((shape[0], shape[1]), decode)
    return Packed((shape[0], shape[1]), decode, Blocks(kind), partial(_block_tensor, fields, state, kind))


def _is_plain_table(fields: Fields, kind: str) -> bool:
    """Whether a module's table is the one of its kind, which kernels know."""
    return bool((fields.floats("weight.quant_map") == TABLES[kind]).all())


def _block_tensor(fields: Fields, state: BlockState, kind: str) -> QuantTensor:
    rows, columns = state.shape
    scales = _block_scales(fields, state).repeat(state.blocksize // 64).reshape(rows, columns // 64)
    return Blocks(kind).tensor(table_rows(_block_codes(fields, state).reshape(rows, columns), scales))


def _block_codes(fields: Fields, state: BlockState) -> Bytes:
    packed = np.ascontiguousarray(fields.get("weight")).reshape(-1).view(np.uint8)
    codes = np.stack([packed >> np.uint8(4), packed & np.uint8(15)], axis=1)
    return codes.reshape(-1)[: prod(state.shape)]


def _block_scales(fields: Fields, state: BlockState) -> FloatArray:
    """Read one scale for each block of the flattened weight."""
    if "weight.nested_absmax" not in fields:
        return fields.floats("weight.absmax")
    assert state.nested_blocksize is not None
    assert state.nested_offset is not None
    inner = fields.floats("weight.nested_quant_map")[fields.get("weight.absmax")]
    outer = fields.floats("weight.nested_absmax").repeat(state.nested_blocksize)[: len(inner)]
    return inner * outer + np.float32(state.nested_offset)


def _block_values(fields: Fields, state: BlockState) -> FloatArray:
    spread = _block_scales(fields, state).repeat(state.blocksize)[: prod(state.shape)]
    values: FloatArray = fields.floats("weight.quant_map")[_block_codes(fields, state)] * spread
    return values.reshape(state.shape)


def _int8_module(fields: Fields) -> Packed:
    fields.check("weight", (I8,))
    shape = fields.shape("weight")
    if len(shape) != 2:
        raise fields.wrong("weight", "a matrix")
    fields.check("SCB", FLOATS, (shape[0],))
    if "weight_format" in fields:
        fields.check("weight_format", (U8,), (), (1,))
        if fields.get("weight_format").any():
            raise fields.wrong("weight_format", "0: weights in rows, not in tiles of a GPU")
    return Packed(
        (shape[0], shape[1]), lambda: _int8_tensor(fields).dequantize(), Int8(), partial(_int8_tensor, fields)
    )


def _int8_tensor(fields: Fields) -> QuantTensor:
    codes = fields.get("weight").view(np.uint8) ^ np.uint8(128)
    return QuantTensor(Int8(), codes, fields.floats("SCB")[:, None] / np.float32(127))


SQUEEZE_USED = ("qweight", "lookup_table", "rows", "cols", "vals", "full_rows", "full_row_indices")


def squeezellm_checkpoint(checkpoint: Checkpoint, settings: Mapping[str, Any]) -> Checkpoint:
    bits = settings.get("wbits", settings.get("bits", settings.get("w_bit")))
    if bits not in (3, 4):
        raise refuse("quantization_config (squeezellm)", f"wbits = {bits!r:.80} is not read; 3 and 4 are")
    return ModuleCheckpoint(checkpoint, partial(_squeezellm_module, int(bits)), SQUEEZE_USED, ("startrows",))


def _squeezellm_module(bits: int, fields: Fields) -> Packed:
    fields.check("lookup_table", FLOATS)
    fields.check("qweight", (I32,))
    if len(fields.shape("qweight")) != 2:
        raise fields.wrong("qweight", "a matrix")
    columns, rows = fields.shape("qweight")[0] * 32 // bits, fields.shape("qweight")[1]
    fields.check("qweight", (I32,), (num_words(columns, bits), rows))
    fields.check("lookup_table", FLOATS, (rows, 1 << bits))
    if "full_rows" in fields:
        raise refuse(fields.name("full_rows"), "dense rows beside the sparse matrix are not supported")
    if {"rows", "cols", "vals"} & fields.suffixes:
        fields.check("rows", (I32,), (rows + 1,))
        fields.check("vals", FLOATS)
        if len(fields.shape("vals")) != 1:
            raise fields.wrong("vals", "a vector")
        fields.check("cols", (I32,), fields.shape("vals"))
    decode = partial(_squeezellm_values, fields, bits)
    if columns % 32:
        return Packed((rows, columns), decode)
    count = prod(fields.shape("vals")) if "vals" in fields else 0
    layout = Blocks(f"lut{bits}", -(-count // rows))
    return Packed((rows, columns), decode, layout, partial(_squeezellm_tensor, fields, bits, layout))


def _squeezellm_codes(fields: Fields, bits: int) -> Bytes:
    words = np.ascontiguousarray(fields.words("qweight").T)
    codes: Bytes = unpack(words, bits, words.shape[1] * 32 // bits)
    return codes


def _squeezellm_tensor(fields: Fields, bits: int, layout: Blocks) -> QuantTensor:
    codes = _squeezellm_codes(fields, bits)
    tensor = layout.tensor(lut_rows(bits, codes, fields.floats("lookup_table")))
    return replace(tensor, sparse=_squeezellm_sparse(fields, *codes.shape) if layout.entries else None)


def _squeezellm_sparse(fields: Fields, rows: int, columns: int) -> Sparse:
    """Read the outliers, less the table's values at their places. Raises ModelError for places outside the weight."""
    starts, at, values = fields.get("rows"), fields.get("cols"), fields.floats("vals")
    if starts[0] != 0 or starts[-1] != len(values) or (np.diff(starts) < 0).any():
        raise fields.wrong("rows", f"ascending from 0 to {len(values)}")
    if len(at) and not (at.min() >= 0 and at.max() < columns):
        raise fields.wrong("cols", f"columns from 0 to {columns - 1}")
    return Sparse(np.ascontiguousarray(starts), np.ascontiguousarray(at), np.ascontiguousarray(values))


def _squeezellm_values(fields: Fields, bits: int) -> FloatArray:
    codes = _squeezellm_codes(fields, bits).astype(np.intp)
    values: FloatArray = np.take_along_axis(fields.floats("lookup_table"), codes, axis=1)
    if "vals" in fields:
        _squeezellm_sparse(fields, *values.shape).add_to(values)
    return values
