"""blocks: rows of whole blocks, as llama.cpp's types define them. A block holds 32 or 256 columns with their scales."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from quire.weights.layouts.base import PlainLayout
from quire.weights.layouts.blocks.decode import DECODERS as PLAIN
from quire.weights.layouts.blocks.decode_grids import DECODERS as GRIDDED
from quire.weights.tensor import Bytes, FloatArray, QuantTensor, nothing

PIECE = 1 << 18  # elements decoded at a time, so that intermediate arrays stay in cache


@dataclass(frozen=True, slots=True)
class Kind:
    """`columns` neighbouring elements of a row take `nbytes` bytes."""

    columns: int
    nbytes: int


# The names are also those of csrc/linear/block_kinds.h.
KINDS: Mapping[str, Kind] = {
    "q4_0": Kind(32, 18),
    "q4_1": Kind(32, 20),
    "q5_0": Kind(32, 22),
    "q5_1": Kind(32, 24),
    "q8_0": Kind(32, 34),
    "q2_k": Kind(256, 84),
    "q3_k": Kind(256, 110),
    "q4_k": Kind(256, 144),
    "q5_k": Kind(256, 176),
    "q6_k": Kind(256, 210),
    "iq4_nl": Kind(32, 18),
    "iq4_xs": Kind(256, 136),
    "mxfp4": Kind(32, 17),
    "tq1_0": Kind(256, 54),
    "tq2_0": Kind(256, 66),
    "iq2_xxs": Kind(256, 66),
    "iq2_xs": Kind(256, 74),
    "iq2_s": Kind(256, 82),
    "iq3_xxs": Kind(256, 98),
    "iq3_s": Kind(256, 110),
    "iq1_s": Kind(256, 50),
    "iq1_m": Kind(256, 56),
}
DECODERS = {**PLAIN, **GRIDDED}


class Blocks(PlainLayout, frozen=True, tag="blocks"):
    """A row's codes are the bytes of its blocks; they hold the scales too, so `scales` is [O, 0].

    The parts of one weight may be of different kinds. Activations are rounded to int8 by blocks of as many columns,
    as llama.cpp does.
    """

    kind: str

    @property
    def name(self) -> str:
        return "blocks"

    @property
    def label(self) -> str:
        return self.kind.upper()

    @property
    def rounds(self) -> int:
        return KINDS[self.kind].columns

    def format(self) -> dict[str, Any]:
        """The kinds follow when the parts are known."""
        return {"layout": self.name}

    def columns(self, width: int) -> int:
        kind = KINDS[self.kind]
        return width // kind.nbytes * kind.columns

    def tensor(self, rows: Bytes) -> QuantTensor:
        """The weight whose rows are these bytes [O, bytes of a row]."""
        return QuantTensor(self, rows, np.empty((len(rows), 0), np.float32))

    def dequantize(self, tensor: QuantTensor) -> FloatArray:
        return decode(self.kind, tensor.codes).reshape(tensor.shape)

    def outline(self, rows: int, columns: int) -> QuantTensor:
        kind = KINDS[self.kind]
        codes = nothing(np.uint8, rows, columns // kind.columns * kind.nbytes)
        return QuantTensor(self, codes, nothing(np.float32, rows, 0))


def decode(kind: str, raw: Bytes) -> FloatArray:
    """All elements of whole blocks, in order: float32, rounded as llama.cpp's decoders round."""
    about = KINDS[kind]
    blocks = raw.reshape(-1, about.nbytes)
    out = np.empty((len(blocks), about.columns), np.float32)
    run, step = DECODERS[kind], PIECE // about.columns
    with np.errstate(invalid="ignore", over="ignore"):  # an infinite scale gives infinite values
        for start in range(0, len(blocks), step):
            out[start : start + step] = run(blocks[start : start + step])
    return out.reshape(-1)
