"""Codes of 4 bits in the orders of single GPU kernels: Marlin (GPTQ and AWQ) and gemv_fast (AWQ, llm-awq).

Marlin (Frantar et al. 2024, arXiv:2408.11743): qweight or B [K / 16, 2 O] in tiles of 16 inputs and 64 outputs, scales
or s [G, O], no zero points. gemv_fast: qweight int16 [O / 4, K] in tiles of 4 outputs and 64 inputs, scales and
qzeros (scaled_zeros) [at least G, O]; a zero point is stored as -scale * zero.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from quire.weights.readers.fields import FLOATS, I16, I32, Fields, unpack
from quire.weights.readers.grouped import Groups, group_count, packed_groups
from quire.weights.readers.module import Packed
from quire.weights.tensor import Array, FloatArray

MARLIN_USED = ("qweight", "B", "scales", "s")
MARLIN_IGNORED = ("workspace", "g_idx", "qzeros")
HALF_BYTES = np.array([0, 4, 1, 5, 2, 6, 3, 7])  # of a word: the place of its e-th code
NARROW_SCALES = np.array([0, 1, 8, 9, 16, 17, 24, 25])  # columns of the scales of whole rows


def _marlin_places() -> Array:
    """The place of each code [16, 64] of a tile among its 1,024."""
    k, n = np.arange(16)[:, None], np.arange(64)[None]
    j, c = n // 16, n % 16
    word = 4 * (4 * (c % 8) + k % 8 // 2) + j
    places: Array = word * 8 + HALF_BYTES[4 * (c // 8) + k % 2 + 2 * (k // 8)]
    return places


def _fast_places() -> Array:
    """The place of each code [4, 64] of a tile among its 256."""
    n, k = np.arange(4)[:, None], np.arange(64)[None]
    column = 32 * (k // 32) + 8 * (k % 8 // 2) + k % 32 // 8 + 4 * (k % 2)
    places: Array = 64 * n + column
    return places


MARLIN_PLACES, FAST_PLACES = _marlin_places(), _fast_places()


def marlin_module(size: int, fields: Fields) -> Packed:
    """Raises ModelError, naming the tensor, for shapes that are no whole tiles."""
    codes, scales = ("B", "s") if "B" in fields else ("qweight", "scales")
    fields.check(codes, (I32,))
    fields.check(scales, FLOATS)
    if len(fields.shape(codes)) != 2 or len(fields.shape(scales)) != 2:
        raise fields.wrong(scales, "a matrix beside a matrix of codes")
    columns, rows = fields.shape(codes)[0] * 16, fields.shape(codes)[1] // 2
    if rows % 64 or fields.shape(codes)[1] % 2:
        raise fields.wrong(codes, "in tiles of 64 outputs")
    size = columns if size == -1 else size
    groups, found = fields.shape(scales)
    group_count(fields, scales, columns, size, groups)
    if found != rows:
        raise fields.wrong(scales, f"of {rows} outputs")
    read = partial(_marlin_groups, fields, codes, scales, size)
    return packed_groups((rows, columns), 4, size, True, None, read, scales=fields.dtype(scales))


def _marlin_groups(fields: Fields, codes: str, scales: str, size: int) -> Groups:
    words = fields.words(codes)
    tiles = unpack(words, 4, words.shape[1] * 8).reshape(len(words), -1, 1024)[:, :, MARLIN_PLACES]
    plain = tiles.transpose(1, 3, 0, 2)  # [O / 64, 64, K / 16, 16]
    plain = np.ascontiguousarray(plain.reshape(-1, len(words) * 16))
    return Groups(plain, _marlin_scales(fields.floats(scales)), 8, size)


def _marlin_scales(stored: FloatArray) -> FloatArray:
    """[G, O] -> [O, G] in the order of outputs."""
    if len(stored) > 1:
        return np.ascontiguousarray(
            stored.reshape(len(stored), -1, 8, 8).swapaxes(2, 3).reshape(stored.shape).T
        )
    places = (2 * np.arange(4)[:, None] + NARROW_SCALES).reshape(-1)
    plain = np.empty((stored.shape[1] // 32, 32), np.float32)
    plain[:, places] = stored.reshape(-1, 32)
    return plain.reshape(-1, 1)


def fast_module(size: int, fields: Fields) -> Packed:
    """gemv_fast. Raises ModelError, naming the tensor, for shapes that are no whole tiles."""
    zeros = "scaled_zeros" if "scaled_zeros" in fields else "qzeros"
    fields.check("qweight", (I16,))
    if len(fields.shape("qweight")) != 2 or fields.shape("qweight")[1] % 64:
        raise fields.wrong("qweight", "a matrix of tiles of 64 inputs")
    rows, columns = fields.shape("qweight")[0] * 4, fields.shape("qweight")[1]
    size = columns if size == -1 else size
    fields.check("scales", FLOATS)
    found = fields.shape("scales")
    if size < 1 or columns % size or len(found) != 2 or found[0] < columns // size or found[1] != rows:
        raise fields.wrong("scales", f"one for each group of {size} of {columns} columns, of {rows} outputs")
    fields.check(zeros, FLOATS, found)
    read = partial(_fast_groups, fields, zeros, size)
    return packed_groups((rows, columns), 4, size, False, None, read, offsets=True)


def _fast_groups(fields: Fields, zeros: str, size: int) -> Groups:
    held = fields.get("qweight")
    count, columns = held.shape
    nibbles = unpack(held, 4, columns * 4).reshape(count, -1, 256)[
        :, :, FAST_PLACES
    ]  # [O / 4, K / 64, 4, 64]
    codes = np.ascontiguousarray(nibbles.swapaxes(1, 2).reshape(count * 4, columns))
    scales, offsets = (
        np.ascontiguousarray(fields.floats(name)[: columns // size].T) for name in ("scales", zeros)
    )
    return Groups(codes, scales, 0, size, offsets=-offsets)
