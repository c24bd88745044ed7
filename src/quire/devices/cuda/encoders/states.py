"""Encodes operations with a state from token to token, over the rows of states of a cache."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from quire.devices import recurrent_ops as ops
from quire.devices.cuda.copies import padded
from quire.devices.cuda.kernels import experts, recurrent
from quire.devices.cuda.kernels.recurrent import Scan, StateStep
from quire.devices.cuda.pack import own_matrix
from quire.devices.cuda.work import FAR
from quire.devices.ops import Value
from quire.devices.protocol import Array, ModelInput

if TYPE_CHECKING:
    from quire.devices.cuda.record import Call, Encoders, Recorder
    from quire.devices.cuda.step import CudaStep


def state_parts(inputs: ModelInput, size: int = 0) -> list[Array]:
    """The numbers of a StateStep in order, int32; empty if the model has no states.

    Padded to a size, they have room for as many marks. The first sequence of the padding owns its tokens, and no
    sequence of it stores anything.
    """
    given, counts = inputs.states, np.diff(inputs.cu_q_B1)
    if given is None:
        return []
    order, batch = np.arange(len(counts)), len(counts)
    fresh = inputs.positions_T[inputs.cu_q_B1[:-1]] == given.open_B
    owners = np.concatenate([given.marks_M3[:, 0], order, order])
    taken = np.stack([given.kept_B, given.rows_B], 1), np.stack([counts, np.full(batch, -1)], 1)
    targets = np.concatenate([given.marks_M3[:, 1:], *taken])
    by_owner = np.argsort(owners, kind="stable")
    firsts = np.searchsorted(owners[by_owner], np.arange(batch + 1))
    parts = [given.rows_B, given.open_B, fresh, given.kept_B, inputs.cu_q_B1, firsts, targets[by_owner]]
    every = [part.astype(np.int32).reshape(-1) for part in (*parts, np.repeat(order, counts))]
    if not size:
        return every
    fills = 0, 0, 1, FAR, len(inputs.tokens_T), len(owners), -1, batch
    sizes = size, size, size, size, size + 1, size + 1, 6 * size, size
    return [padded(part, *about) for part, *about in zip(every, sizes, fills, strict=True)]


def _state(step: CudaStep, op: Any) -> tuple[recurrent.State, StateStep]:
    assert step.states is not None  # by check_states
    return step.cache.states[op.layer][op.state], step.states


def convolve(r: Recorder, op: ops.Convolve[Value], out: Value) -> Call:
    weight, bias = r.tensor(op.weight), r.tensor(op.bias)
    return lambda step: recurrent.convolve(
        r.run, step[op.x], weight, step[out], *_state(step, op), bias, op.activation, op.dilation
    )


def embed_ngrams(r: Recorder, op: ops.EmbedNgrams[Value], out: Value) -> Call:
    tables = [own_matrix(table).dense(r.act).contiguous() for table in op.tables]
    places = experts.addresses(tables, r.device)
    sizes = torch.tensor([len(table) for table in tables], dtype=torch.int32, device=r.device)
    multipliers = torch.tensor([*op.multipliers], device=r.device)

    def call(step: CudaStep) -> None:
        x = (step.tokens - op.end).float()[:, None]
        recurrent.embed_ngrams(
            r.run, x, places, sizes, multipliers, op.end, tables[0].dtype, step[out], *_state(step, op)
        )

    return call


def delta_rule(r: Recorder, op: ops.DeltaRule[Value], out: Value) -> Call:
    width, rates = op.key_heads * op.key_dim, r.tensor(op.rates)

    def call(step: CudaStep) -> None:
        steps = step[op.steps]
        about = Scan(
            "delta", op.value_heads, op.key_dim, op.value_dim, op.value_heads // op.key_heads,
            steps.shape[1] > op.value_heads, op.bound,
        )  # fmt: skip
        queries, keys, values = step[op.qkv].split([width, width, op.value_heads * op.value_dim], 1)
        parts = [keys, values, steps, step[op.beta]]
        recurrent.scan(r.run, about, parts, queries, rates, step[out], *_state(step, op))

    return call


def state_space(r: Recorder, op: ops.StateSpace[Value], out: Value) -> Call:
    rates, skip, group = r.tensor(op.rates), r.tensor(op.skip), op.groups * op.state_dim
    about = Scan(
        "space", op.heads, op.state_dim, op.head_dim, op.heads // op.groups, least=op.least, most=op.most
    )

    def call(step: CudaStep) -> None:
        x, b, c = step[op.xbc].split([op.heads * op.head_dim, group, group], 1)
        parts = [x, b] if op.dt is None else [x, b, step[op.dt]]
        recurrent.scan(r.run, about, parts, c, rates, step[out], *_state(step, op), skip)

    return call


def selective_scan(r: Recorder, op: ops.SelectiveScan[Value], out: Value) -> Call:
    rates, skip, (channels, size) = r.tensor(op.rates), r.tensor(op.skip), op.rates.shape
    about = Scan("selective", 1, size, channels)

    def call(step: CudaStep) -> None:
        b, c = step[op.bc].split([size, size], 1)
        parts = [step[op.x], step[op.dt], b]
        recurrent.scan(r.run, about, parts, c, rates, step[out], *_state(step, op), skip)

    return call


def gated_recurrence(r: Recorder, op: ops.GatedRecurrence[Value], out: Value) -> Call:
    rates, about = r.tensor(op.rates), Scan("gated", 1, 1, len(op.rates))

    def call(step: CudaStep) -> None:
        parts = [step[op.x], step[op.input_gate], step[op.rate_gate]]
        recurrent.scan(r.run, about, parts, parts[0], rates, step[out], *_state(step, op))

    return call


ENCODERS: Encoders = {
    ops.Convolve: convolve,
    ops.EmbedNgrams: embed_ngrams,
    ops.DeltaRule: delta_rule,
    ops.StateSpace: state_space,
    ops.SelectiveScan: selective_scan,
    ops.GatedRecurrence: gated_recurrence,
}
