"""Products with weights of 8 and 4 bits, over float activations or over ones rounded to int8.

Codes are turned into numbers in registers, exactly. One scale for a row multiplies its sum; scales of groups multiply
the sum of each group, which is one tile of K. int8 times int8 is summed in integers, exactly in any order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from quire.devices.cuda.kernels.norm import rounded_row, shape_of
from quire.devices.cuda.kernels.products import product, product_grid
from quire.devices.cuda.language import tl, triton
from quire.devices.cuda.launch import Launcher, launch
from quire.devices.cuda.tiles import LISTED, NIBBLES, WIDE, ProductTiles


@triton.jit
def round_row(x, ids, sizes, weights, codes, scales, width, x_stride, code_stride, CHOSEN: tl.constexpr,
              BLOCK: tl.constexpr):  # fmt: skip
    """A row as integers from -127 to 127 times its own scale.

    With `weights` [T, CHOSEN] it is the row of a pair's token times the pair's weight; with `sizes` the row of a pair,
    as wide as its expert.
    """
    row, d = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    if sizes is not None:
        width = tl.load(sizes + tl.load(ids + row))
    v = tl.load(x + row // CHOSEN * x_stride + d, mask=d < width, other=0.0).to(tl.float32)
    if weights is not None:
        v *= tl.load(weights + row)
    rounded_row(v, d < width, codes, scales, row, d, code_stride)


PADDED = 128  # columns; a multiple of every tile's


@dataclass(frozen=True, slots=True)
class Form:
    """What kernels know of a packed weight: the type of its codes, and what turns them into values.

    `group` columns share a scale, or all (0). uint8 is two codes of four bits: less 8, less `zeros`, or twice E2M1
    numbers. With `offsets` values are scale * code - offset, and codes are what they are. With a `table` codes of four
    bits are places of numbers, of which each row has 16.
    """

    number: Any
    group: int = 0
    zeros: bool = False
    offsets: bool = False
    e2m1: bool = False
    table: bool = False

    @property
    def name(self) -> str:
        words = [word for word in ("zeros", "offsets", "e2m1", "table") if getattr(self, word)]
        return " ".join([str(self.number)[6:], str(self.group), *words])

    @property
    def bits(self) -> int:
        return 4 if self.number == torch.uint8 else 8

    @property
    def fine(self) -> int:
        """The columns of a group whose numbers are scaled one by one; 0: scales multiply sums."""
        return self.group if self.offsets or self.table or self.group % 32 else 0

    def tiles(self, run: Launcher) -> ProductTiles:
        small = NIBBLES if self.bits == 4 or self.fine else WIDE
        return (LISTED if self.table else small)[run.target.family]

    def columns(self, run: Launcher) -> int:
        """The columns of a tile, which is a group if scales multiply its sum."""
        return (0 if self.fine else self.group) or self.tiles(run).columns

    def constants(self, run: Launcher) -> dict[str, Any]:
        """Constants of products with such weights."""
        about = {
            "BITS": self.bits,
            "GROUP": 0 if self.fine else self.group,
            "FINE": self.fine,
            "E2M1": self.e2m1,
        }
        return {**about, "COLUMNS": self.columns(run)}

    def widened(self, codes: Any) -> Any:
        """Codes of four bits [O, K] as the whole numbers that scales multiply, int8."""
        if self.e2m1:
            return E2M1_TWICE.to(codes.device)[codes.long()]
        return codes.to(torch.int8) - (0 if self.offsets else 8)


E2M1_TWICE = torch.tensor([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], dtype=torch.int8)


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A weight [O, K]: codes int8 or FP8 [O, K], or uint8 [O, K / 2] of two codes each, K padded to whole tiles.

    scales and offsets float32, zeros uint8 [O, groups]; table float32 [O, 16].
    """

    form: Form
    columns: int
    codes: Any
    scales: Any
    zeros: Any = None
    offsets: Any = None
    table: Any = None

    @classmethod
    def pack(
        cls, form: Form, codes: Any, scales: Any, zeros: Any = None, offsets: Any = None, table: Any = None
    ) -> PackedWeight:
        """Pack codes [O, K]: int8 or FP8, or uint8 from 0 to 15 for four bits."""
        columns = codes.shape[1]
        whole = torch.nn.functional.pad(codes.view(torch.uint8), (0, -columns % PADDED))
        packed = whole[:, ::2] | (whole[:, 1::2] << 4) if form.bits == 4 else whole.view(codes.dtype)
        scales, offsets, table = (
            None if x is None else x.float().contiguous() for x in (scales, offsets, table)
        )
        return cls(form, columns, packed.contiguous(), scales, zeros, offsets, table)

    @classmethod
    def outline(cls, rows: int, columns: int, form: Form, device: Any = "meta") -> PackedWeight:
        """Make one of a form without values, or for them."""
        groups, empty = -(-columns // form.group) if form.group else 1, partial(torch.empty, device=device)
        codes: Any = empty(rows, (columns + -columns % PADDED) * form.bits // 8, dtype=form.number)
        return cls(
            form, columns, codes, empty(rows, groups), empty(rows, groups, dtype=torch.uint8) if form.zeros else None,
            empty(rows, groups) if form.offsets else None, empty(rows, 16) if form.table else None,
        )  # fmt: skip

    @property
    def tensors(self) -> tuple[Any, ...]:
        """Codes, scales, zeros, offsets and the table; None for those that it lacks."""
        return self.codes, self.scales, self.zeros, self.offsets, self.table

    def values(self) -> Any:
        """Float32 [O, K]."""
        codes: Any = self.codes
        if self.form.bits == 4:
            codes = torch.stack([codes & 15, codes >> 4], 2).flatten(1)
            if self.table is not None:
                codes = self.table.gather(1, codes.long())
            codes = codes.float() if self.form.zeros or self.form.table else self.form.widened(codes)
        group = self.form.group or self.columns
        wide = [
            None if x is None else x.repeat_interleave(group, 1)[:, : self.columns] for x in self.tensors[1:4]
        ]
        values = codes[:, : self.columns].float()
        values = (values if wide[1] is None else values - wide[1]) * wide[0]
        return values if wide[2] is None else values - wide[2]


def joined(weights: Sequence[PackedWeight]) -> PackedWeight:
    """The rows of weights of one form, one after another."""
    sides = zip(*(weight.tensors for weight in weights), strict=True)
    first = weights[0]
    return PackedWeight(
        first.form, first.columns, *(None if side[0] is None else torch.cat(side) for side in sides)
    )


def round_rows(
    run: Launcher, x: Any, codes: Any, scales: Any, ids: Any = None, sizes: Any = None, weights: Any = None
) -> None:
    """Round rows [T, K] to int8 codes [T, K], times a scale each [T] float32.

    With `weights` [T, C] these are the rows of pairs [T C, K], each times its weight; with `ids` [T, C] x has a row for
    each pair, as wide as `sizes` says of its expert.
    """
    rows, width = codes.shape
    launch(
        run, round_row, (rows, 1, 1), x, ids, sizes, weights, codes, scales, width, x.stride(0), codes.stride(0),
        CHOSEN=1 if weights is None else weights.shape[1], BLOCK=triton.next_power_of_2(width), shape=shape_of(width),
    )  # fmt: skip


def linear(
    run: Launcher,
    x: Any,
    weight: PackedWeight,
    out: Any,
    bias: Any = None,
    activation: str | None = None,
    residual: Any = None,
    x_scales: Any = None,
    limit: float = 0.0,
    is_gated: bool = False,
    heads: int = 1,
) -> None:
    """products.linear, products.gated or products.heads with a packed weight.

    x is float [T, N K], or int8 with x_scales [T, N] for N heads, whose rows follow one another in the weight.
    """
    columns, rows, form = weight.columns, weight.codes.shape[0] // heads, weight.form
    tile, width = form.tiles(run).of(x.shape[0]), form.columns(run)
    launch(
        run, product, product_grid(x, rows, tile, heads), x, x_scales, *weight.tensors, bias, residual, out, x.shape[0],
        rows, columns, x.stride(0), rows * weight.codes.stride(0), weight.codes.stride(0), weight.scales.stride(0),
        out.stride(0), ACTIVATION=activation or "", GATED=is_gated, LIMIT=limit, **form.constants(run),
        INTEGER=x_scales is not None, WHOLE=columns % width == 0, ROWS=tile.rows, TOKENS=tile.tokens, shape=tile.shape,
    )  # fmt: skip
