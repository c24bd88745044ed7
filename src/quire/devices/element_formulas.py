"""The formula of Apply over an array namespace, numpy or torch: functions of elements and of whole rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from quire.devices import ops
from quire.devices.elementwise import GELU, XIELU, Clamp, ColumnScale, Elementwise, SparseGELU, Temperature
from quire.devices.sparse_ops import PositionScale
from quire.devices.step import Step
from quire.devices.stream_ops import StreamGates


def by_row(step: Step, function: Callable[..., Any], *arrays: Any) -> Any:
    """Apply `function` to each row of the arrays alone, or to all in one call (Step.at_once): wide [rows, any]."""
    if step.at_once:
        return function(*map(step.wide, arrays))
    rows = [function(*(step.row(x, i) for x in arrays)) for i in range(len(arrays[0]))]
    if rows:
        return step.xp.stack(rows)
    empty = [step.own(np.zeros(tuple(x.shape[1:]))) for x in arrays]  # a step may read no rows
    return function(*empty)[None][:0]


def apply(step: Step, op: ops.Apply[Any]) -> Any:
    x, function, xp = op.x, op.function, step.xp
    if isinstance(function, Clamp):
        return xp.clip(x, -function.limit, function.limit)
    if isinstance(function, Temperature):
        steps = (step.inputs.positions_T + function.offset) // function.length
        scales = np.array([1 + function.beta * np.log(1.0 + number) for number in steps.tolist()])
        return step.single(step.wide(x) * step.own(scales)[:, None])
    if isinstance(function, PositionScale):
        logs = np.log1p(np.asarray(step.inputs.positions_T, np.float64))[:, None]
        by_part = step.own(logs * np.array(function.growths) + np.array(function.bases))
        parts = step.wide(x).reshape(len(x), function.parts, -1)
        return step.single((parts * by_part[:, :, None]).reshape(len(x), -1))
    if isinstance(function, ColumnScale):
        return step.single(step.wide(x) * step.own(np.array(function.factors)))
    formula = BY_ROW[type(function)]
    return step.single(by_row(step, lambda row: formula(step, row, function), x))


def xielu(step: Step, row: Any, f: XIELU) -> Any:
    below = f.alpha_n * (step.xp.expm1(step.xp.clip(row, None, f.eps)) - row)
    return step.xp.where(row > 0, f.alpha_p * row * row, below) + f.beta * row


def sparse_gelu(step: Step, row: Any, f: SparseGELU) -> Any:
    wide, xp = step.double(row), step.xp
    apart = wide - wide.mean(-1)[..., None]
    kept = xp.clip(apart - f.cutoff * xp.sqrt((apart * apart).mean(-1)[..., None]), 0.0, None)
    return step.activate("gelu_tanh", kept)


def stream_gates(step: Step, row: Any, f: StreamGates) -> Any:
    """Compute how a block reads streams, how its result joins them and, by Sinkhorn's iterations, how they mix.

    Of one row, or of each.
    """
    n, xp = f.streams, step.xp
    made = row * step.own(np.array(f.factors)) + step.own(np.array(f.biases))
    parts, rows, width = [step.activate("sigmoid", made[..., :n]) + f.eps], made.shape[:-1], made.shape[-1]
    if width > n:
        parts.append(f.magnitude * step.activate("sigmoid", made[..., n : 2 * n]) + f.floor)
    if width > 2 * n:
        square = made[..., 2 * n :].reshape(*rows, n, n)
        shares = xp.exp(square - xp.amax(square, -1)[..., None])
        mixed = shares / shares.sum(-1)[..., None] + f.eps
        for i in range(2 * f.iterations - 1):
            mixed = mixed / (mixed.sum(axis=i % 2 - 2, keepdims=True) + f.eps)
        parts.append(mixed.swapaxes(-1, -2).reshape(*rows, -1))
    return xp.concatenate(parts, axis=-1)


BY_ROW: dict[type[Elementwise], Callable[[Step, Any, Any], Any]] = {
    GELU: lambda step, row, f: step.activate("gelu", row),
    StreamGates: stream_gates,
    SparseGELU: sparse_gelu,
    XIELU: xielu,
}
"""BY_ROW are the formulas of functions of one row, or of each."""
