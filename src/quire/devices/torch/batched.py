"""Operations on all rows of a step in one torch call each, in the type of the weights: fast, without a promise of bits.

They are the formulas of `torch/ops.py` on steps `at_once`, but for attention, and for products that nothing changes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from quire.devices.formulas import Formulas, linear
from quire.devices.graph import Graph
from quire.devices.ops import Attend, Linear, Op, RopeAngles, Route
from quire.devices.protocol import Attention
from quire.devices.torch.attention import shares
from quire.devices.torch.cache import TorchStep
from quire.devices.torch.ops import FORMULAS, attend_rows
from quire.devices.torch.weights import TorchMatrix, own_matrix

EXACT = RopeAngles, Route  # their results stay float32
MOST_SCORES = 1 << 24  # of a head: more queries of a sequence are computed in pieces


def activation_type(graph: Graph) -> Any:
    """Return the type of a graph's activations: that of its first weight."""
    fields = (getattr(op, name) for op in graph.ops for name in op.__struct_fields__)
    return next((field.values.dtype for field in fields if isinstance(field, TorchMatrix)), torch.float32)


def formulas_in(dtype: Any) -> Formulas:
    """Return the formulas, with results in a type."""

    def rounded(formula: Any, step: TorchStep, op: Op[Any]) -> Any:
        return formula(step, op).to(dtype)

    given: Formulas = {**FORMULAS, Attend: attend_batch, Linear: product}
    return {kind: one if kind in EXACT else partial(rounded, one) for kind, one in given.items()}


def product(step: Any, op: Linear[Any]) -> Any:
    weight = own_matrix(op.weight)
    if step.adapters.active or op.activation is not None:
        return linear(step, op)
    y = weight.times(op.x, None if op.bias is None else step.constant(op.bias))
    return y if op.residual is None else y + op.residual


@dataclass(frozen=True, slots=True)
class Group:
    """Pieces of B sequences with Q tokens each, and the K positions that any of their queries sees.

    `rows` [B Q] are their tokens, `positions` and `places` [B, K] those of keys, `distances` [B, 1, Q, K] from queries
    to keys, and `shown` tells what each query sees: [B, 1, Q, K], None for all. `causal`: that is all but later keys.
    """

    count: int
    rows: Any
    positions: Any
    places: Any
    distances: Any
    shown: Any
    causal: bool


def groups(step: TorchStep, a: Attention) -> list[Group]:
    """Return the step's sequences in groups, which layers that see the same positions share."""
    key = a.window, a.chunk, a.ahead
    if key not in step.seen:
        by_size = defaultdict[int, list[tuple[int, ...]]](list)
        for piece in pieces(step, a):
            by_size[piece[1]].append(piece)
        step.seen[key] = [grouped(step, a, size, found) for size, found in by_size.items()]
    found: list[Group] = step.seen[key]
    return found


def pieces(step: TorchStep, a: Attention) -> Iterator[tuple[int, ...]]:
    """Yield (first token, tokens, position of the first, first key, end of keys, slot) of each piece of a sequence."""
    inputs = step.inputs
    cu_q, lengths, slots = inputs.cu_q_B1.tolist(), inputs.kv_len_B.tolist(), inputs.slots_B.tolist()
    for begin, end, length, slot in zip(cu_q, cu_q[1:], lengths, slots, strict=False):
        most = max(1, MOST_SCORES // length)
        for token in range(begin, end, most):
            size, start = min(most, end - token), length - (end - token)
            yield token, size, start, a.first_seen(start), min(start + size + a.ahead, length), slot


def grouped(step: TorchStep, a: Attention, size: int, found: list[tuple[int, ...]]) -> Group:
    device, block = step.cache.device, step.cache.block_size
    tokens, _, starts, firsts, ends, slots = (column[:, None] for column in np.array(found).T)
    keys_BK = firsts + np.arange((ends - firsts).max())
    positions_BK = np.minimum(keys_BK, ends - 1)
    places = step.inputs.block_table_SM[slots, positions_BK // block].astype(np.int64) * block
    queries = (starts + np.arange(size))[:, :, None]
    shown = (keys_BK < ends)[:, None] & a.sees(queries, keys_BK[:, None])
    causal = size > 1 and shown.shape[1] == shown.shape[2] and bool((shown == np.tri(size, dtype=bool)).all())

    def own(values: Any) -> Any:
        return torch.from_numpy(values).to(device)

    return Group(
        len(found),
        own((tokens + np.arange(size)).reshape(-1)),
        own(positions_BK),
        own(places + positions_BK % block),
        own((positions_BK[:, None] - queries)[:, None]),
        None if shown.all() else own(shown[:, None]),
        causal,
    )


def attend_batch(step: TorchStep, op: Attend[Any]) -> Any:
    """Attention of sequences with equally many tokens in one call."""
    if op.chosen is not None or op.entries is not None:
        return attend_rows(step, op)
    parts = groups(step, op.attention)
    results = [attend_group(step, op, group) for group in parts]
    if len(parts) == 1:  # its rows are in order
        return results[0]
    out = op.q.new_empty(len(op.q), results[0].shape[1])
    for group, result in zip(parts, results, strict=True):
        out[group.rows] = result
    return out


def attend_group(step: TorchStep, op: Attend[Any], group: Group) -> Any:
    a, layer, size = op.attention, op.layer, len(group.rows) // group.count

    def side(kept: Any, scales: Any) -> Any:
        found = kept[group.places]
        if found.dtype.itemsize < 2 or step.cache.spec.dtype == "int8":
            found = found.float() * scales
        return found.to(op.q.dtype).transpose(1, 2)  # [B, G, K, H]

    keys = side(step.cache.keys[layer], step.cache.key_scales[layer])
    values = side(step.cache.values[layer], step.cache.value_scales[layer])
    query = op.q[group.rows].reshape(group.count, size, op.num_heads, -1).transpose(1, 2)
    added = changes(step, op, group)
    if a.cap is None and a.sinks is None:
        mask, shared = group.shown, op.num_heads > keys.shape[1]
        if added is not None:
            mask = added.to(query.dtype)
            mask = mask if group.shown is None else mask.masked_fill(~group.shown, -torch.inf)
        causal = group.causal and added is None
        out = functional.scaled_dot_product_attention(
            query, keys, values, None if causal else mask, is_causal=causal, scale=a.scale, enable_gqa=shared
        )
    else:
        out = softmax_of(step, op, query, keys, values, added, group.shown)
    return out.transpose(1, 2).reshape(len(group.rows), -1)


def changes(step: TorchStep, op: Attend[Any], group: Group) -> Any:
    """Return what is added to scores by distance and position, float32 [B, N, Q, K]; None: nothing."""
    a, added = op.attention, None
    if a.slopes is not None:
        added = step.constant(a.slopes)[:, None, None] * group.distances
    if a.bias is not None:
        reach = a.bias.shape[1] // 2
        places = (group.distances[:, 0].clamp(-reach, reach) + reach).long()
        bias = step.constant(a.bias)[:, places].transpose(0, 1)
        added = bias if added is None else added + bias
    if op.scores is not None:
        shape = group.count, -1, op.num_heads, op.scores.shape[1] // op.num_heads
        each = op.scores[group.rows].float().reshape(shape)
        own = torch.take_along_dim(each.transpose(1, 2), group.positions[:, None, None], -1)
        added = own if added is None else added + own
    return added


def softmax_of(
    step: TorchStep, op: Attend[Any], query: Any, keys: Any, values: Any, added: Any, shown: Any
) -> Any:
    """Attention with capped scores, or with sinks, in float32: [B, N, Q, H]."""
    a, (batch, heads, size, _) = op.attention, query.shape
    each = (batch, keys.shape[1], heads // keys.shape[1] * size, -1)  # queries of the heads that share keys
    scores = (query.reshape(each) @ keys.transpose(2, 3)).float().reshape(batch, heads, size, -1) * a.scale
    scores = scores if a.cap is None else torch.tanh(scores / a.cap) * a.cap
    scores = scores if added is None else scores + added
    weights = shares(scores, shown, None if a.sinks is None else step.constant(a.sinks)).to(values.dtype)
    return (weights.reshape(each) @ values).reshape(batch, heads, size, -1)
