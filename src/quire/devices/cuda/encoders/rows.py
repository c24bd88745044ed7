"""Encodes what goes row by row: embeddings, sums, functions of elements, and norms."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from quire.devices import ops, stream_ops
from quire.devices.cuda import fuse
from quire.devices.cuda.kernels import elementwise, norm, packed, rows
from quire.devices.cuda.pack import own_matrix
from quire.devices.ops import Op, Value

if TYPE_CHECKING:
    from quire.devices.cuda.peers import RankSums
    from quire.devices.cuda.record import Call, Encoders, Recorder
    from quire.devices.cuda.step import CudaStep


def embed(r: Recorder, op: ops.Embed[Value], out: Value) -> Call:
    table = own_matrix(op.table).dense(r.act)

    def call(step: CudaStep) -> None:
        if step.adapters is None or not step.adapters.embedding(op, out):
            rows.embed(r.run, table, step.tokens, step[out], op.scale)

    return call


def embed_positions(r: Recorder, op: ops.EmbedPositions[Value], out: Value) -> Call:
    table = own_matrix(op.table).dense(r.act)
    return lambda step: rows.embed(r.run, table, step.positions, step[out], offset=op.offset)


def add(r: Recorder, op: ops.Add[Value], out: Value) -> Call:
    return lambda step: elementwise.add(r.run, step[op.x], step[op.other], step[out], op.scale)


def scale(r: Recorder, op: ops.Scale[Value], out: Value) -> Call:
    return lambda step: elementwise.scale(r.run, step[op.x], step[out], op.scale, op.cap)


def multiply(r: Recorder, op: ops.Multiply[Value], out: Value) -> Call:
    return lambda step: elementwise.multiply(r.run, step[op.x], step[op.factors], step[out])


def apply(r: Recorder, op: ops.Apply[Value], out: Value) -> Call:
    numbers = elementwise.numbers_of(op.function)
    factors = r.tensor(np.array(numbers)) if numbers else None
    return lambda step: elementwise.apply(r.run, step[op.x], step[out], op.function, step.positions, factors)


def combine(r: Recorder, op: stream_ops.Combine[Value], out: Value) -> Call:
    factors, parts = r.tensor(op.factors.reshape(1, -1)), op.factors.shape[1]
    return lambda step: elementwise.combine(
        r.run, step[op.x], factors, step[out], parts, step.optional(op.residual)
    )


def mix(r: Recorder, op: stream_ops.Mix[Value], out: Value) -> Call:
    return lambda step: elementwise.combine(
        r.run, step[op.x], step[op.factors], step[out], op.vectors, step.optional(op.residual)
    )


def match_rms(r: Recorder, op: stream_ops.MatchRMS[Value], out: Value) -> Call:
    return lambda step: norm.match_rms(r.run, step[op.x], step[op.like], step[out], op.floor)


def compare_parts(r: Recorder, op: stream_ops.CompareParts[Value], out: Value) -> Call:
    return lambda step: elementwise.compare_parts(
        r.run, step[op.x], step[op.other], step[out], op.scale, op.floor
    )


def normalize(r: Recorder, op: ops.Normalize[Value], out: Value) -> Call:
    given = r.norm(op.norm)

    def call(step: CudaStep) -> None:
        normalized = partial(norm.normalize, r.run, step[op.x], groups=op.groups)
        normalized(step[out], given)
        if step.adapters is not None:
            step.adapters.norm(op.path, out, normalized)

    return call


def normalize_sum(
    r: Recorder, op: fuse.NormalizeSum[Value], out: Value, sums: RankSums | None = None
) -> Call:
    given, first = r.norm(op.norm), r.norm(op.first)

    def call(step: CudaStep) -> None:
        x, total, summed = step[op.x], step[out if op.total is None else op.total], None
        if op.other is not None or sums is not None:
            summed = norm.Sum(step.optional(op.other), op.factors, total, first)
        codes = None if op.codes is None else step.codes(op.codes)
        for parts in (None,) if sums is None else sums.ways(x):
            source, own = x, summed
            if parts is None and sums is not None:
                source, own = (total, None) if op.other is None else (x, summed)
                sums.add(x, source, total)
            norm.normalize(r.run, source, step[out], given, summed=own, codes=codes, parts=parts)
        if step.adapters is not None and given is not None:
            step.adapters.norm(op.path, out, partial(norm.normalize, r.run, total))

    return call


def round_rows(r: Recorder, op: fuse.Round[Value], out: Value) -> Call:
    return lambda step: packed.round_rows(r.run, step[op.x], *step.codes(out))


def nothing(r: Recorder, op: Op[Value], out: Value) -> Call:
    return lambda step: None


def select_rows(r: Recorder, op: ops.SelectRows[Value], out: Value) -> Call:
    return lambda step: rows.select(r.run, step[op.x], step.logit_rows, step[out])


def tap(r: Recorder, op: ops.Tap[Value], out: Value) -> Call:
    return lambda step: step.tapped.update({out: step[out]})  # in the place of x, which is kept


ENCODERS: Encoders = {
    ops.Embed: embed,
    ops.EmbedPositions: embed_positions,
    ops.Add: add,
    ops.Scale: scale,
    ops.Multiply: multiply,
    ops.Apply: apply,
    stream_ops.Combine: combine,
    stream_ops.Mix: mix,
    stream_ops.MatchRMS: match_rms,
    stream_ops.CompareParts: compare_parts,
    ops.Normalize: normalize,
    fuse.NormalizeSum: normalize_sum,
    fuse.Round: round_rows,
    fuse.Room: nothing,
    ops.SelectRows: select_rows,
    ops.Tap: tap,
}
