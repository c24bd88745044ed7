"""Products with weights of 8 and 4 bits, over float activations or over ones rounded to int8.

Codes are turned into numbers in registers, exactly. One scale for a row multiplies its sum; scales of groups multiply
the sum of each group, which is one tile of K. int8 times int8 is summed in integers, exactly in any order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from quire.devices.cuda.kernels.norm import rounded_row, shape_of
from quire.devices.cuda.kernels.products import closed
from quire.devices.cuda.launch import Launcher, launch
from quire.devices.cuda.tiles import NIBBLES, WIDE, ProductTiles


@triton.jit
def numbers(codes, zeros, start, n, rows, scale_stride, BITS: tl.constexpr, GROUP: tl.constexpr,
            INTEGER: tl.constexpr, FLOAT: tl.constexpr):  # fmt: skip
    """A tile of weights [rows, K] from its codes: two in a byte, the low half first, if BITS is 4."""
    if BITS == 4:
        w = tl.interleave(codes & 15, codes >> 4).to(tl.int8)
        if zeros is None:
            w -= 8
        else:
            w -= tl.load(zeros + n * scale_stride + start // GROUP, mask=n < rows, other=0).to(tl.int8)[
                :, None
            ]
    else:
        w = codes
    if not INTEGER:
        w = w.to(FLOAT)
    return w


@triton.jit(do_not_specialize=["tokens"])
def packed_product(
    x, x_scales, codes, scales, zeros, bias, residual, out, tokens, rows, columns, x_stride, code_stride, scale_stride,
    out_stride,
    ACTIVATION: tl.constexpr, GATED: tl.constexpr, LIMIT: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr,
    INTEGER: tl.constexpr, WHOLE: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    t = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    k, byte = tl.arange(0, COLUMNS), tl.arange(0, COLUMNS * BITS // 8)
    of_codes = codes + tl.minimum(n, rows - 1).to(tl.int64)[:, None] * code_stride + byte[None, :]
    of_x = x + tl.minimum(t, tokens - 1).to(tl.int64)[None, :] * x_stride + k[:, None]
    kind: tl.constexpr = tl.int32 if INTEGER else tl.float32
    total = tl.zeros([ROWS, TOKENS], tl.float32 if GROUP > 0 else kind)
    for start in range(0, columns, COLUMNS):
        w = tl.load(of_codes + start * BITS // 8)
        known = start + k[:, None] < columns
        seen = tl.load(of_x + start) if WHOLE else tl.load(of_x + start, mask=known, other=0)
        w = numbers(w, zeros, start, n, rows, scale_stride, BITS, GROUP, INTEGER, seen.dtype)
        if GROUP > 0:
            scale = tl.load(scales + n * scale_stride + start // GROUP, mask=n < rows, other=0.0)
            part = tl.dot(w, seen, out_dtype=kind, input_precision="ieee")
            total += part.to(tl.float32) * scale[:, None]
        else:
            total = tl.dot(w, seen, total, out_dtype=kind, input_precision="ieee")
    total = total.to(tl.float32)
    if GROUP == 0:
        total *= tl.load(scales + n, mask=n < rows, other=0.0)[:, None]
    if INTEGER:
        total *= tl.load(x_scales + t, mask=t < tokens, other=0.0)[None, :]
    closed(total, bias, residual, out, 0, t, tokens, rows, out_stride, ACTIVATION, GATED, LIMIT)


@triton.jit
def round_row(x, codes, scales, width, x_stride, code_stride, BLOCK: tl.constexpr):
    """A row as integers from -127 to 127 times its own scale."""
    row, d = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    v = tl.load(x + row * x_stride + d, mask=d < width, other=0.0).to(tl.float32)
    rounded_row(v, d < width, codes, scales, row, d, code_stride)


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


PADDED = 128  # columns; a multiple of every tile's


def round_rows(run: Launcher, x: Any, codes: Any, scales: Any) -> None:
    """Round rows [T, K] to int8 codes [T, K], times a scale each [T] float32."""
    width = x.shape[1]
    launch(
        run, round_row, (x.shape[0], 1, 1), x, codes, scales, width, x.stride(0), codes.stride(0),
        BLOCK=triton.next_power_of_2(width), shape=shape_of(width),
    )  # fmt: skip


def packed_tiles(run: Launcher, weight: PackedWeight) -> ProductTiles:
    return (NIBBLES if weight.bits == 4 else WIDE)[run.target.family]


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
) -> None:
    """products.linear, or products.gated, with a packed weight; x is float [T, K], or int8 with x_scales [T]."""
    (tokens, columns), rows = x.shape, weight.codes.shape[0]
    tiles = packed_tiles(run, weight)
    tile = tiles.of(tokens)
    width, grid = (
        weight.group or tiles.columns,
        (triton.cdiv(rows, tile.rows), triton.cdiv(tokens, tile.tokens), 1),
    )
    launch(
        run, packed_product, grid, x, x_scales, weight.codes, weight.scales, weight.zeros, bias, residual, out, tokens,
        rows, columns, x.stride(0), weight.codes.stride(0), weight.scales.stride(0), out.stride(0),
        ACTIVATION=activation or "", GATED=is_gated, LIMIT=limit, BITS=weight.bits, GROUP=weight.group,
        INTEGER=x_scales is not None, WHOLE=columns % width == 0, ROWS=tile.rows, TOKENS=tile.tokens, COLUMNS=width,
        shape=tile.shape,
    )  # fmt: skip
