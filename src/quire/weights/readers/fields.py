"""Tensors of a quantized module, checked as they are read, and the bit streams that codes are packed in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from quire.errors import ModelError
from quire.weights.checkpoint.protocol import Checkpoint
from quire.weights.tensor import Array, FloatArray

FLOATS = tuple(np.dtype(kind) for kind in (np.float32, np.float16, ml_dtypes.bfloat16))
F32, _, BF16 = FLOATS
E4M3, E5M2 = np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.float8_e5m2)
E8M0 = np.dtype(ml_dtypes.float8_e8m0fnu)
U8, I8, I16, I32, I64 = (np.dtype(kind) for kind in (np.uint8, np.int8, np.int16, np.int32, np.int64))
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # AWQ's, of the columns in a word
PIECE = 1 << 20  # numbers unpacked at a time, so that memory stays small


@dataclass(frozen=True, slots=True)
class Fields:
    """The tensors MODULE.SUFFIX of one module. Raises ModelError, naming the tensor, if one is not as it must be."""

    checkpoint: Checkpoint
    module: str
    suffixes: frozenset[str]

    def __contains__(self, suffix: str) -> bool:
        return suffix in self.suffixes

    def name(self, suffix: str) -> str:
        return f"{self.module}.{suffix}"

    def wrong(self, suffix: str, must: str) -> ModelError:
        name = self.name(suffix)
        if suffix not in self:
            first = self.name(min(self.suffixes))
            return ModelError(f"{self.checkpoint.path(first)}: tensor {name} is missing; it must be {must}")
        found = f"{self.checkpoint.dtype(name)} {list(self.checkpoint.shape(name))}"
        return ModelError(f"{self.checkpoint.path(name)}: tensor {name} must be {must}, got {found}")

    def shape(self, suffix: str) -> tuple[int, ...]:
        if suffix not in self:
            raise self.wrong(suffix, "beside the module's others")
        return self.checkpoint.shape(self.name(suffix))

    def dtype(self, suffix: str) -> np.dtype[Any]:
        return self.checkpoint.dtype(self.name(suffix))

    def is_of(self, suffix: str, *dtypes: np.dtype[Any]) -> bool:
        return suffix in self and self.dtype(suffix) in dtypes

    def check(self, suffix: str, dtypes: tuple[np.dtype[Any], ...], *shapes: tuple[int, ...]) -> None:
        """Refuse a missing tensor, another type, and a shape that is not among those given, if any is."""
        if not self.is_of(suffix, *dtypes) or (shapes and self.shape(suffix) not in shapes):
            kinds = " or ".join(str(dtype) for dtype in dtypes)
            raise self.wrong(suffix, f"{kinds} {' or '.join(str(list(shape)) for shape in shapes)}".strip())

    def get(self, suffix: str) -> Array:
        if suffix not in self:
            raise self.wrong(suffix, "beside the module's others")
        return self.checkpoint.get(self.name(suffix))

    def floats(self, suffix: str) -> FloatArray:
        """Read scales as float32; powers of two stored as exponents are widened. Raises ModelError if not finite."""
        values = self.get(suffix)
        if values.dtype in (U8, E8M0):
            exponents = values.view(U8).astype(np.int32) - 127
            floats = np.where(exponents == 128, np.float32(np.nan), np.ldexp(np.float32(1), exponents))
        else:
            floats = values.astype(np.float32)
        if not np.isfinite(floats).all():
            raise self.wrong(suffix, "finite: it holds NaN or infinity")
        return floats.astype(np.float32)

    def words(self, suffix: str) -> Array:
        """Read words of 32 bits without sign."""
        words: Array = self.get(suffix).view(np.uint32)
        return words


def unpack(words: Array, bits: int, count: int) -> Array:
    """Unpack `count` numbers of `bits` bits from each row of words, one stream, low bits first: uint8 [R, count]."""
    if 8 % bits == 0:  # no number crosses a byte
        held = np.ascontiguousarray(words).view(np.uint8)[..., None]
        codes: Array = held >> np.arange(0, 8, bits, dtype=np.uint8) & np.uint8((1 << bits) - 1)
        return codes.reshape(*words.shape[:-1], -1)[..., :count]
    codes = np.empty((*words.shape[:-1], count), np.uint8)
    step = max(1, PIECE // max(1, count))
    for start in range(0, len(words), step):
        codes[start : start + step] = _unpack_across(words[start : start + step], bits, count)
    return codes


def _unpack_across(words: Array, bits: int, count: int) -> Array:
    """Unpack numbers that cross words."""
    first = np.arange(count, dtype=np.int64) * bits
    place, shift = first // 32, (first % 32).astype(np.uint64)
    padded = np.pad(words, [(0, 0)] * (words.ndim - 1) + [(0, 1)]).astype(np.uint64)
    pairs = padded[..., place] | padded[..., place + 1] << np.uint64(32)
    return (pairs >> shift & np.uint64((1 << bits) - 1)).astype(np.uint8)


def unpack_padded(words: Array, bits: int, count: int) -> Array:
    """Unpack numbers that never cross a word: each word holds 32 // bits of them."""
    shifts = np.arange(32 // bits, dtype=np.uint32) * np.uint32(bits)
    fields = words[..., None] >> shifts & np.uint32((1 << bits) - 1)
    codes: Array = fields.reshape(*words.shape[:-1], -1)[..., :count].astype(np.uint8)
    return codes


def eights(words: Array, order: tuple[int, ...] = ORDER) -> Array:
    """Unpack words [R, O / 8] of eight 4-bit codes to codes [O, R]; half byte p is column order[p] of its eight."""
    mixed = unpack(words, 4, words.shape[1] * 8).reshape(len(words), -1, 8)
    plain = np.empty_like(mixed)
    plain[:, :, order] = mixed
    return np.ascontiguousarray(plain.reshape(len(mixed), -1).T)


def num_words(count: int, bits: int) -> int:
    """Count the words that a stream of `count` numbers takes."""
    return -(-count * bits // 32)
