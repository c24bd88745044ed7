"""The types that tensors of a GGUF file have: code, name, size of a block. Knows no file and decodes nothing."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Kind:
    """`block` elements of a row are kept in `nbytes` bytes."""

    code: int
    name: str
    block: int
    nbytes: int


_ALL = (
    Kind(0, "F32", 1, 4),
    Kind(1, "F16", 1, 2),
    Kind(2, "Q4_0", 32, 18),
    Kind(3, "Q4_1", 32, 20),
    Kind(6, "Q5_0", 32, 22),
    Kind(7, "Q5_1", 32, 24),
    Kind(8, "Q8_0", 32, 34),
    Kind(10, "Q2_K", 256, 84),
    Kind(11, "Q3_K", 256, 110),
    Kind(12, "Q4_K", 256, 144),
    Kind(13, "Q5_K", 256, 176),
    Kind(14, "Q6_K", 256, 210),
    Kind(20, "IQ4_NL", 32, 18),
    Kind(23, "IQ4_XS", 256, 136),
    Kind(30, "BF16", 1, 2),
    Kind(39, "MXFP4", 32, 17),
)
KINDS = {kind.code: kind for kind in _ALL}
