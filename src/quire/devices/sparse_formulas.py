"""The operations of sparse_ops.py over an array namespace, query by query: the oracle and plain torch."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np

from quire.devices import sparse_ops as ops
from quire.devices.formulas import angles_at, normalizer, rotate
from quire.devices.inputs import sequences_of
from quire.devices.ops import Attend
from quire.devices.step import Step
from quire.weights.tensor import Array, FloatArray


def store_keys(step: Step, op: ops.StoreKeys[Any]) -> Any:
    x = op.x if op.gates is None else step.xp.concatenate([op.x, op.gates], axis=1)
    if op.raw is not None:
        step.store(op.raw, range(len(x)), step.wide(x)[:, None], None)
    positions = step.inputs.positions_T
    ended = [t for t, position in enumerate(positions.tolist()) if (position + 1) % op.size == 0]
    firsts = positions[ended] - (op.size - 1)
    normalize = None if op.norm is None else normalizer(step, op.norm)
    turns = None if op.rope is None else angles_at(step, op.rope, firsts)
    raw, owner = None, -1
    for i, t in enumerate(ended):
        b = int(sequences_of(step.inputs, t))
        if op.raw is None:
            key = step.row(x, t)
        else:
            raw, owner = (raw, owner) if b == owner else (step.keys(op.raw, b)[:, 0], b)
            key = entry(step, op, raw, int(firsts[i]))
        key = key if normalize is None else normalize(key)
        key = key[None] if turns is None else rotate(step, key[None], turns[i])
        step.store(op.layer, [t], key[None], None)
    return op.x


def entry(step: Step, op: ops.StoreKeys[Any], raw: Any, first: int) -> Any:
    """Compute the mean, or weighted mean, of the rows [positions, W] of the window that begins at `first`."""
    rows, xp = raw[first : first + op.size], step.xp
    if op.bias is None:
        return sum(rows[1:], rows[0]) / op.size
    width, bias = op.bias.shape[1], step.own(op.bias)
    keys, gates = rows[:, :width], rows[:, width:] + bias
    if op.overlap:
        half = width // 2
        keys, gates = keys[:, half:], gates[:, half:]
        if first:
            before = raw[first - op.size : first]
            keys = xp.concatenate([before[:, :half], keys])
            gates = xp.concatenate([before[:, width : width + half] + bias[:, :half], gates])
    most = gates[0]
    for row in gates[1:]:
        most = xp.where(row > most, row, most)
    shares = xp.exp(gates - most)
    weighted, total = shares[0] * keys[0], shares[0]
    for share, key in zip(shares[1:], keys[1:], strict=True):
        weighted, total = weighted + share * key, total + share
    return weighted / total


def choose(step: Step, op: ops.Choose[Any]) -> Any:
    every, each = step.kv_spec.layer(op.layer).every, op.num_heads // op.groups
    rows: list[FloatArray] = []
    for b, (start, stop) in enumerate(pairwise(step.inputs.cu_q_B1.tolist())):
        keys = step.keys(op.layer, b)[:, 0]
        for t in range(start, stop):
            position = int(step.inputs.positions_T[t])
            queries = step.row(op.q, t).reshape(op.groups, each, -1)
            weights = None if op.weights is None else step.row(op.weights, t).reshape(op.groups, each)
            seen, chosen = keys[: (position + 1) // every], list[float]()
            for g in range(op.groups):
                by_head = [(seen * query).sum(-1) * op.scale for query in queries[g]]
                total = step.single(sum(weighted(step, op, weights, g, h, s) for h, s in enumerate(by_head)))
                scores = np.asarray(step.host(total), np.float32)
                chosen += best(op, scores, position, every)
            rows.append(np.array(chosen))
    return step.single(step.own(np.stack(rows)))


def weighted(step: Step, op: ops.Choose[Any], weights: Any, g: int, h: int, scores: Any) -> Any:
    scores = step.xp.where(scores > 0, scores, 0.0 * scores) if op.relu else scores
    return scores if weights is None else weights[g, h] * scores


def best(op: ops.Choose[Any], scores: FloatArray, position: int, every: int) -> list[float]:
    """Choose pools for one query by the scores of keys or entries: ascending numbers, then -1."""
    own, always = position // op.size, list[int]()
    if every == 1:
        edges = np.arange(0, len(scores), op.size)
        scores = np.maximum.reduceat(scores, edges)
        always = list(range(max(0, own - op.local + 1), own + 1)) if op.local else []
    scores = scores.copy()
    scores[always] = np.inf
    found = np.argsort(-scores, kind="stable")[: op.top_k].tolist()
    if op.tail and own >= len(scores):
        found.append(own)
    return [*sorted(found), *[-1.0] * (op.top_k + op.tail - len(found))]


def hidden_scores(op: Attend[Any], chosen: Array, group: int, seen: range, columns: int) -> FloatArray:
    """Hide positions that a query did not choose: 0 or -inf for each of `columns`, entries before `seen`."""
    numbers = chosen.reshape(op.groups, -1)[group if op.groups > 1 else 0]
    shown = np.zeros(columns, np.float32)
    if op.entries is None:
        shown[~np.isin(np.arange(seen.start, seen.stop) // op.pool, numbers)] = -np.inf
    else:
        count = columns - len(seen)
        shown[:count][~np.isin(np.arange(count), numbers)] = -np.inf
    return shown


FORMULAS: dict[type[Any], Callable[[Any, Any], Any]] = {ops.StoreKeys: store_keys, ops.Choose: choose}
