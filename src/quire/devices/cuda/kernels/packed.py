"""Products with weights of 8 and 4 bits, over float activations or over ones rounded to int8.

Codes are turned into numbers in registers, exactly. One scale for a row multiplies its sum; scales of groups multiply
the sum of each group, which is one tile of K. int8 times int8 is summed in integers, exactly in any order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from quire.devices.cuda.kernels.norm import rounded_row, shape_of
from quire.devices.cuda.kernels.products import product, product_grid
from quire.devices.cuda.language import tl, triton
from quire.devices.cuda.launch import Launcher, launch
from quire.devices.cuda.tiles import NIBBLES, WIDE, ProductTiles


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
class PackedWeight:
    """A weight [O, K]: codes int8 or FP8 [O, K], or uint8 [O, K / 2] of two codes each, K padded to whole tiles.

    scales float32 [O, groups]: `group` columns share one, or all (0). zeros uint8 [O, groups] for 4 bits; None: 8.
    """

    codes: Any
    scales: Any
    columns: int
    group: int = 0
    zeros: Any = None

    @property
    def bits(self) -> int:
        return 4 if self.codes.dtype == torch.uint8 else 8

    @classmethod
    def pack(cls, codes: Any, scales: Any, group: int = 0, zeros: Any = None, bits: int = 8) -> PackedWeight:
        """Pack codes [O, K]: int8 or FP8, or uint8 from 0 to 15 for 4 bits."""
        columns = codes.shape[1]
        whole = torch.nn.functional.pad(codes.view(torch.uint8), (0, -columns % PADDED))
        packed = whole[:, ::2] | (whole[:, 1::2] << 4) if bits == 4 else whole.view(codes.dtype)
        return cls(packed.contiguous(), scales.float().contiguous(), columns, group, zeros)

    @classmethod
    def outline(cls, rows: int, columns: int, dtype: Any, group: int, plain: bool) -> PackedWeight:
        """Make one of a form without values."""
        whole, groups = columns + -columns % PADDED, -(-columns // group) if group else 1

        def empty(width: int, dtype: Any) -> Any:
            return torch.empty(rows, width, dtype=dtype, device="meta")

        codes = empty(whole // 2 if dtype == torch.uint8 else whole, dtype)
        return cls(
            codes, empty(groups, torch.float32), columns, group, None if plain else empty(groups, torch.uint8)
        )

    @property
    def form(self) -> tuple[Any, int, bool]:
        """The type of its codes, the columns of a group, and whether it has no zero points."""
        return self.codes.dtype, self.group, self.zeros is None


def joined(weights: Sequence[PackedWeight]) -> PackedWeight:
    """The rows of weights of one form, one after another."""
    first = weights[0]
    zeros = None if first.zeros is None else torch.cat([weight.zeros for weight in weights])
    codes, scales = (torch.cat([getattr(w, name) for w in weights]) for name in ("codes", "scales"))
    return PackedWeight(codes, scales, first.columns, first.group, zeros)


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


def packed_tiles(run: Launcher, bits: int) -> ProductTiles:
    return (NIBBLES if bits == 4 else WIDE)[run.target.family]


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
    columns, rows = weight.columns, weight.codes.shape[0] // heads
    tiles = packed_tiles(run, weight.bits)
    tile, width = tiles.of(x.shape[0]), weight.group or tiles.columns
    launch(
        run, product, product_grid(x, rows, tile, heads), x, x_scales, weight.codes, weight.scales, weight.zeros, bias,
        residual, out, x.shape[0], rows, columns, x.stride(0), weight.codes.stride(0), weight.scales.stride(0),
        out.stride(0), ACTIVATION=activation or "", GATED=is_gated, LIMIT=limit, BITS=weight.bits, GROUP=weight.group,
        INTEGER=x_scales is not None, WHOLE=columns % width == 0, ROWS=tile.rows, TOKENS=tile.tokens, COLUMNS=width,
        shape=tile.shape,
    )  # fmt: skip
