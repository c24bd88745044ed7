"""Encodes products with weights, held as floats or packed, gated or by heads."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from quire.devices import ops
from quire.devices.cuda import fuse
from quire.devices.cuda.kernels import packed, products, rows
from quire.devices.cuda.launch import Launcher
from quire.devices.cuda.pack import CudaMatrix, alternating, inputs_of, own_matrix
from quire.devices.ops import Value
from quire.devices.protocol import Array

if TYPE_CHECKING:
    from quire.devices.cuda.record import Call, Encoders, Recorder
    from quire.devices.cuda.step import CudaStep

Product = ops.Linear[Value] | ops.GatedLinear[Value]


def linear(r: Recorder, op: Product, out: Value) -> Call:
    weight, ending = own_matrix(op.weight), ending_of(r, op)

    def call(step: CudaStep) -> None:
        bias, activation, limit, gated = ending
        sums = product(r, op, step)
        about = bias, activation, step.optional(residual_of(op)), limit, gated
        if step.adapters is None or not step.adapters.product(op, out, sums, about):
            sums(weight, step[out], *about)

    return call


def ending_of(r: Recorder, op: Product) -> tuple[Any, str | None, float, bool]:
    """What follows the sums of a product: bias, activation, limit, and whether it is gated."""
    bias = None if op.bias is None else r.tensor(ordered(op, op.bias))
    gated = isinstance(op, ops.GatedLinear)
    return bias, op.activation, getattr(op, "limit", 0.0), gated


def residual_of(op: Product) -> Value | None:
    return op.residual if isinstance(op, ops.Linear) else None


def ordered(op: Any, rows: Array) -> Array:
    """Rows in the order of the weight of an operation."""
    return alternating(rows) if isinstance(op, ops.GatedLinear) else rows


def product(r: Recorder, op: Product, step: CudaStep) -> Callable[..., None]:
    """The product of an operation's x with floats or a packed weight, gated or not."""
    x = step[op.x]
    rounded = x, None
    if isinstance(op, (fuse.RoundedLinear, fuse.RoundedGatedLinear)):
        rounded = step.codes(op.codes)
    return partial(multiply, r.run, x, rounded)


def multiply(
    run: Launcher, x: Any, rounded: tuple[Any, Any], weight: CudaMatrix, out: Any, bias: Any = None,
    activation: Any = None, residual: Any = None, limit: float = 0.0, gated: bool = False,
) -> None:  # fmt: skip
    """A product of x, or of its codes and their scales, in the form of the weight."""
    if weight.packed is not None:
        if weight.inputs is not None:
            x = arranged(run, x, weight.inputs)
            rounded = codes_of(run, x) if weight.rounds else rounded
        codes, scales = rounded if weight.rounds else (x, None)
        packed.linear(run, codes, weight.packed, out, bias, activation, residual, scales, limit, gated)
        return
    own = x.to(weight.dtype)  # the same tensor, but for exact weights
    if gated:
        products.gated(run, own, weight.values, out, activation, bias, limit)
    else:
        products.linear(run, own, weight.values, out, bias, activation, residual)


def arranged(run: Launcher, x: Any, inputs: Any) -> Any:
    """Rows in the order and scale of a weight's columns."""
    out = x.new_empty(x.shape)
    rows.arrange(run, x, inputs, out)
    return out


def codes_of(run: Launcher, x: Any, heads: int = 1) -> tuple[Any, Any]:
    """Codes of rows, and their scales, one for each head."""
    own = x.view(len(x) * heads, -1)
    codes, scales = torch.empty_like(own, dtype=torch.int8), own.new_empty(len(own), dtype=torch.float32)
    packed.round_rows(run, own, codes, scales)
    return codes.view(x.shape), scales


def head_linear(r: Recorder, op: ops.HeadLinear[Value], out: Value) -> Call:
    given, bias = [own_matrix(weight) for weight in op.weights], r.tensor(op.bias)
    if given[0].packed is None:
        weights = torch.stack([weight.values for weight in given])
        return lambda step: products.heads(r.run, step[op.x], weights, step[out], bias, op.activation)
    heads, held = len(given), packed.joined([weight.packed for weight in given if weight.packed is not None])
    inputs = inputs_of(given)

    def call(step: CudaStep) -> None:
        x, scales = step[op.x], None
        if inputs is not None:
            x = arranged(r.run, x, inputs)
        if given[0].rounds:
            x, scales = codes_of(r.run, x, heads)
        packed.linear(r.run, x, held, step[out], bias, op.activation, None, scales, heads=heads)

    return call


ENCODERS: Encoders = {
    ops.Linear: linear,
    fuse.RoundedLinear: linear,
    ops.GatedLinear: linear,
    fuse.RoundedGatedLinear: linear,
    ops.HeadLinear: head_linear,
}
