"""Blocks of every GGUF type to float32, in numpy. Knows no file; a block is what ggml's block_* structs hold.

Each decoder takes uint8 [B, bytes of a block] and returns float32 [B, elements of a block]. The order of operations is
ggml's (d * scale first, then the quantum, then the minimum), so that results are the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from quire.weights.layouts.blocks.fields import (
    Decoder,
    Floats,
    by_group,
    crumbs,
    fifth_bits,
    half,
    nibbles,
    planes,
)
from quire.weights.tensor import Bytes

# Steps of IQ4_NL and IQ4_XS, spaced as weights are.
NONLINEAR = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32)
# Twice the values of FP4 E2M1: the scale is halved in exchange.
DOUBLED_FP4 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.float32)


def _q8_0(blocks: Bytes) -> Floats:
    return np.ascontiguousarray(blocks[:, 2:]).view(np.int8).astype(np.float32) * half(blocks, 0)


def _q4_0(blocks: Bytes) -> Floats:
    return half(blocks, 0) * (nibbles(blocks[:, 2:], 16).astype(np.float32) - np.float32(8))


def _q4_1(blocks: Bytes) -> Floats:
    return half(blocks, 0) * nibbles(blocks[:, 4:], 16).astype(np.float32) + half(blocks, 2)


def _q5_0(blocks: Bytes) -> Floats:
    quanta = nibbles(blocks[:, 6:], 16) | fifth_bits(blocks[:, 2:6])
    return half(blocks, 0) * (quanta.astype(np.float32) - np.float32(16))


def _q5_1(blocks: Bytes) -> Floats:
    quanta = nibbles(blocks[:, 8:], 16) | fifth_bits(blocks[:, 4:8])
    return half(blocks, 0) * quanta.astype(np.float32) + half(blocks, 2)


def _q2_k(blocks: Bytes) -> Floats:
    """scales[16] of two nibbles (scale, minimum), quanta[64], d, dmin."""
    scales = blocks[:, :16]
    d = half(blocks, 80) * (scales & np.uint8(15)).astype(np.float32)
    m = half(blocks, 82) * (scales >> np.uint8(4)).astype(np.float32)
    return by_group(d, crumbs(blocks[:, 16:80]), m)


def _q3_k(blocks: Bytes) -> Floats:
    """high bits[32], quanta[64], 16 scales of six bits in 12 bytes, d. A high bit that is absent takes 4 away."""
    low = nibbles(blocks[:, 96:104], 8)
    tops = blocks[:, 104:108]
    high = (tops[:, None, :] >> np.array([[0], [2], [4], [6]], np.uint8)) & np.uint8(3)
    scales = (low | (high.reshape(-1, 16) << np.uint8(4))).astype(np.float32) - np.float32(32)
    missing = (planes(blocks[:, :32]) ^ np.uint8(1)) << np.uint8(2)
    quanta = crumbs(blocks[:, 32:96]).astype(np.int8) - missing.astype(np.int8)
    return by_group(half(blocks, 108) * scales, quanta)


def _six_bits(packed: Bytes) -> tuple[Floats, Floats]:
    """12 bytes of Q4_K and Q5_K -> 8 scales and 8 minima: the last four of each are split in two places."""
    first, second, rest = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    high = np.uint8(0x30)
    scales = [first & np.uint8(63), (rest & np.uint8(15)) | ((first >> np.uint8(2)) & high)]
    minima = [second & np.uint8(63), (rest >> np.uint8(4)) | ((second >> np.uint8(2)) & high)]
    return np.hstack(scales).astype(np.float32), np.hstack(minima).astype(np.float32)


def _q4_k(blocks: Bytes) -> Floats:
    """d, dmin, scales[12], quanta[128]."""
    scales, minima = _six_bits(blocks[:, 4:16])
    return by_group(half(blocks, 0) * scales, nibbles(blocks[:, 16:], 32), half(blocks, 2) * minima)


def _q5_k(blocks: Bytes) -> Floats:
    """d, dmin, scales[12], high bits[32], quanta[128]."""
    scales, minima = _six_bits(blocks[:, 4:16])
    quanta = nibbles(blocks[:, 48:], 32) | (planes(blocks[:, 16:48]) << np.uint8(4))
    return by_group(half(blocks, 0) * scales, quanta, half(blocks, 2) * minima)


def _q6_k(blocks: Bytes) -> Floats:
    """low nibbles[128], high pairs[64], int8 scales[16], d."""
    quanta = nibbles(blocks[:, :128], 64) | (crumbs(blocks[:, 128:192]) << np.uint8(4))
    scales = np.ascontiguousarray(blocks[:, 192:208]).view(np.int8).astype(np.float32)
    return by_group(half(blocks, 208) * scales, quanta.astype(np.int8) - np.int8(32))


def _iq4_nl(blocks: Bytes) -> Floats:
    return half(blocks, 0) * NONLINEAR[nibbles(blocks[:, 2:], 16)]


def _iq4_xs(blocks: Bytes) -> Floats:
    """d, high pairs of 8 scales in 2 bytes, low nibbles of them in 4, quanta[128]."""
    low = np.stack([blocks[:, 4:8] & np.uint8(15), blocks[:, 4:8] >> np.uint8(4)], axis=-1).reshape(-1, 8)
    tops = np.ascontiguousarray(blocks[:, 2:4]).view("<u2")
    high = ((tops >> np.arange(0, 16, 2, dtype=np.uint16)) & np.uint16(3)).astype(np.uint8)
    scales = (low | (high << np.uint8(4))).astype(np.float32) - np.float32(32)
    return by_group(half(blocks, 0) * scales, NONLINEAR[nibbles(blocks[:, 8:], 16)])


def _mxfp4(blocks: Bytes) -> Floats:
    """One exponent, 16 bytes of two elements (OCP Microscaling Formats 1.0, in ggml's order)."""
    scale = np.ldexp(np.float32(1), blocks[:, :1].astype(np.int32) - 128).astype(np.float32)
    return scale * DOUBLED_FP4[nibbles(blocks[:, 1:], 16)]


DECODERS: Mapping[str, Decoder] = {
    "q4_0": _q4_0,
    "q4_1": _q4_1,
    "q5_0": _q5_0,
    "q5_1": _q5_1,
    "q8_0": _q8_0,
    "q2_k": _q2_k,
    "q3_k": _q3_k,
    "q4_k": _q4_k,
    "q5_k": _q5_k,
    "q6_k": _q6_k,
    "iq4_nl": _iq4_nl,
    "iq4_xs": _iq4_xs,
    "mxfp4": _mxfp4,
}
