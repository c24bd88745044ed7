"""Blocks whose codes are indices into grids, and ternary blocks, to float32 in numpy. As decode.py.

The grids are in grids.bin, 16 bits for each entry: the places of its eight values in a list of three, or of its four
values in a list of eight. csrc/linear/blocks/grids.cpp is compiled from the same file.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from quire.weights.layouts.blocks.fields import Decoder, Floats, by_group, crumbs, half
from quire.weights.tensor import Bytes

Words = NDArray[np.uint32]

GRIDS = Path(__file__).with_name("grids.bin")
STEPS_2 = (8, 25, 43)
STEPS_3_XXS, STEPS_3_S = (4, 12, 20, 28, 36, 44, 52, 62), (1, 3, 5, 7, 9, 11, 13, 15)
# (entries, bits of a place, values), in the order of the file.
_SHAPES = {
    "iq1": (2048, 2, (-1, 0, 1)),
    "iq2_xxs": (256, 2, STEPS_2),
    "iq2_xs": (512, 2, STEPS_2),
    "iq2_s": (1024, 2, STEPS_2),
    "iq3_xxs": (256, 3, STEPS_3_XXS),
    "iq3_s": (512, 3, STEPS_3_S),
}


@cache
def _grids() -> dict[str, Floats]:
    packed, grids = np.fromfile(GRIDS, "<u2"), {}
    for name, (entries, bits, values) in _SHAPES.items():
        shifts = np.arange(0, 16 if bits == 2 else 12, bits, dtype=np.uint16)
        places = (packed[:entries, None] >> shifts) & np.uint16((1 << bits) - 1)
        grids[name] = np.array([*values, *[0] * (8 - len(values))], np.float32)[places]
        packed = packed[entries:]
    return grids


def _words(blocks: Bytes, start: int, stop: int, dtype: str) -> Words:
    """Little-endian integers of bytes start..stop-1 of each block, as uint32 [B, n]."""
    return np.ascontiguousarray(blocks[:, start:stop]).view(dtype).astype(np.uint32)


def _shifted(words: Words, shifts: range, mask: int) -> Words:
    """[B, n] -> [B, n * len(shifts)]: fields of each word, one after the other."""
    parts = (words[:, :, None] >> np.array(shifts, np.uint32)) & np.uint32(mask)
    return parts.reshape(len(words), -1)


def _signs(bits: Words) -> Floats:
    """Bytes [B, n] -> 1 or -1 [B, 8 n], from the lowest bit on."""
    return np.float32(1) - np.float32(2) * _shifted(bits, range(8), 1).astype(np.float32)


def _eighth(seven: Words) -> Words:
    """Eight sign bits of seven: the last makes their number even."""
    folded: Words = seven ^ (seven >> np.uint32(4))
    folded ^= folded >> np.uint32(2)
    folded ^= folded >> np.uint32(1)
    return seven | ((folded & np.uint32(1)) << np.uint32(7))


def _grid(name: str, indices: Words) -> Floats:
    return _grids()[name][indices].reshape(len(indices), -1)


def iq2_xxs(blocks: Bytes) -> Floats:
    """d, then eight times four indices of a byte and a word of four times seven signs and four bits of scale."""
    indices = _words(blocks, 2, 66, "u1").reshape(len(blocks), 8, 8)[:, :, :4].reshape(len(blocks), -1)
    rest = _words(blocks, 2, 66, "<u4")[:, 1::2]
    signs = _signs(_eighth(_shifted(rest, range(0, 28, 7), 127)))
    scales = (
        half(blocks, 0) * np.float32(0.25) * ((rest >> np.uint32(28)).astype(np.float32) + np.float32(0.5))
    )
    return by_group(scales, _grid("iq2_xxs", indices) * signs)


def _half_scales(blocks: Bytes, start: int) -> Floats:
    scales = _shifted(_words(blocks, start, start + 8, "u1"), range(0, 8, 4), 15).astype(np.float32)
    return half(blocks, 0) * np.float32(0.25) * (scales + np.float32(0.5))


def iq2_xs(blocks: Bytes) -> Floats:
    """d, 32 words of nine bits of index and seven signs, scales[8] of two half bytes."""
    entries = _words(blocks, 2, 66, "<u2")
    signs = _signs(_eighth(entries >> np.uint32(9)))
    return by_group(_half_scales(blocks, 66), _grid("iq2_xs", entries & np.uint32(511)) * signs)


def iq2_s(blocks: Bytes) -> Floats:
    """d, indices[32], signs[32], two more bits of each index in 8 bytes, scales[8] of two half bytes."""
    high = _shifted(_words(blocks, 66, 74, "u1"), range(0, 8, 2), 3) << np.uint32(8)
    signs = _signs(_words(blocks, 34, 66, "u1"))
    return by_group(_half_scales(blocks, 74), _grid("iq2_s", _words(blocks, 2, 34, "u1") | high) * signs)


def iq3_xxs(blocks: Bytes) -> Floats:
    """d, indices[64], eight words of four times seven signs and four bits of scale."""
    rest = _words(blocks, 66, 98, "<u4")
    signs = _signs(_eighth(_shifted(rest, range(0, 28, 7), 127)))
    scales = (
        half(blocks, 0) * np.float32(0.5) * ((rest >> np.uint32(28)).astype(np.float32) + np.float32(0.5))
    )
    return by_group(scales, _grid("iq3_xxs", _words(blocks, 2, 66, "u1")) * signs)


def iq3_s(blocks: Bytes) -> Floats:
    """d, indices[64], a ninth bit of each in 8 bytes, signs[32], scales[4] of two half bytes."""
    high = _shifted(_words(blocks, 66, 74, "u1"), range(8), 1) << np.uint32(8)
    signs = _signs(_words(blocks, 74, 106, "u1"))
    scales = _shifted(_words(blocks, 106, 110, "u1"), range(0, 8, 4), 15).astype(np.float32)
    scales = half(blocks, 0) * (scales * np.float32(2) + np.float32(1))
    return by_group(scales, _grid("iq3_s", _words(blocks, 2, 66, "u1") | high) * signs)


def _with_delta(name: str, indices: Words, minus: Floats) -> Floats:
    """Values of the grid and an eighth more, or less where `minus` [B, n] is 1; n divides the indices evenly."""
    values = _grid(name, indices).reshape(*minus.shape, -1)
    delta = np.float32(0.125) - np.float32(0.25) * minus
    return (values + delta[..., None]).reshape(len(indices), -1)


def iq1_s(blocks: Bytes) -> Floats:
    """d, indices[32], eight fields of 16 bits: three more bits of four indices, a scale, the delta's sign."""
    high = _words(blocks, 34, 50, "<u2")
    indices = _words(blocks, 2, 34, "u1") | (_shifted(high, range(0, 12, 3), 7) << np.uint32(8))
    scales = half(blocks, 0) * (
        ((high >> np.uint32(12)) & np.uint32(7)) * np.uint32(2) + np.uint32(1)
    ).astype(np.float32)
    return by_group(scales, _with_delta("iq1", indices, (high >> np.uint32(15)).astype(np.float32)))


def iq1_m(blocks: Bytes) -> Floats:
    """indices[32], 32 half bytes (three more bits of index, the delta's sign), four fields of scales and parts of d."""
    fields = _words(blocks, 48, 56, "<u2")
    d = np.zeros(len(blocks), np.uint16)
    for i in range(4):
        d |= ((fields[:, i] >> np.uint32(12)) << np.uint32(4 * i)).astype(np.uint16)
    high = _shifted(_words(blocks, 32, 48, "u1"), range(0, 8, 4), 15)
    indices = _words(blocks, 0, 32, "u1") | ((high & np.uint32(7)) << np.uint32(8))
    scales = (_shifted(fields, range(0, 12, 3), 7) * np.uint32(2) + np.uint32(1)).astype(np.float32)
    scales = d.view(np.float16).astype(np.float32)[:, None] * scales
    return by_group(scales, _with_delta("iq1", indices, (high >> np.uint32(3)).astype(np.float32)))


def tq2_0(blocks: Bytes) -> Floats:
    """codes of two bits[64], d."""
    return half(blocks, 64) * (crumbs(blocks[:, :64]).astype(np.float32) - np.float32(1))


def tq1_0(blocks: Bytes) -> Floats:
    """48 bytes of five ternary digits, four bytes of four, d. A byte is a fraction of 256."""
    runs = []
    for start, stop, digits in ((0, 32, 5), (32, 48, 5), (48, 52, 4)):
        powers = np.array([1, 3, 9, 27, 81][:digits], np.uint8)
        rest = blocks[:, None, start:stop] * powers[:, None]
        runs.append(((rest.astype(np.uint16) * np.uint16(3)) >> np.uint16(8)).reshape(len(blocks), -1))
    return half(blocks, 52) * (np.hstack(runs).astype(np.float32) - np.float32(1))


DECODERS: Mapping[str, Decoder] = {
    "tq1_0": tq1_0,
    "tq2_0": tq2_0,
    "iq2_xxs": iq2_xxs,
    "iq2_xs": iq2_xs,
    "iq2_s": iq2_s,
    "iq3_xxs": iq3_xxs,
    "iq3_s": iq3_s,
    "iq1_s": iq1_s,
    "iq1_m": iq1_m,
}
