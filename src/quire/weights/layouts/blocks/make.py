"""Makes rows of scaled blocks from codes and scales, and from floats: rounding to FP8, MXFP4 and NVFP4."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from quire.weights.layouts.blocks.scaled import E4M3, E5M2, float_bytes, four_and_four, in_pairs
from quire.weights.tensor import Array, Bytes, FloatArray

FP8 = {"e4m3": (E4M3, np.float32(448)), "e5m2": (E5M2, np.float32(57344))}  # and their largest numbers
E4M3_MOST, E2M1_MOST = np.float32(448), np.float32(6)


def spread(scales: FloatArray, columns: int, group: int, size: int) -> FloatArray:
    """Repeat scales of groups [O, G] for runs of `size` columns, which divides the groups."""
    spread: FloatArray = scales[:, np.arange(columns // size) * size // group]
    return spread


def byte_kind(prefix: str, columns: int, group: int) -> str | None:
    """Choose the kind that holds one-byte codes with scales of `group` columns; None if there is none.

    `prefix` is e4m3, e5m2 or int8.
    """
    if columns % 32:
        return None
    if group >= columns and prefix != "int8":
        return prefix
    if group % 128 == 0 and columns % 128 == 0:
        return f"{prefix}_128"
    return f"{prefix}_32" if group % 32 == 0 or group >= columns else None


def byte_rows(kind: str, codes: Bytes, scales: FloatArray, group: int) -> Bytes:
    """Make rows of a `byte_kind`: codes [O, K], scales [O, G] of groups of `group` columns."""
    rows, columns = codes.shape
    if "_" not in kind:
        return np.concatenate([float_bytes(scales.reshape(rows, 1)), codes], axis=1)
    size = int(kind.rpartition("_")[2])
    heads = float_bytes(spread(scales, columns, group, size)).reshape(rows, -1, 4)
    return np.concatenate([heads, codes.reshape(rows, -1, size)], axis=2).reshape(rows, -1)


def affine_kind(bits: int, columns: int, group: int) -> str | None:
    """Choose the kind that holds codes of up to `bits` bits with a scale and any zero point; None if none does."""
    width, large = (8, 128) if bits > 4 else (4, 64)
    for size in (large, 32):
        if columns % size == 0 and (group % size == 0 or group >= columns):
            return f"affine{width}_{size}"
    return None


def affine_rows(kind: str, codes: Bytes, scales: FloatArray, zeros: FloatArray, group: int) -> Bytes:
    """Make rows of an `affine_kind`: codes [O, K], scales and zero points [O, G] of groups of `group` columns."""
    rows, columns = codes.shape
    size = int(kind.rpartition("_")[2])
    heads = np.stack([spread(values, columns, group, size) for values in (scales, zeros)], axis=2)
    held = codes.reshape(rows, -1, size)
    held = in_pairs(held) if kind.startswith("affine4") else held
    return np.concatenate([float_bytes(heads), held], axis=2).reshape(rows, -1)


def nvfp4_rows(codes: Bytes, inner: Bytes, outer: FloatArray) -> Bytes:
    """Make rows of codes [O, K] of four bits, scales of 16 columns [O, K / 16] in E4M3, scales of rows [O, 1]."""
    rows = len(codes)
    blocks = [inner.reshape(rows, -1, 4), four_and_four(codes.reshape(rows, -1, 64))]
    held = np.concatenate(blocks, axis=2).reshape(rows, -1)
    return np.concatenate([float_bytes(np.broadcast_to(outer, (rows, 1))), held], axis=1)


def table_rows(codes: Bytes, scales: FloatArray) -> Bytes:
    """Make rows of NF4 and FP4: codes [O, K] of four bits, scales of 64 columns [O, K / 64]."""
    rows = len(codes)
    heads = float_bytes(scales).reshape(rows, -1, 4)
    return np.concatenate([heads, in_pairs(codes.reshape(rows, -1, 64))], axis=2).reshape(rows, -1)


def lut_rows(bits: int, codes: Bytes, tables: FloatArray) -> Bytes:
    """Make rows of codes [O, K] of 3 or 4 bits, a table [O, 2^bits] for each row."""
    if bits == 4:
        held = in_pairs(codes)
    else:
        stream = (codes[..., None] >> np.arange(3, dtype=np.uint8)) & np.uint8(1)
        held = np.packbits(stream.reshape(len(codes), -1), axis=1, bitorder="little")
    return np.concatenate([float_bytes(tables), held], axis=1)


def mxfp4_rows(packed: Bytes, exponents: Bytes) -> Bytes:
    """Make rows of blocks of 16 bytes [O, G, 16], neighbouring elements in a byte, and their exponents [O, G].

    The layout's blocks have elements i and i + 16 in a byte, behind the exponent.
    """
    low, high = packed & np.uint8(15), packed >> np.uint8(4)
    codes = np.stack([low, high], axis=-1).reshape(*packed.shape[:2], 32)
    halves = codes[..., :16] | codes[..., 16:] << np.uint8(4)
    blocks = np.concatenate([exponents[..., None], halves], axis=-1)
    return blocks.reshape(len(packed), packed.shape[1] * blocks.shape[2])


def round_fp8(values: FloatArray, kind: str = "e4m3") -> tuple[Bytes, FloatArray]:
    """Round to codes [O, K] and one scale per row [O, 1]: the largest magnitude becomes the largest number."""
    dtype, largest = FP8[kind]
    most = np.abs(values).max(axis=1, keepdims=True)
    scales = np.where(most > 0, most / largest, np.float32(1)).astype(np.float32)
    return np.clip(values / scales, -largest, largest).astype(dtype).view(np.uint8), scales


def round_e2m1(values: FloatArray) -> Bytes:
    """Round to four-bit codes of the nearest numbers, ties to even codes."""
    clipped: Array = np.clip(values, -E2M1_MOST, E2M1_MOST)
    return clipped.astype(ml_dtypes.float4_e2m1fn).view(np.uint8) & np.uint8(15)


def round_mxfp4(values: FloatArray) -> tuple[Bytes, Bytes]:
    """Round to codes [O, K] and exponents [O, K / 32], as compressed-tensors and Quark do."""
    groups = values.reshape(len(values), -1, 32)
    bits = np.abs(groups).max(axis=2).astype(np.float32).view(np.uint32)
    exponents = np.clip(((bits + np.uint32(0x00200000)) >> 23).astype(np.int32) - 2, 0, 254)
    scales = np.ldexp(np.float32(1), exponents - 127).astype(np.float32)
    return round_e2m1(groups / scales[:, :, None]).reshape(values.shape), exponents.astype(np.uint8)


def round_nvfp4(values: FloatArray, most: float | None = None) -> tuple[Bytes, Bytes, np.float32]:
    """Round to codes [O, K], E4M3 scales [O, K / 16] and an outer scale, which multiplies: `most` / 2688.

    `most` is the largest magnitude of all weights that share the outer scale; by default the largest of `values`.
    """
    groups = values.reshape(len(values), -1, 16)
    by_group = np.abs(groups).max(axis=2)
    found = np.float32(by_group.max(initial=0) if most is None else most)
    outer = found / (E4M3_MOST * E2M1_MOST) if found > 0 else np.float32(1)
    inner = np.minimum(by_group / E2M1_MOST / outer, E4M3_MOST).astype(E4M3)
    scales = inner.astype(np.float32) * outer
    inverse = np.where(scales > 0, np.float32(1) / np.where(scales > 0, scales, np.float32(1)), np.float32(0))
    codes = round_e2m1(groups * inverse[:, :, None]).reshape(values.shape)
    return codes, inner.view(np.uint8), np.float32(outer)


def rounded_rows(kind: str, values: FloatArray) -> Bytes:
    """Round floats [O, K] to a kind: e4m3, e5m2, mxfp4 or nvfp4."""
    if kind in ("e4m3", "e5m2"):
        codes, scales = round_fp8(values, kind)
        return byte_rows(kind, codes, scales, values.shape[1])
    if kind == "mxfp4":
        codes, exponents = round_mxfp4(values)
        return mxfp4_rows(in_pairs(codes.reshape(len(codes), -1, 32)), exponents)
    codes, inner, outer = round_nvfp4(values)
    return nvfp4_rows(codes, inner, outer.reshape(1, 1))
