"""Norms of rows: one program a row, with a block and warps that depend on its width alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from quire.devices.cuda.kernels.ranks import Parts, of_all
from quire.devices.cuda.language import tl, triton
from quire.devices.cuda.launch import Launcher, launch
from quire.devices.cuda.tiles import Shape


@triton.jit
def root_mean_square(x, width, eps):
    return tl.sqrt_rn(tl.sum(x * x, 0) / width + eps)


@triton.jit
def normed(v, inside, weight, bias, column, width, eps, LAYER: tl.constexpr):
    if LAYER:
        v = tl.where(inside, v - tl.sum(v, 0) / width, 0.0)
    y = tl.div_rn(v, root_mean_square(v, width, eps)) * tl.load(weight + column, mask=inside, other=0.0)
    if bias is not None:
        y += tl.load(bias + column, mask=inside, other=0.0)
    return y


@triton.jit
def rounded_row(v, inside, codes, scales, row, d, code_stride):
    """Store a row as integers from -127 to 127 times its own scale."""
    most = tl.max(tl.abs(v), 0)
    inverse = tl.where(most >= 1e-30, tl.div_rn(127.0, tl.maximum(most, 1e-30)), 0.0)
    whole = (v * inverse + 12582912.0) - 12582912.0  # to the nearest integer
    tl.store(codes + row * code_stride + d, whole.to(tl.int8), mask=inside)
    tl.store(scales + row, tl.div_rn(most, 127.0))


@triton.jit
def norm(x, first, first_bias, other, total, weight, bias, out, codes, scales, width, x_stride, out_stride,
         code_stride, factor, other_factor, first_eps, eps, parts, epochs, part_stride,
         FIRST_LAYER: tl.constexpr, LAYER: tl.constexpr, BLOCK: tl.constexpr,
         RANKS: tl.constexpr, NUMBER: tl.constexpr):  # fmt: skip
    """The norm of one group of a row. The other steps of `normalize`, where they are given, round as it says."""
    row, group, d = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, BLOCK)
    inside, column = d < width, group * width + d
    if parts is not None:
        v = of_all(parts, epochs, part_stride, row * x_stride + column, inside, RANKS, NUMBER)
        rounded = v.to(total.dtype.element_ty)
        if other is None:
            tl.store(total + row * x_stride + column, rounded, mask=inside)
        v = rounded.to(tl.float32)
    else:
        v = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    if first is not None:
        v = normed(v, inside, first, first_bias, column, width, first_eps, FIRST_LAYER)
        v = v.to(total.dtype.element_ty).to(tl.float32)
    if other is not None:
        added = tl.load(other + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
        rounded = (v * factor + added * other_factor).to(total.dtype.element_ty)
        tl.store(total + row * x_stride + column, rounded, mask=inside)
        v = rounded.to(tl.float32)
    if weight is not None:
        y = normed(v, inside, weight, bias, column, width, eps, LAYER).to(out.dtype.element_ty)
        tl.store(out + row * out_stride + column, y, mask=inside)
        v = y.to(tl.float32)
    if codes is not None:
        rounded_row(tl.where(inside, v, 0.0), inside, codes, scales, row, d, code_stride)


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


@dataclass(frozen=True, slots=True)
class NormTensors:
    """A norm's float32 weight [H] or [N, H], or [N H] for statistics over all heads, and its bias alike.

    `after_rope`: the norm of keys and queries follows their rotation.
    """

    kind: str
    weight: Any
    bias: Any
    eps: float
    after_rope: bool = False


@dataclass(frozen=True, slots=True)
class Sum:
    """x + `other`, each times its factor, stored in `total`; x is normed by `first` before. Tensors are like x.

    Without `other` it is the sum of parts that is stored.
    """

    other: Any
    factors: tuple[float, float]
    total: Any
    first: NormTensors | None = None


def normalize(
    run: Launcher, x: Any, out: Any, by: NormTensors | None, groups: int = 1, summed: Sum | None = None,
    codes: tuple[Any, Any] | None = None, parts: Parts | None = None,
) -> None:  # fmt: skip
    """Normalize x [T, D], groups of a row by themselves, or a sum with it; `by` is None: the sum alone.

    If `parts` are given, x is their sum. The result is rounded to `codes` too: int8 [T, D], and their scales [T]. Each
    step rounds as one alone would.
    """
    width, summed, by = x.shape[1] // groups, summed or Sum(None, (1.0, 1.0), None), by or NONE
    first, stride = summed.first or NONE, 0 if codes is None else codes[0].stride(0)
    parts = parts or Parts(None, 1)
    launch(
        run, norm, (x.shape[0], groups, 1), x, first.weight, first.bias, summed.other, summed.total, by.weight, by.bias,
        out, *(codes or (None, None)), width, x.stride(0), out.stride(0), stride, *summed.factors, first.eps, by.eps,
        parts.tensor, parts.epochs, parts.stride, RANKS=parts.ranks, NUMBER=parts.number,
        FIRST_LAYER=first.kind == "layer", LAYER=by.kind == "layer",
        BLOCK=triton.next_power_of_2(width), shape=shape_of(width),
    )  # fmt: skip


NONE = NormTensors("rms", None, None, 0.0)


def match_rms(run: Launcher, x: Any, like: Any, out: Any, floor: float) -> None:
    """Scale each part of a row [T, A D] to the root mean square of `like` [T, D]."""
    width = like.shape[1]
    grid, block = (x.shape[0], x.shape[1] // width, 1), triton.next_power_of_2(width)
    launch(run, matched, grid, x, like, out, width, floor, x.stride(0), BLOCK=block, shape=shape_of(width))
