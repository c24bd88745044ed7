"""Operations of elements and of parts of rows: one program for a piece of a row."""

from __future__ import annotations

from typing import Any

from quire.devices.cuda.kernels.math import activate, exp, sigmoid, tanh
from quire.devices.cuda.kernels.norm import shape_of
from quire.devices.cuda.language import tl, triton
from quire.devices.cuda.launch import Launch, Launcher, launch
from quire.devices.cuda.tiles import Shape
from quire.devices.elementwise import GELU, XIELU, Clamp, ColumnScale, Elementwise, SparseGELU, Temperature
from quire.devices.sparse_ops import PositionScale
from quire.devices.stream_ops import StreamGates
from quire.errors import EngineError

BLOCK = 1024


@triton.jit
def piece(x, stride, width, BLOCK: tl.constexpr):
    """This program's piece of a row, its columns, and which of them there are."""
    row, d = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    return tl.load(x + row * stride + d, mask=d < width, other=0.0).to(tl.float32), d, d < width


@triton.jit
def put(out, y, stride, d, inside):
    row = out + tl.program_id(0).to(tl.int64) * stride
    tl.store(row + d, y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def added(x, other, out, width, stride, other_stride, out_stride, scale, BLOCK: tl.constexpr):
    v, d, inside = piece(x, stride, width, BLOCK)
    put(out, v + scale * piece(other, other_stride, width, BLOCK)[0], out_stride, d, inside)


@triton.jit
def scaled(x, out, width, stride, out_stride, scale, cap, CAPPED: tl.constexpr, BLOCK: tl.constexpr):
    v, d, inside = piece(x, stride, width, BLOCK)
    y = v * scale
    if CAPPED:
        y = cap * tanh(y / cap)
    put(out, y, out_stride, d, inside)


@triton.jit
def multiplied(
    x, factors, out, width, stride, factor_stride, out_stride, SIZE: tl.constexpr, BLOCK: tl.constexpr
):
    v, d, inside = piece(x, stride, width, BLOCK)
    row = factors + tl.program_id(0).to(tl.int64) * factor_stride
    put(out, v * tl.load(row + d // SIZE, mask=inside, other=0.0).to(tl.float32), out_stride, d, inside)


@triton.jit
def applied(x, out, positions, factors, width, stride, out_stride, a, b, c, e, KIND: tl.constexpr,
            BLOCK: tl.constexpr):  # fmt: skip
    v, d, inside = piece(x, stride, width, BLOCK)
    if KIND == "Clamp":
        y = tl.minimum(tl.maximum(v, -a), a)
    elif KIND == "Temperature":
        step = (tl.load(positions + tl.program_id(0)) + c) // b
        y = v * (1.0 + a * tl.log(1.0 + step.to(tl.float32)))
    elif KIND == "XIELU":
        low = tl.minimum(v, e)
        # e^x - 1 by its series where the difference would lose digits
        near = low * (1.0 + low * (0.5 + low * (0.16666667 + low * 0.041666668)))
        grown = tl.where(tl.abs(low) < 0.05, near, exp(low) - 1.0)
        y = tl.where(v > 0, a * v * v, b * (grown - v)) + c * v
    elif KIND == "GELU":
        y = activate(v, "gelu")
    elif KIND == "PositionScale":  # b columns of each of c parts
        step = tl.log(1.0 + tl.load(positions + tl.program_id(0)).to(tl.float32))
        growth = tl.load(factors + d // b, mask=inside, other=0.0)
        y = v * (growth * step + tl.load(factors + c + d // b, mask=inside, other=0.0))
    else:
        y = v * tl.load(factors + d, mask=inside, other=0.0)
    put(out, y, out_stride, d, inside)


@triton.jit
def sparse_gelu(x, out, width, stride, out_stride, cutoff, BLOCK: tl.constexpr):
    v, d, inside = piece(x, stride, width, BLOCK)
    apart = tl.where(inside, v - tl.sum(v, 0) / width, 0.0)
    deviation = tl.sqrt_rn(tl.sum(apart * apart, 0) / width)
    put(out, activate(tl.maximum(apart - cutoff * deviation, 0.0), "gelu_tanh"), out_stride, d, inside)


@triton.jit
def stream_gates(x, numbers, out, width, stride, out_stride, eps, magnitude, floor, N: tl.constexpr,
                 PARTS: tl.constexpr, ITERATIONS: tl.constexpr, SIZE: tl.constexpr):  # fmt: skip
    """The gates of a row times the first `width` numbers plus the others; of 3 PARTS the last is a matrix."""
    x += tl.program_id(0).to(tl.int64) * stride
    out += tl.program_id(0).to(tl.int64) * out_stride
    i = tl.arange(0, SIZE)
    for part in tl.static_range(2 if PARTS > 1 else 1):
        at, inside = part * N + i, i < N
        v = tl.load(x + at, mask=inside, other=0.0).to(tl.float32) * tl.load(
            numbers + at, mask=inside, other=0.0
        )
        y = sigmoid(v + tl.load(numbers + width + at, mask=inside, other=0.0))
        tl.store(
            out + at, (y + eps if part == 0 else magnitude * y + floor).to(out.dtype.element_ty), mask=inside
        )
    if PARTS > 2:
        inside = (i < N)[:, None] & (i < N)[None, :]
        at = 2 * N + i[:, None] * N + i[None, :]
        v = tl.load(x + at, mask=inside, other=0.0).to(tl.float32) * tl.load(
            numbers + at, mask=inside, other=0.0
        )
        v = tl.where(inside, v + tl.load(numbers + width + at, mask=inside, other=0.0), -1e30)
        shares = tl.where(inside, exp(v - tl.max(v, 1)[:, None]), 0.0)
        mixed = tl.where(inside, shares / tl.maximum(tl.sum(shares, 1), 1e-30)[:, None] + eps, 0.0)
        mixed = mixed / (tl.sum(mixed, 0) + tl.where(i < N, eps, 1.0))[None, :]
        for _ in range(ITERATIONS - 1):
            mixed = mixed / (tl.sum(mixed, 1) + tl.where(i < N, eps, 1.0))[:, None]
            mixed = mixed / (tl.sum(mixed, 0) + tl.where(i < N, eps, 1.0))[None, :]
        tl.store(out + 2 * N + i[None, :] * N + i[:, None], mixed.to(out.dtype.element_ty), mask=inside)


@triton.jit
def compared(x, other, out, width, stride, other_stride, out_stride, scale, floor, BLOCK: tl.constexpr):
    """How well one part of a row agrees with that of another row."""
    row, part, d = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, BLOCK)
    at, inside = part * width + d, d < width
    v = tl.load(x + row * stride + at, mask=inside, other=0.0).to(tl.float32)
    z = tl.sum(v * tl.load(other + row * other_stride + at, mask=inside, other=0.0).to(tl.float32), 0) * scale
    root = tl.sqrt_rn(tl.maximum(tl.abs(z), floor))
    y = sigmoid(tl.where(z > 0.0, root, tl.where(z < 0.0, -root, 0.0)))
    tl.store(out + row * out_stride + part, y.to(out.dtype.element_ty))


@triton.jit
def combined(x, factors, residual, out, width, stride, factor_stride, out_stride, PARTS: tl.constexpr,
             BLOCK: tl.constexpr):  # fmt: skip
    """One part of a result: a sum over the parts of a row, in ascending order."""
    row, made = tl.program_id(0).to(tl.int64), tl.program_id(2)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside, total = d < width, tl.zeros([BLOCK], tl.float32)
    for part in range(PARTS):
        factor = tl.load(factors + row * factor_stride + made * PARTS + part).to(tl.float32)
        v = tl.load(x + row * stride + part * width + d, mask=inside & (factor != 0.0), other=0.0)
        total += factor * v.to(tl.float32)
    place = row * out_stride + made * width + d
    if residual is not None:
        total += tl.load(residual + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + place, total.to(out.dtype.element_ty), mask=inside)


def _launch(run: Launcher, kernel: Any, args: dict[str, Any], x: Any, out: Any, **constants: Any) -> None:
    width = x.shape[1]
    args |= {"x": x, "out": out, "width": width, "stride": x.stride(0), "out_stride": out.stride(0)}
    run(Launch(kernel, (x.shape[0], triton.cdiv(width, BLOCK), 1), args, {**constants, "BLOCK": BLOCK}))


def add(run: Launcher, x: Any, other: Any, out: Any, scale: float = 1.0) -> None:
    """x + scale * other; `out` may be x."""
    _launch(run, added, {"other": other, "other_stride": other.stride(0), "scale": float(scale)}, x, out)


def scale(run: Launcher, x: Any, out: Any, scale: float, cap: float | None = None) -> None:
    """scale * x, then cap * tanh(x / cap)."""
    args = {"scale": float(scale), "cap": float(cap or 1.0)}
    _launch(run, scaled, args, x, out, CAPPED=cap is not None)


def multiply(run: Launcher, x: Any, factors: Any, out: Any) -> None:
    """x [T, D] times factors [T, F], each of D / F neighbouring elements."""
    args = {"factors": factors, "factor_stride": factors.stride(0)}
    _launch(run, multiplied, args, x, out, SIZE=x.shape[1] // factors.shape[1])


def apply(
    run: Launcher, x: Any, out: Any, function: Elementwise, positions: Any = None, factors: Any = None
) -> None:
    """A function of rows, with its numbers_of as `factors`. EngineError: there is no kernel for it."""
    if isinstance(function, StreamGates):
        n, width = function.streams, x.shape[1]
        return launch(
            run, stream_gates, (x.shape[0], 1, 1), x, factors, out, width, x.stride(0), out.stride(0),
            float(function.eps), float(function.magnitude), float(function.floor), N=n,
            PARTS=1 + (width > n) + (width > 2 * n), ITERATIONS=function.iterations, SIZE=triton.next_power_of_2(n),
            shape=Shape(1, 1),
        )  # fmt: skip
    if isinstance(function, SparseGELU):
        width, grid = x.shape[1], (x.shape[0], 1, 1)
        about = {"BLOCK": triton.next_power_of_2(width), "shape": shape_of(width)}
        return launch(
            run, sparse_gelu, grid, x, out, width, x.stride(0), out.stride(0), float(function.cutoff), **about
        )  # fmt: skip
    numbers: tuple[Any, ...] = 0.0, 0.0, 0.0, 0.0
    if isinstance(function, Clamp):
        numbers = function.limit, 0.0, 0.0, 0.0
    elif isinstance(function, Temperature):
        numbers = function.beta, function.length, function.offset, 0.0
    elif isinstance(function, XIELU):
        numbers = function.alpha_p, function.alpha_n, function.beta, function.eps
    elif isinstance(function, PositionScale):
        numbers = 0.0, x.shape[1] // function.parts, function.parts, 0.0
    elif not isinstance(function, (GELU, ColumnScale)):
        raise EngineError(f"this device has no function {type(function).__name__}")
    args = {"positions": positions, "factors": factors, **dict(zip("abce", numbers, strict=True))}
    _launch(run, applied, args, x, out, KIND=type(function).__name__)


def numbers_of(function: Elementwise) -> tuple[float, ...]:
    """The float32 numbers that `apply` needs of a function in memory: factors, and what else it has for columns."""
    if isinstance(function, ColumnScale):
        return function.factors
    if isinstance(function, PositionScale):
        return *function.growths, *function.bases
    return (*function.factors, *function.biases) if isinstance(function, StreamGates) else ()


def compare_parts(run: Launcher, x: Any, other: Any, out: Any, scale: float, floor: float) -> None:
    """Agreements [T, A] of the parts of rows x and `other` [T, A D], as CompareParts says."""
    parts = out.shape[1]
    width = x.shape[1] // parts
    launch(
        run, compared, (x.shape[0], parts, 1), x, other, out, width, x.stride(0), other.stride(0), out.stride(0),
        float(scale), float(floor), BLOCK=triton.next_power_of_2(width), shape=shape_of(width),
    )  # fmt: skip


def combine(run: Launcher, x: Any, factors: Any, out: Any, vectors: int, residual: Any = None) -> None:
    """Sums of the `vectors` parts of each row [T, A D], by factors [T, B A], or [1, B A] for all rows: [T, B D]."""
    width, shared = x.shape[1] // vectors, factors.shape[0] == 1
    grid = x.shape[0], triton.cdiv(width, BLOCK), factors.shape[1] // vectors
    launch(
        run, combined, grid, x, factors, residual, out, width, x.stride(0), 0 if shared else factors.stride(0),
        out.stride(0), PARTS=vectors, BLOCK=BLOCK,
    )  # fmt: skip
