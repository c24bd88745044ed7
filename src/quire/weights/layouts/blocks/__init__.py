"""blocks: rows of whole blocks of 32 to 256 columns with their scales, as llama.cpp and other libraries define them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from quire.lazy import Lazy
from quire.weights.layouts.base import PlainLayout
from quire.weights.tensor import Bytes, FloatArray, QuantTensor, Sparse, nothing

if TYPE_CHECKING:
    from quire.weights.layouts.blocks import decoders, make
else:
    decoders, make = Lazy("quire.weights.layouts.blocks.decoders"), Lazy("quire.weights.layouts.blocks.make")

PIECE = 1 << 18  # elements decoded at a time, so that intermediate arrays stay in cache


@dataclass(frozen=True, slots=True)
class Kind:
    """`columns` neighbouring elements of a row take `nbytes` bytes; the row has `row` bytes before its blocks.

    Codes that stand for `floats` are not multiplied with activations in int8.
    """

    columns: int
    nbytes: int
    row: int = 0
    floats: bool = False


# KINDS has the same names as csrc/linear/blocks/kinds.h.
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
    "int8_32": Kind(32, 36),
    "int8_128": Kind(128, 132),
    "nvfp4": Kind(64, 36, row=4),
    "nvfp4_div": Kind(64, 36, row=4),
    "e4m3": Kind(32, 32, row=4, floats=True),
    "e4m3_32": Kind(32, 36, floats=True),
    "e4m3_128": Kind(128, 132, floats=True),
    "e5m2": Kind(32, 32, row=4, floats=True),
    "e5m2_32": Kind(32, 36, floats=True),
    "e5m2_128": Kind(128, 132, floats=True),
    "mxfp8": Kind(32, 33, floats=True),
    "nf4": Kind(64, 36, floats=True),
    "fp4": Kind(64, 36, floats=True),
    "lut3": Kind(32, 12, row=32, floats=True),
    "lut4": Kind(32, 16, row=64, floats=True),
    "affine4_32": Kind(32, 24, floats=True),
    "affine4_64": Kind(64, 40, floats=True),
    "affine8_32": Kind(32, 40, floats=True),
    "affine8_128": Kind(128, 136, floats=True),
}
ROUNDED = ("e4m3", "e5m2", "mxfp4", "nvfp4")  # to which floats are rounded
LABELS = {
    **dict.fromkeys(("int8_32", "int8_128"), "INT8 by group"),
    "nvfp4_div": "NVFP4",
    "e4m3": "FP8 E4M3",
    **dict.fromkeys(("e4m3_32", "e4m3_128"), "FP8 E4M3 by block"),
    "e5m2": "FP8 E5M2",
    **dict.fromkeys(("affine4_32", "affine4_64"), "UINT4 with zero points"),
    **dict.fromkeys(("affine8_32", "affine8_128"), "UINT8 with zero points"),
    **dict.fromkeys(("e5m2_32", "e5m2_128"), "FP8 E5M2 by block"),
}


class Blocks(PlainLayout, frozen=True, tag="blocks"):
    """A row's codes are its own bytes, then its blocks' bytes; they hold the scales too, so `scales` is [O, 0].

    The parts of one weight may be of different kinds. Activations are rounded to int8 by blocks of as many columns,
    as llama.cpp does. Tensors with `entries` have a sparse part of at most `entries` values per row on average.
    """

    kind: str
    entries: int = 0

    @property
    def name(self) -> str:
        return "blocks"

    @property
    def label(self) -> str:
        return LABELS.get(self.kind, self.kind.upper())

    @property
    def rounds(self) -> int:
        return KINDS[self.kind].columns

    @property
    def floats(self) -> bool:
        return KINDS[self.kind].floats

    def format(self) -> dict[str, Any]:
        """The kinds follow when the parts are known."""
        return {"layout": self.name, "inputs": self.inputs}

    def columns(self, width: int) -> int:
        kind = KINDS[self.kind]
        return (width - kind.row) // kind.nbytes * kind.columns

    def tensor(self, rows: Bytes) -> QuantTensor:
        """The weight whose rows are these bytes [O, bytes of a row]."""
        return QuantTensor(self, rows, np.empty((len(rows), 0), np.float32))

    def quantize(self, values: FloatArray) -> QuantTensor:
        """Floats rounded to one of the kinds ROUNDED. ValueError for others, and for rows that are not whole blocks."""
        if self.kind not in ROUNDED or values.shape[1] % KINDS[self.kind].columns:
            raise ValueError(f"rows of {values.shape[1]} floats are not rounded to {self.kind}")
        return self.tensor(make.rounded_rows(self.kind, values))

    def dequantize(self, tensor: QuantTensor) -> FloatArray:
        if self.kind not in decoders.SCALED:
            return decode(self.kind, tensor.codes).reshape(tensor.shape)
        values = _decode_rows(self.kind, tensor.codes, np.empty(tensor.shape, np.float32))
        if tensor.sparse is not None:
            tensor.sparse.add_to(values)
        return values

    def outline(self, rows: int, columns: int) -> QuantTensor:
        kind = KINDS[self.kind]
        codes = nothing(np.uint8, rows, kind.row + columns // kind.columns * kind.nbytes)
        return QuantTensor(self, codes, nothing(np.float32, rows, 0), sparse=self._sparse_outline(rows))

    def _sparse_outline(self, rows: int) -> Sparse | None:
        if not self.entries:
            return None
        starts = np.arange(rows + 1, dtype=np.int32) * np.int32(self.entries)
        return Sparse(starts, nothing(np.int32, int(starts[-1])), nothing(np.float32, int(starts[-1])))


def decode(kind: str, raw: Bytes) -> FloatArray:
    """All elements of whole blocks, in order: float32, rounded as llama.cpp's decoders round."""
    about = KINDS[kind]
    blocks = raw.reshape(-1, about.nbytes)
    out = np.empty((len(blocks), about.columns), np.float32)
    run, step = decoders.ALONE[kind], PIECE // about.columns
    with np.errstate(invalid="ignore", over="ignore"):  # an infinite scale gives infinite values
        for start in range(0, len(blocks), step):
            out[start : start + step] = run(blocks[start : start + step])
    return out.reshape(-1)


def _decode_rows(kind: str, raw: Bytes, out: FloatArray) -> FloatArray:
    about, step = KINDS[kind], max(1, PIECE // max(1, out.shape[1]))
    for start in range(0, len(raw), step):
        rows = raw[start : start + step]
        blocks = rows[:, about.row :].reshape(len(rows), -1, about.nbytes)
        with np.errstate(invalid="ignore", over="ignore"):
            out[start : start + step] = decoders.SCALED[kind](
                decoders.floats_of(rows[:, : about.row]), blocks
            )
    return out
