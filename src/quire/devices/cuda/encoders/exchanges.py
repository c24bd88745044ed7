"""Encodes what waits for other ranks: their parts of sums, their columns, and rows of the stage before."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quire.devices import ops
from quire.devices.cuda import fuse
from quire.devices.cuda.encoders import rows
from quire.devices.ops import Value
from quire.devices.torch.exchange import joined

if TYPE_CHECKING:
    from quire.devices.cuda.record import Call, Encoders, Recorder
    from quire.devices.cuda.step import CudaStep


@dataclass(frozen=True, slots=True)
class Collective:
    """A launch that waits for other ranks; a graph may hold it over a step that `fits`."""

    launch: Call
    fits: Callable[[CudaStep], bool] = lambda step: False

    def __call__(self, step: CudaStep) -> None:
        self.launch(step)


def receive(r: Recorder, op: ops.Receive[Value], out: Value) -> Call:
    return Collective(lambda step: step.receive(step[out]))


def all_reduce(r: Recorder, op: ops.AllReduce[Value], out: Value) -> Call:
    sums = r.sums(op.peers, op.ranks)
    return Collective(lambda step: sums.add(step[op.x], step[out]), lambda step: sums.passes(step[op.x]))


def normalize_parts(r: Recorder, op: fuse.NormalizeParts[Value], out: Value) -> Call:
    sums = r.sums(op.peers, op.ranks)
    return Collective(rows.normalize_sum(r, op, out, sums), lambda step: sums.passes(step[op.x]))


def all_gather(r: Recorder, op: ops.AllGather[Value], out: Value) -> Call:
    return Collective(
        lambda step: step.given(step[out], out).copy_(
            joined(step.given(step[op.x], op.x), op.widths, op.peers)
        )
    )


ENCODERS: Encoders = {
    ops.Receive: receive,
    ops.AllReduce: all_reduce,
    fuse.NormalizeParts: normalize_parts,
    ops.AllGather: all_gather,
}
