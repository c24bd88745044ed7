"""Encodes mixtures of experts: their routes, and their products by tables of addresses."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from quire.devices import ops
from quire.devices.cuda.kernels import experts, routing
from quire.devices.cuda.pack import CudaMatrix, alternating, own_matrix
from quire.devices.ops import Value
from quire.errors import ConfigError

if TYPE_CHECKING:
    from quire.devices.cuda.record import Call, Encoders, Recorder
    from quire.devices.cuda.step import CudaStep


def route(r: Recorder, op: ops.Route[Value], out: Value) -> Call:
    correction, scales = r.tensor(op.correction), r.tensor(op.weight_scales)
    return lambda step: routing.route(
        r.run, step[op.scores], op.routing, *step.routes(out), correction, scales, step.optional(op.ids)
    )


def run_experts(r: Recorder, op: ops.RunExperts[Value], out: Value) -> Call:
    made = mixture(r, op)
    width = op.out_width(0)

    def call(step: CudaStep) -> None:
        ids, weights = step.routes(op.routes)
        x, own = step[op.x], step[out]
        room = step.room(x, ids.shape[1], made, width or own.shape[1])
        experts.run_experts(r.run, x, ids, weights, made, room, own)

    return call


def mixture(r: Recorder, op: ops.RunExperts[Value]) -> experts.Experts:
    """The experts of a mixture, by tables of their addresses."""
    first, run = next(expert for expert in op.experts if expert is not None), r.run
    gated = first.up.shape[0] > first.down.shape[1]
    up, down = (
        _weights(r, [None if e is None else own_matrix(getattr(e, side)) for e in op.experts])
        for side in ("up", "down")
    )
    sizes = [0 if e is None else e.down.shape[1] for e in op.experts]
    aligned = first.up.shape[1] % up.columns(run) == 0
    return experts.Experts(
        up, down, torch.tensor(sizes, dtype=torch.int32, device=r.device), max(sizes), op.activation, gated,
        first.limit, op.weigh_inputs, _biases(r, op, "up_bias", gated), _biases(r, op, "down_bias", False),
        aligned and all(size % down.columns(run) == 0 for size in sizes), *later_limit(op),
    )  # fmt: skip


def later_limit(op: ops.RunExperts[Value]) -> tuple[float, int]:
    """The limit of the last experts, and the first of them; 0 if all have one. ConfigError: there are more limits."""
    limits = [(i, expert.limit) for i, expert in enumerate(op.experts) if expert is not None]
    changes = [i for (_, before), (i, limit) in pairwise(limits) if limit != before]
    if len(changes) > 1:
        raise ConfigError("no GPU kernel computes experts of several limits: choose --device cpu")
    return (limits[-1][1], changes[0]) if changes else (0.0, 0)


def _weights(r: Recorder, given: list[CudaMatrix | None]) -> experts.Weights:
    """One weight of each expert; all have the form of the first."""
    first = next(weight for weight in given if weight is not None)
    if first.packed is None:
        values = [None if weight is None else weight.values for weight in given]
        return experts.Weights(experts.addresses(values, r.device), first.values.dtype)
    packs = [None if weight is None or weight.packed is None else weight.packed.tensors for weight in given]
    sides = zip(*(pack or (None,) * 5 for pack in packs), strict=True)
    places = [
        experts.addresses(side, r.device) if has is not None else None
        for side, has in zip(sides, first.packed.tensors, strict=True)
    ]
    form = first.packed.form
    scales, zeros, offsets, table = places[1:]
    inputs = [None if weight is None else weight.inputs for weight in given]
    tables = None if all(own is None for own in inputs) else experts.addresses(inputs, r.device)
    return experts.Weights(places[0], form.number, form, scales, zeros, offsets, table, first.rounds, tables)


def _biases(r: Recorder, op: ops.RunExperts[Value], side: str, gated: bool) -> Any:
    """The biases of experts side by side [E, rows]; None if there are none."""
    found = [None if expert is None else getattr(expert, side) for expert in op.experts]
    if all(bias is None for bias in found):
        return None
    made = np.zeros((len(found), max(len(bias) for bias in found if bias is not None)), np.float32)
    for row, bias in zip(made, found, strict=True):
        if bias is not None:
            row[: len(bias)] = alternating(bias) if gated else bias
    return r.tensor(made)


ENCODERS: Encoders = {
    ops.Route: route,
    ops.RunExperts: run_experts,
}
