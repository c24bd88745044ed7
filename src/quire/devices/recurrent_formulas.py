"""The operations of recurrent_ops.py over an array namespace, token by token: the oracle and plain torch.

States are float32, and each token's is rounded once: where a step ends does not change a bit.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

from quire.devices import recurrent_ops as ops
from quire.devices.step import Step
from quire.errors import EngineError

Advance = Callable[[Any, Any, int], Any]
"""(state, input row, position) -> the state after that token."""
Read = Callable[[Any, Any, int], Any]
"""(state before, state after, token of the step) -> its row of the result."""


def recur(step: Step, place: tuple[int, int], inputs: Any, advance: Advance, read: Read) -> Any:
    """Compute all sequences' tokens; `inputs` [T, W] are the rows by which the state at `place` advances."""
    given = step.inputs.states
    if given is None:
        raise EngineError("a step of a model with states came without their rows")
    states, waiting = step.states(*place)
    results: list[Any] = [None] * len(inputs)
    for b, (start, stop) in enumerate(pairwise(step.inputs.cu_q_B1.tolist())):
        row, count, kept = (int(array[b]) for array in (given.rows_B, given.open_B, given.kept_B))
        targets = [(kept, row), *((n, to) for owner, n, to in given.marks_M3.tolist() if owner == b)]
        position = int(step.inputs.positions_T[start]) - count
        state = states[row] if position else step.single(step.own(np.zeros(tuple(states.shape[1:]))))
        for i in range(count):
            state = advance(state, waiting[row, i], position + i)
        for done in range(stop - start + 1):
            for _, to in (target for target in targets if target[0] == done):
                states[to] = state
            if done == stop - start:
                break
            before, state = state, advance(state, inputs[start + done], position + count + done)
            results[start + done] = read(before, state, start + done)
        waiting[row, : stop - start - kept] = inputs[start + kept : stop]
    return step.single(step.xp.stack(results))


def convolve(step: Step, op: ops.Convolve[Any]) -> Any:
    weight = step.own(op.weight.T)
    bias = None if op.bias is None else step.own(op.bias)

    def read(before: Any, after: Any, t: int) -> Any:
        seen = step.xp.concatenate([before, op.x[t : t + 1]])[:: op.dilation]
        y = (step.wide(seen) * weight).sum(0)
        y = y if bias is None else y + bias
        return y if op.activation is None else step.activate(op.activation, y)

    return recur(step, (op.layer, op.state), op.x, partial(_pushed, step), read)


def _pushed(step: Step, state: Any, row: Any, position: int) -> Any:
    """Append a row to the last ones, and drop the first."""
    return step.xp.concatenate([state, row[None]])[1:]


def embed_ngrams(step: Step, op: ops.EmbedNgrams[Any]) -> Any:
    ids = step.inputs.tokens_T
    each = len(op.tables) // (len(op.multipliers) - 1)
    inputs = step.single(step.own((ids - op.end).astype(np.float32)[:, None]))

    def read(before: Any, after: Any, t: int) -> Any:
        seen = [int(ids[t]), *(op.end + int(difference) for difference in step.host(before)[::-1, 0])]
        ended, hashed, rows = False, 0, list[Any]()
        for back, (number, factor) in enumerate(zip(seen, op.multipliers, strict=True)):
            hashed ^= (op.end if ended else number) * factor
            ended = ended or (back > 0 and number == op.end)
            tables = op.tables[(back - 1) * each : back * each] if back else ()
            rows += [step.embedded(table, np.array([hashed % table.shape[0]]))[0] for table in tables]
        return step.xp.concatenate(rows)

    return recur(step, (op.layer, op.state), inputs, partial(_pushed, step), read)


def delta_rule(step: Step, op: ops.DeltaRule[Any]) -> Any:
    keys, heads, width = op.key_heads * op.key_dim, op.value_heads, op.value_heads * op.value_dim
    rates, by_head = step.own(op.rates)[:, None], [j * op.key_heads // heads for j in range(heads)]
    inputs = step.xp.concatenate([op.qkv[:, keys:], op.steps, op.beta], axis=1)

    def units(row: Any) -> Any:
        """Queries or keys of each value head, of length 1: [Hv, dk]."""
        x = step.wide(row).reshape(op.key_heads, op.key_dim)
        return (x / step.xp.sqrt((x * x).sum(1) + 1e-6)[:, None])[by_head]

    def advance(state: Any, row: Any, _: int) -> Any:
        k, row = units(row[:keys]), step.wide(row[keys:])
        v, steps, beta = row[:width].reshape(heads, -1), row[width:-heads].reshape(heads, -1), row[-heads:]
        g = op.bound * step.activate("sigmoid", rates * steps) if op.bound else -rates * steps
        state = step.wide(state) * step.xp.exp(g)[:, :, None]
        change = (v - (state * k[:, :, None]).sum(1)) * beta[:, None]
        return step.single(state + k[:, :, None] * change[:, None])

    def read(before: Any, after: Any, t: int) -> Any:
        q = units(op.qkv[t, :keys]) * op.key_dim**-0.5
        return (step.wide(after) * q[:, :, None]).sum(1).reshape(-1)

    return recur(step, (op.layer, op.state), inputs, advance, read)


def state_space(step: Step, op: ops.StateSpace[Any]) -> Any:
    width, group = op.heads * op.head_dim, op.groups * op.state_dim
    rates, by_head = step.own(op.rates), [h * op.groups // op.heads for h in range(op.heads)]
    skip = None if op.skip is None else step.own(op.skip)
    inputs = op.xbc[:, : width + group]
    inputs = inputs if op.dt is None else step.xp.concatenate([inputs, op.dt], axis=1)

    def heads(row: Any) -> Any:
        return step.wide(row).reshape(op.heads, op.head_dim)

    def of_groups(row: Any) -> Any:
        """B or C of each head, beside its P columns: [H, N, 1]."""
        return step.wide(row).reshape(op.groups, op.state_dim)[by_head][:, :, None]

    def advance(state: Any, row: Any, _: int) -> Any:
        x, b, dt = heads(row[:width]), of_groups(row[width : width + group]), step.wide(row[width + group :])
        dt = rates * 0.0 + 1.0 if op.dt is None else step.xp.clip(dt, op.least, op.most)
        decayed = step.wide(state) * step.xp.exp(-rates * dt)[:, None, None]
        return step.single(decayed + b * (dt[:, None] * x)[:, None])

    def read(before: Any, after: Any, t: int) -> Any:
        y = (step.wide(after) * of_groups(op.xbc[t, width + group :])).sum(1)
        return (y if skip is None else y + skip[:, None] * heads(op.xbc[t, :width])).reshape(-1)

    return recur(step, (op.layer, op.state), inputs, advance, read)


def selective_scan(step: Step, op: ops.SelectiveScan[Any]) -> Any:
    channels, size = op.rates.shape
    rates, skip = step.own(op.rates.T), step.own(op.skip)
    inputs = step.xp.concatenate([op.x, op.dt, op.bc[:, :size]], axis=1)

    def advance(state: Any, row: Any, _: int) -> Any:
        row = step.wide(row)
        x, dt, b = row[:channels], row[channels : 2 * channels], row[2 * channels :]
        return step.single(step.wide(state) * step.xp.exp(-rates * dt) + b[:, None] * (dt * x))

    def read(before: Any, after: Any, t: int) -> Any:
        c = step.wide(op.bc[t, size:])
        return (step.wide(after) * c[:, None]).sum(0) + skip * step.wide(op.x[t])

    return recur(step, (op.layer, op.state), inputs, advance, read)


def gated_recurrence(step: Step, op: ops.GatedRecurrence[Any]) -> Any:
    rates = step.own(op.rates)
    inputs = step.xp.concatenate([op.x, op.input_gate, op.rate_gate], axis=1)

    def advance(state: Any, row: Any, position: int) -> Any:
        x, input_gate, rate_gate = step.wide(row).reshape(3, -1)
        a = -rates * rate_gate
        root = step.xp.sqrt(-step.xp.expm1(2 * a)) if position else 1.0
        return step.single(step.xp.exp(a) * step.wide(state) + root * (input_gate * x))

    return recur(step, (op.layer, op.state), inputs, advance, lambda before, after, t: after)


FORMULAS: dict[type[Any], Callable[[Any, Any], Any]] = {
    ops.Convolve: convolve,
    ops.EmbedNgrams: embed_ngrams,
    ops.DeltaRule: delta_rule,
    ops.StateSpace: state_space,
    ops.SelectiveScan: selective_scan,
    ops.GatedRecurrence: gated_recurrence,
}
