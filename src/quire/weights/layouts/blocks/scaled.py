"""Kinds of blocks whose rows have words of their own, or whose codes stand for floats: FP8, FP4 and tables.

A row is `row` bytes, then its blocks. Values are number * scale, rounded once to float32. csrc/linear/blocks/values.h
and UnpackNvfp4 of blocks/unpack.h say the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from quire.weights.layouts.blocks.fields import Floats
from quire.weights.tensor import Bytes

RowDecoder = Callable[
    [Floats, Bytes], Floats
]  # words of rows [O, W] as float32, blocks [O, B, bytes] -> [O, K]

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
UNSIGNED_ZERO = E2M1 + np.float32(0)  # as integers have it
NF4 = np.array(
    [-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
     -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
     0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0],
    np.float32,
)  # fmt: skip
FP4_STEPS = np.array([0, 1 / 192, 2 / 3, 1, 1 / 3, 1 / 2, 1 / 6, 1 / 4], np.float32)
FP4 = np.concatenate([FP4_STEPS, np.float32(0) - FP4_STEPS])  # zero has one sign


def float_bytes(values: Floats) -> Bytes:
    """[..., N] float32 -> [..., 4 N] bytes."""
    return np.ascontiguousarray(values, "<f4").view(np.uint8)


def floats_of(raw: Bytes) -> Floats:
    """[..., 4 N] bytes -> [..., N] float32."""
    return np.ascontiguousarray(raw).view("<f4").astype(np.float32)


def pairs(packed: Bytes) -> Bytes:
    """[..., C] bytes -> [..., 2 C] codes of four bits, the low half first."""
    codes = np.stack([packed & np.uint8(15), packed >> np.uint8(4)], axis=-1)
    return codes.reshape(*packed.shape[:-1], -1)


def in_pairs(codes: Bytes) -> Bytes:
    """The inverse of `pairs`."""
    packed: Bytes = codes[..., ::2] | codes[..., 1::2] << np.uint8(4)
    return packed


def four_and_four(codes: Bytes) -> Bytes:
    """[..., 8 N] codes of four bits -> [..., 4 N] bytes: of each eight the first four are in low halves."""
    eights = codes.reshape(*codes.shape[:-1], -1, 2, 4)
    return (eights[..., 0, :] | eights[..., 1, :] << np.uint8(4)).reshape(*codes.shape[:-1], -1)


def _apart(packed: Bytes) -> Bytes:
    """The inverse of `four_and_four`."""
    fours = packed.reshape(*packed.shape[:-1], -1, 1, 4) >> np.array([[0], [4]], np.uint8)
    return (fours & np.uint8(15)).reshape(*packed.shape[:-1], -1)


def _flat(values: NDArray[np.float32]) -> Floats:
    return values.reshape(len(values), -1)


def _numbers(codes: Bytes, dtype: type) -> Floats:
    return np.ascontiguousarray(codes).view(dtype).astype(np.float32)


def _fp8_of_row(dtype: type, row: Floats, blocks: Bytes) -> Floats:
    return _flat(_numbers(blocks, dtype)) * row


def _fp8_of_block(dtype: type, row: Floats, blocks: Bytes) -> Floats:
    return _flat(_numbers(blocks[..., 4:], dtype) * floats_of(blocks[..., :4]))


def _int8(row: Floats, blocks: Bytes) -> Floats:
    return _flat((blocks[..., 4:].astype(np.float32) - np.float32(128)) * floats_of(blocks[..., :4]))


def _affine(bits: int, row: Floats, blocks: Bytes) -> Floats:
    codes = blocks[..., 8:] if bits == 8 else pairs(blocks[..., 8:])
    return _flat((codes.astype(np.float32) - floats_of(blocks[..., 4:8])) * floats_of(blocks[..., :4]))


def _mxfp8(row: Floats, blocks: Bytes) -> Floats:
    scales = np.ldexp(np.float32(1), blocks[..., :1].astype(np.int32) - 127).astype(np.float32)
    return _flat(_numbers(blocks[..., 1:], ml_dtypes.float8_e4m3fn) * scales)


def _nvfp4(divides: bool, row: Floats, blocks: Bytes) -> Floats:
    inner, outer = _numbers(blocks[..., :4], ml_dtypes.float8_e4m3fn), row[:, :, None]
    scales = inner / outer if divides else inner * outer
    return _flat(UNSIGNED_ZERO[_apart(blocks[..., 4:])] * scales.repeat(16, axis=-1))


def _table(values: Floats, row: Floats, blocks: Bytes) -> Floats:
    return _flat(values[pairs(blocks[..., 4:])] * floats_of(blocks[..., :4]))


def _lut4(row: Floats, blocks: Bytes) -> Floats:
    return np.take_along_axis(row, pairs(blocks).reshape(len(row), -1).astype(np.intp), axis=1)


def _lut3(row: Floats, blocks: Bytes) -> Floats:
    bits = np.unpackbits(blocks, axis=-1, bitorder="little").reshape(len(row), -1, 3)
    codes = bits @ np.array([1, 2, 4], np.uint8)
    return np.take_along_axis(row, codes.astype(np.intp), axis=1)


E4M3, E5M2 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2
DECODERS: Mapping[str, RowDecoder] = {
    "int8_32": _int8,
    "int8_128": _int8,
    "nvfp4": partial(_nvfp4, False),
    "nvfp4_div": partial(_nvfp4, True),
    "e4m3": partial(_fp8_of_row, E4M3),
    "e4m3_32": partial(_fp8_of_block, E4M3),
    "e4m3_128": partial(_fp8_of_block, E4M3),
    "e5m2": partial(_fp8_of_row, E5M2),
    "e5m2_32": partial(_fp8_of_block, E5M2),
    "e5m2_128": partial(_fp8_of_block, E5M2),
    "mxfp8": _mxfp8,
    "nf4": partial(_table, NF4),
    "fp4": partial(_table, FP4),
    "lut3": _lut3,
    "lut4": _lut4,
    "affine4_32": partial(_affine, 4),
    "affine4_64": partial(_affine, 4),
    "affine8_32": partial(_affine, 8),
    "affine8_128": partial(_affine, 8),
}
