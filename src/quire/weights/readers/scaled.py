"""Weights that keep their shape, or hold two 4-bit codes in a byte, beside a tensor of scales.

compressed-tensors, FP8 as DeepSeek, Qwen, AutoFP8 and fbgemm write it, ModelOpt and Quark: the tensors of a module and
their types tell its kind; the config gives bits and block sizes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import ml_dtypes
import msgspec
import numpy as np

from quire.errors import ModelError
from quire.weights.activations import KeptActivations, Rounding
from quire.weights.checkpoint.protocol import Checkpoint
from quire.weights.layouts import Blocks, Int8
from quire.weights.layouts.blocks.make import byte_kind, byte_rows, nvfp4_rows
from quire.weights.layouts.blocks.scaled import E2M1, pairs
from quire.weights.readers.fields import (
    E4M3,
    E5M2,
    E8M0,
    FLOATS,
    I8,
    I32,
    I64,
    U8,
    Fields,
    num_words,
    unpack,
    unpack_padded,
)
from quire.weights.readers.grouped import Groups, check_order, is_plain, packed_groups, refuse
from quire.weights.readers.input_rounding import INPUTS, InputRoundings
from quire.weights.readers.mxfp4 import MXFP4_BLOCKS, mxfp4_blocks
from quire.weights.readers.packed_modules import ModuleCheckpoint, Packed
from quire.weights.readers.quark import QuarkModules, quark_int4
from quire.weights.readers.short_scales import with_long_names
from quire.weights.tensor import Array, FloatArray, Inputs, QuantTensor

USED = ("weight", "weight_packed", "weight_scale", "weight_scale_inv", "weight_scale_2", "weight_global_scale",
        "weight_zero_point", "weight_shape", "weight_g_idx", "pre_quant_scale")  # fmt: skip
# Scales of activations (readers/input_rounding.py) and of caches.
IGNORED = (*INPUTS, "k_scale", "v_scale", "q_scale", "kv_scale", "prob_output_scale", "output_scale")
FP8 = (E4M3, E5M2)
SPARSE = ("marlin-24", "sparse-24-bitmask", "sparse-bitmask")


class ScaledCheckpoint(ModuleCheckpoint):
    """A `Checkpoint` in any of these formats. Raises ModelError, naming the field, for anything beyond them."""

    def __init__(self, checkpoint: Checkpoint, settings: Mapping[str, Any]) -> None:
        settings, checkpoint = inner_settings(settings), with_long_names(checkpoint)
        _check(settings)
        self._settings = settings
        self._bits = frozenset(_values(settings, "num_bits")) | frozenset(_values(settings, "bits"))
        self._blocks = block_size(settings)
        groups = settings.get("config_groups")
        given = groups.values() if isinstance(groups, dict) else ()
        weights = [group.get("weights") for group in given if isinstance(group, dict)]
        self._asymmetric = bool(weights) and all(
            isinstance(about, dict) and about.get("symmetric") is False for about in weights
        )
        self._padded = _is_old(settings.get("version"))
        self._modules = QuarkModules(settings)
        self._inputs = InputRoundings(settings, checkpoint, self._blocks, self._modules)
        super().__init__(checkpoint, self._find, USED, IGNORED, floats_beside=True)

    @property
    def activations(self) -> KeptActivations:
        """Round where products are of integers: that is fast, and every engine does so."""
        return "checkpoint" if self._inputs.are_integers else "float"

    def rounding(self, name: str) -> Rounding | None:
        module = name.removesuffix(".weight")
        return self._inputs.of(module, self.suffixes(name)) if name in self._packed else None

    def _find(self, fields: Fields) -> Packed | None:
        integers = fields.is_of("weight_packed", I32) or fields.is_of("weight", I8)
        if integers and self._asymmetric and "weight_zero_point" not in fields:
            raise fields.wrong("weight_zero_point", "there: the config says that no weight is symmetric")
        if "weight_packed" in fields:
            if fields.is_of("weight_packed", U8):
                return _four_bits(fields, "weight_packed")
            return _stream(fields, self._bits, self._padded)
        scale = next((s for s in ("weight_scale", "weight_scale_inv") if s in fields), None)
        if scale is None:
            return None
        if fields.is_of("weight", U8):
            return _int4_pairs(fields) if fields.is_of(scale, *FLOATS) else _four_bits(fields, "weight")
        if fields.is_of("weight", I8, *FP8):
            return _whole(fields, scale, self._blocks)
        if fields.is_of("weight", I32) and "global_quant_config" in self._settings:
            return quark_int4(fields, self._settings, self._modules)
        return None if fields.is_of("weight", *FLOATS) else _unknown(fields)


def _unknown(fields: Fields) -> Packed:
    raise fields.wrong("weight", "int8, uint8 or float8 beside its scales")


def inner_settings(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """Unwrap hf_quant_config.json, which has its settings one level deeper."""
    inner = settings.get("quantization")
    return {**inner, **settings} if isinstance(inner, dict) else settings


def _check(settings: Mapping[str, Any]) -> None:
    where = "quantization_config"
    for name in _values(settings, "format"):
        if name in SPARSE:
            raise refuse(where, f"format {name} is not read: sparse weights are not supported")
    sparse = settings.get("sparsity_config")
    if isinstance(sparse, dict) and sparse.get("format") not in (None, "dense"):
        raise refuse(where, f"sparsity_config {sparse['format']!r:.80} is not supported")
    if settings.get("transform_config"):
        raise refuse(where, "transform_config asks for rotations of activations, which are not supported")
    algorithm = settings.get("quant_algo")
    if algorithm == "NVFP4_SVD":
        raise refuse(where, f"quant_algo {algorithm} is not supported")


def _values(settings: Any, key: str) -> list[Any]:
    """Collect every value under `key`, however deep."""
    found, waiting = [], [settings]
    for value in waiting:
        if isinstance(value, dict):
            if isinstance(value.get(key), (int, str)):
                found.append(value[key])
            waiting += value.values()
    return found


def block_size(settings: Mapping[str, Any]) -> tuple[int, int]:
    """Read the rows and columns of a block that shares a scale."""
    waiting: list[Any] = [settings]
    for value in waiting:
        if not isinstance(value, dict):
            continue
        for key in ("weight_block_size", "block_structure"):
            size = value.get(key)
            if isinstance(size, str) and (match := re.fullmatch(r"(\d{1,6})x(\d{1,6})", size)):
                size = [int(match[1]), int(match[2])]
            if isinstance(size, list) and len(size) == 2 and all(type(n) is int and n > 0 for n in size):
                return size[0], size[1]
            if size is not None:
                raise ModelError(
                    f"quantization_config: {key} must be two numbers from 1 on, got {size!r:.80}"
                )
        waiting += value.values()
    return 128, 128


def _is_old(version: object) -> bool:
    """Whether compressed-tensors of this version pads each word of codes (up to 0.10)."""
    match = re.match(r"0\.(\d+)", version) if isinstance(version, str) else None
    return match is not None and int(match[1]) <= 10


def _stream(fields: Fields, allowed: frozenset[Any], padded: bool) -> Packed:
    """Read compressed-tensors' pack-quantized: words along K, codes with an offset of half their range."""
    fields.check("weight_packed", (I32,))
    fields.check("weight_scale", FLOATS)
    fields.check("weight_shape", (I64, I32), (2,))
    rows, columns = (int(size) for size in fields.get("weight_shape"))
    found, scales = fields.shape("weight_packed"), fields.shape("weight_scale")
    if len(found) != 2 or found[0] != rows or not 1 <= columns <= found[1] * 32:
        raise fields.wrong("weight_packed", f"the codes of a weight {[rows, columns]}")
    wide = {b for b in range(1, 9) if num_words(columns, b) == found[1]}
    apart = {b for b in range(1, 9) if -(-columns // (32 // b)) == found[1]}
    fits = (wide | apart) & allowed if allowed & (wide | apart) else wide | apart
    if len(fits) != 1:
        raise fields.wrong("weight_packed", f"codes of a weight {[rows, columns]} in some number of bits")
    bits = fits.pop()
    old = bits not in wide or (padded and bits in apart)
    if len(scales) != 2 or scales[0] != rows or columns % scales[1]:
        raise fields.wrong("weight_scale", f"one for each group of a weight {[rows, columns]}")
    size = columns // scales[1]
    if "weight_zero_point" in fields:
        fields.check("weight_zero_point", (I32, I8))
    order: Array | None = None
    if "weight_g_idx" in fields:
        fields.check("weight_g_idx", (I32,), (columns,))
        if not (fields.get("weight_g_idx") == -1).all():
            order = check_order(fields, "weight_g_idx", scales[1])
            order = None if is_plain(order, size) else order
    symmetric = "weight_zero_point" not in fields
    read = partial(_stream_groups, fields, bits, (rows, columns), size, order, old)
    held = fields.dtype("weight_scale")
    return packed_groups((rows, columns), bits, size, symmetric, order, read, scales=held)


def _stream_groups(
    fields: Fields, bits: int, shape: tuple[int, int], size: int, order: Array | None, old: bool
) -> Groups:
    take = unpack_padded if old else unpack
    codes, scales = take(fields.words("weight_packed"), bits, shape[1]), fields.floats("weight_scale")
    zeros: Array | int = 1 << (bits - 1)
    if fields.is_of("weight_zero_point", I8):
        zeros = fields.get("weight_zero_point").astype(np.int16) + zeros
    elif "weight_zero_point" in fields:
        zeros = take(np.ascontiguousarray(fields.words("weight_zero_point").T), bits, shape[0]).T
    if not isinstance(zeros, int) and zeros.shape != scales.shape:
        raise fields.wrong("weight_zero_point", f"one for each of the scales {list(scales.shape)}")
    return Groups(codes, scales, zeros, size, order)


def _whole(fields: Fields, scale: str, blocks: tuple[int, int]) -> Packed:
    """Read int8 or float8 codes of the weight's own shape; a scale for all, rows, groups of columns, or blocks."""
    shape = fields.shape("weight")
    fields.check(scale, (*FLOATS, E8M0, U8))
    if len(shape) != 2 or 0 in shape or 0 in fields.shape(scale):
        raise fields.wrong("weight", "a matrix beside its scales")
    rows, columns = shape
    given = fields.shape(scale)
    found = tuple(size for size in given if size != 1)
    tiles = (-(-rows // blocks[0]), -(-columns // blocks[1]))
    # A few rows may be as many as the blocks of a row: the axes tell what the scales are for.
    by_block = given in (tiles, (tiles[0], 1, tiles[1], 1)) and found != ()
    if tiles[0] == rows and columns % blocks[1] == 0:
        by_block = False  # they are groups of rows
    by_group = not by_block and len(given) == 2 and given[0] == rows and columns % given[1] == 0
    by_row = not by_block and found == (rows,)
    by_block = by_block or (
        not by_row and not by_group and found == tuple(size for size in tiles if size != 1) != ()
    )
    if found and not by_block and not by_group and not by_row:
        raise fields.wrong(
            scale, f"one in all, one for each row, group or block of {list(blocks)} of {list(shape)}"
        )
    if "weight_zero_point" in fields:
        fields.check("weight_zero_point", (I8,))
    tiled = blocks if by_block else None
    decode = partial(_whole_values, fields, scale, tiled)
    if _has_zeros(fields):
        return multiplied(fields, Packed((rows, columns), decode))
    if fields.is_of("weight", I8) and (by_row or not found):
        tensor = partial(_int8_tensor, fields, scale)
        return multiplied(fields, Packed((rows, columns), decode, Int8(), tensor))
    prefix = "int8" if fields.is_of("weight", I8) else "e4m3" if fields.is_of("weight", E4M3) else "e5m2"
    group = blocks[1] if by_block else columns if by_row or not found else columns // given[-1]
    kind = byte_kind(prefix, columns, group)
    if prefix == "e4m3" and group == 32 and by_group and fields.is_of(scale, U8, E8M0) and columns % 32 == 0:
        kind = "mxfp8"
    if kind is None:
        return multiplied(fields, Packed((rows, columns), decode))
    codes = partial(_byte_tensor, fields, scale, kind, group, tiled)
    return multiplied(fields, Packed((rows, columns), decode, Blocks(kind), codes))


def _byte_tensor(
    fields: Fields, scale: str, kind: str, group: int, blocks: tuple[int, int] | None
) -> QuantTensor:
    if fields.is_of("weight", I8):
        codes = fields.get("weight").view(np.uint8) ^ np.uint8(128)
    else:
        codes = finite_fp8(fields, "weight").view(np.uint8)
    if kind == "mxfp8":
        return _mxfp8_tensor(fields, scale, codes)
    rows, scales = len(codes), fields.floats(scale)
    if blocks is not None:
        scales = scales.reshape(-(-rows // blocks[0]), -1).repeat(blocks[0], 0)[:rows]
    elif scales.size == 1:
        scales = np.broadcast_to(scales.reshape(1, 1), (rows, 1))
    scales = scales.reshape(rows, -1)
    return Blocks(kind).tensor(byte_rows(kind, codes, scales, group))


def _mxfp8_tensor(fields: Fields, scale: str, codes: Array) -> QuantTensor:
    fields.floats(scale)  # are finite
    exponents = fields.get(scale).view(np.uint8)
    blocks = np.concatenate([exponents[..., None], codes.reshape(*exponents.shape, 32)], axis=2)
    return Blocks("mxfp8").tensor(blocks.reshape(len(codes), -1))


def finite_fp8(fields: Fields, suffix: str) -> Array:
    """Read FP8 codes. Raises ModelError for NaN and infinity."""
    codes = fields.get(suffix)
    bits = codes.view(np.uint8) & np.uint8(127)
    if (bits >= (0x7F if codes.dtype == E4M3 else 0x7C)).any():
        raise fields.wrong(suffix, "finite: it holds NaN or infinity")
    return codes


def _has_zeros(fields: Fields) -> bool:
    return "weight_zero_point" in fields and bool(fields.get("weight_zero_point").any())


def _int8_tensor(fields: Fields, scale: str) -> QuantTensor:
    codes = fields.get("weight").view(np.uint8) ^ np.uint8(128)
    scales = np.broadcast_to(fields.floats(scale).reshape(-1, 1), (len(codes), 1))
    return QuantTensor(Int8(), codes, np.ascontiguousarray(scales))


def _whole_values(fields: Fields, scale: str, blocks: tuple[int, int] | None) -> FloatArray:
    signed = fields.is_of("weight", I8)
    values = (fields.get("weight") if signed else finite_fp8(fields, "weight")).astype(np.float32)
    scales = fields.floats(scale)
    if "weight_zero_point" in fields:
        zeros = fields.get("weight_zero_point").astype(np.float32)
        values = values - _spread(zeros, values.shape, blocks if zeros.size == scales.size else None)
    product: FloatArray = values * _spread(scales, values.shape, blocks)
    return product


def multiplied(fields: Fields, packed: Packed, suffix: str = "pre_quant_scale") -> Packed:
    """Multiply a weight's inputs first, by ModelOpt's pre_quant_scale or another library's equal."""
    if suffix not in fields:
        return packed
    columns = packed.shape[1]
    fields.check(suffix, FLOATS, (columns,))
    factors = fields.floats(suffix)
    inputs = Inputs(np.arange(columns, dtype=np.int32), factors)
    codes = packed.codes

    def values() -> FloatArray:
        return packed.decode() * factors

    if packed.layout is None or codes is None:
        return Packed(packed.shape, values)
    layout = msgspec.structs.replace(packed.layout, inputs=True)
    return Packed(packed.shape, values, layout, lambda: replace(codes(), layout=layout, inputs=inputs))


def _spread(scales: FloatArray, shape: tuple[int, ...], blocks: tuple[int, int] | None) -> FloatArray:
    """Repeat scales for all values: [O, K]."""
    rows, columns = shape
    if blocks is not None:
        tiles = scales.reshape(-(-rows // blocks[0]), -(-columns // blocks[1]))
        spread: FloatArray = tiles.repeat(blocks[0], 0)[:rows].repeat(blocks[1], 1)[:, :columns]
        return spread
    if scales.size == 1:
        return np.broadcast_to(scales.reshape(()), (rows, columns))
    return scales.reshape(rows, -1).repeat(columns // (scales.size // rows), 1)


def _four_bits(fields: Fields, suffix: str) -> Packed:
    """Read E2M1 codes, two in a byte: MXFP4 scales 32 columns by powers of two, NVFP4 16 by E4M3 and all by one."""
    found = fields.shape(suffix)
    if len(found) != 2:
        raise fields.wrong(suffix, "a matrix")
    scaled = fields.shape("weight_scale")
    if (
        fields.is_of("weight_scale", U8, E8M0)
        and scaled == (found[0], found[1] * 4 // 96)
        and found[1] % 24 == 0
    ):
        return multiplied(
            fields, Packed((found[0], found[1] // 3 * 4), partial(_mxfp6_values, fields, suffix))
        )
    shape = found[0], found[1] * 2
    group = 16 if fields.is_of("weight_scale", E4M3) else 32
    if shape[1] % group:
        raise fields.wrong(suffix, f"of rows of whole groups of {group}")
    scales = shape[0], shape[1] // group
    if group == 32:
        fields.check("weight_scale", (U8, E8M0), scales)
        tensor = partial(_mx_tensor, fields, suffix)
        return multiplied(fields, Packed(shape, lambda: tensor().dequantize(), MXFP4_BLOCKS, tensor))
    fields.check("weight_scale", (E4M3,), scales)
    outer = "weight_global_scale" if "weight_global_scale" in fields else "weight_scale_2"
    fields.check(outer, FLOATS, (), (1,))
    decode = partial(_nv_values, fields, suffix, outer)
    if shape[1] % 64:
        return multiplied(fields, Packed(shape, decode))
    layout = Blocks("nvfp4_div" if outer == "weight_global_scale" else "nvfp4")
    return multiplied(
        fields, Packed(shape, decode, layout, partial(_nv_tensor, fields, suffix, outer, layout))
    )


def _mxfp6_values(fields: Fields, suffix: str) -> FloatArray:
    """Decode E2M3 codes, four in three bytes, low bits first, with powers of two for 32 columns."""
    threes = fields.get(suffix).reshape(len(fields.get(suffix)), -1, 3).astype(np.uint32)
    words = threes[..., 0] | threes[..., 1] << np.uint32(8) | threes[..., 2] << np.uint32(16)
    codes = words[..., None] >> np.arange(0, 24, 6, dtype=np.uint32) & np.uint32(63)
    numbers = codes.astype(np.uint8).view(ml_dtypes.float6_e2m3fn).astype(np.float32)
    values: FloatArray = numbers.reshape(len(threes), -1) * fields.floats("weight_scale").repeat(32, 1)
    return values


def _nv_tensor(fields: Fields, suffix: str, outer: str, layout: Blocks) -> QuantTensor:
    inner = fields.get("weight_scale")
    fields.floats("weight_scale")  # are finite
    by = _outer_scale(fields, outer).reshape(1, 1)
    return layout.tensor(nvfp4_rows(pairs(fields.get(suffix)), inner.view(np.uint8), by))


def _outer_scale(fields: Fields, outer: str) -> FloatArray:
    """Read the outer scale as a factor: compressed-tensors' divides, ModelOpt's multiplies."""
    by = fields.floats(outer).reshape(())
    if outer == "weight_global_scale" and by == 0:
        raise fields.wrong(outer, "greater than 0")
    return by


def _mx_tensor(fields: Fields, suffix: str) -> QuantTensor:
    exponents = fields.get("weight_scale").view(np.uint8)
    if (exponents == 255).any():
        raise fields.wrong("weight_scale", "finite: it holds NaN")
    return mxfp4_blocks(fields.get(suffix).reshape(*exponents.shape, 16), exponents)


def _nv_values(fields: Fields, suffix: str, outer: str) -> FloatArray:
    by, inner = _outer_scale(fields, outer), fields.floats("weight_scale")
    scales = inner / by if outer == "weight_global_scale" else inner * by
    values: FloatArray = E2M1[pairs(fields.get(suffix))] * scales.repeat(16, 1)
    return values


def _int4_pairs(fields: Fields) -> Packed:
    """Read ModelOpt's int4: rows 2 r and 2 r + 1 in the halves of a byte, in two's complement."""
    fields.check("weight_scale", FLOATS)
    found, scales = fields.shape("weight"), fields.shape("weight_scale")
    if len(found) != 2 or len(scales) != 2 or scales[0] != 2 * found[0] or found[1] % scales[1]:
        raise fields.wrong("weight_scale", f"one for each group of two weights in each byte of {list(found)}")
    shape, size = (2 * found[0], found[1]), found[1] // scales[1]
    read = partial(_pair_groups, fields, size)
    held = fields.dtype("weight_scale")
    return multiplied(fields, packed_groups(shape, 4, size, True, None, read, scales=held))


def _pair_groups(fields: Fields, size: int) -> Groups:
    packed = fields.get("weight")
    pairs = np.stack([packed & np.uint8(15), packed >> np.uint8(4)], axis=1).reshape(-1, packed.shape[1])
    return Groups(pairs ^ np.uint8(8), fields.floats("weight_scale"), 8, size)
