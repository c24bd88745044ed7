"""Norms of rows: one program a row, with a block and warps that depend on its width alone."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from quire.devices.cuda.launch import Launcher, launch
from quire.devices.cuda.tiles import Shape


@triton.jit
def root_mean_square(x, width, eps):
    return tl.sqrt_rn(tl.sum(x * x, 0) / width + eps)


@triton.jit
def norm(x, weight, bias, out, width, x_stride, out_stride, eps,
         LAYER: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """The norm of one group of a row."""
    row, group, d = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, BLOCK)
    inside, column = d < width, group * width + d
    v = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    if LAYER:
        v = tl.where(inside, v - tl.sum(v, 0) / width, 0.0)
    y = tl.div_rn(v, root_mean_square(v, width, eps)) * tl.load(weight + column, mask=inside, other=0.0)
    if bias is not None:
        y += tl.load(bias + column, mask=inside, other=0.0)
    tl.store(out + row * out_stride + column, y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def matched(x, like, out, width, floor, x_stride, BLOCK: tl.constexpr):
    """One part of a row, scaled to the root mean square of another row."""
    row, part, d = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, BLOCK)
    inside, place = d < width, row * x_stride + part * width + d
    v = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    wanted = tl.load(like + row * width + d, mask=inside, other=0.0).to(tl.float32)
    found = tl.sqrt_rn(tl.maximum(tl.sum(v * v, 0) / width, floor))
    y = v * tl.div_rn(root_mean_square(wanted, width, 0.0), found)
    tl.store(out + place, y.to(out.dtype.element_ty), mask=inside)


def shape_of(width: int) -> Shape:
    return Shape(4 if width <= 4096 else 8, 1)


def normalize(
    run: Launcher,
    x: Any,
    out: Any,
    weight: Any,
    eps: float,
    bias: Any = None,
    kind: str = "rms",
    groups: int = 1,
) -> None:
    """Normalize x [T, D], groups of a row by themselves."""
    width = x.shape[1] // groups
    launch(
        run, norm, (x.shape[0], groups, 1), x, weight, bias, out, width, x.stride(0), out.stride(0), eps,
        LAYER=kind == "layer", BLOCK=triton.next_power_of_2(width), shape=shape_of(width),
    )  # fmt: skip


def match_rms(run: Launcher, x: Any, like: Any, out: Any, floor: float) -> None:
    """Scale each part of a row [T, A D] to the root mean square of `like` [T, D]."""
    width = like.shape[1]
    grid, block = (x.shape[0], x.shape[1] // width, 1), triton.next_power_of_2(width)
    launch(run, matched, grid, x, like, out, width, floor, x.stride(0), BLOCK=block, shape=shape_of(width))
