"""Every operation in plain torch, in float32, executed at once on any device.

Products, sums and transcendental functions run on one row (or one query) at a time, with shapes that depend on that row
alone, because torch chooses algorithms, and so the order of a sum, by shape. That is what makes batched equal alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from quire.devices.host import all_gathered, all_reduced, received
from quire.devices.kv import FP8_MOST
from quire.devices.operands import padded_positions
from quire.devices.ops import (
    Add,
    AllGather,
    AllReduce,
    Apply,
    Attend,
    Combine,
    Embed,
    EmbedPositions,
    GatedLinear,
    HeadLinear,
    Linear,
    MatchRMS,
    Mix,
    Multiply,
    Normalize,
    Op,
    PrepareQueries,
    Receive,
    RelativeScores,
    RopeAngles,
    Route,
    RunExperts,
    Scale,
    SelectRows,
    StoreKV,
    StoreLatent,
    Tap,
)
from quire.devices.protocol import (
    GELU,
    Activation,
    Clamp,
    ColumnScale,
    FloatArray,
    Matrix,
    Norm,
    SparseGELU,
    Temperature,
)
from quire.devices.torch.attention import attend
from quire.devices.torch.cache import TorchStep
from quire.devices.torch.rows import (
    activate,
    gate,
    matched_rms,
    mixed,
    relative,
    relative_places,
    route_row,
    sparse_gelu,
    xielu,
)
from quire.devices.torch.weights import own_matrix, round_int8


def by_row(function: Callable[[Any], Any], x: Any) -> Any:
    """`function` of each row alone, in equally aligned memory, because BLAS chooses by alignment too."""
    if not len(x):  # a step may read no rows
        return function(x.new_zeros(x.shape[1:]))[None][:0]
    return torch.stack([function(row.clone()) for row in x])


def tensor_like(x: Any, values: FloatArray) -> Any:
    return torch.from_numpy(np.array(values, np.float32)).to(x.device)


def normalize(row: Any, weight: Any, bias: Any, norm: Norm) -> Any:
    """RMSNorm or LayerNorm of the last axis, with statistics in float64."""
    x = row.double()
    if norm.kind == "layer":
        x = x - x.mean(-1, keepdim=True)
    y = x / torch.sqrt((x * x).mean(-1, keepdim=True) + norm.eps) * weight
    return (y if bias is None else y + bias).float()


def norm_row(norm: Norm, like: Any) -> Callable[[Any], Any]:
    weight = tensor_like(like, norm.weight)
    bias = None if norm.bias is None else tensor_like(like, norm.bias)
    return lambda row: normalize(row, weight, bias, norm)


def norm_heads(heads_NH: Any, norm: Norm) -> Any:
    """One token's queries or keys: one weight for all heads, one per head, or statistics over all heads together."""
    function = norm_row(norm, heads_NH)
    if norm.weight.ndim == 1 and norm.weight.size == heads_NH.numel():
        return function(heads_NH.reshape(-1)).reshape(heads_NH.shape)
    return function(heads_NH)


def rotate(x_NH: Any, angles: Any) -> Any:
    """Rope on the first rotary_dim elements of each head; `angles` [rotary_dim]: cosines, then sines."""
    half = len(angles) // 2
    cos, sin = angles[:half], angles[half:]
    first, second, rest = x_NH[:, :half], x_NH[:, half : 2 * half], x_NH[:, 2 * half :]
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=1)


def prepare_heads(heads_NH: Any, norm: Norm | None, angles: Any) -> Any:
    """One token's queries or keys, normed and rotated in the norm's order."""
    if norm is not None and not norm.after_rope:
        heads_NH = norm_heads(heads_NH, norm)
    if angles is not None:
        heads_NH = rotate(heads_NH, angles)
    return norm_heads(heads_NH, norm) if norm is not None and norm.after_rope else heads_NH


def products(
    step: TorchStep, x: Any, weight: Matrix, path: str, bias: FloatArray | None, places: Sequence[int]
) -> Any:
    """x @ weight.T + bias as adapters change it; row i of x belongs to row places[i] of the step."""
    y = by_row(own_matrix(weight).times, x)
    added = y if bias is None else y + tensor_like(x, bias)
    for i, place in enumerate(places if step.adapters.active else ()):
        change = step.adapters.change(place, path)
        if change is None:
            continue
        row = y[i] if change.weight is None else own_matrix(change.weight).times(x[i].clone())
        for up in change.ups:
            assert change.down is not None
            down = tensor_like(x, change.down[up.first : up.first + up.weight.shape[1]])
            low = torch.mv(tensor_like(x, up.weight), torch.mv(down, x[i].clone()))
            row = row.clone()
            row[up.start : up.start + len(low)] += low
        if change.gain is not None:
            row = row * tensor_like(x, change.gain)
        for vector in (bias if change.bias is None else change.bias, change.shift):
            row = row if vector is None else row + tensor_like(x, vector)
        added[i] = row
    return added


def gated(
    step: TorchStep,
    x: Any,
    weight: Matrix,
    path: str,
    activation: Activation,
    bias: FloatArray | None,
    places: Sequence[int],
    limit: float,
) -> Any:
    y = products(step, x, weight, path, bias, places)
    half = y.shape[1] // 2
    return by_row(lambda row: gate(activation, row[:half], row[half:], limit), y)


def store(step: TorchStep, layer: int, t: int, keys_GH: Any, values_GH: Any) -> None:
    place, dtype = step.places_T[t], step.cache.spec.dtype
    sides = (
        (step.cache.keys, keys_GH, step.cache.key_scales),
        (step.cache.values, values_GH, step.cache.value_scales),
    )
    for side, new, scales in sides:
        if new is None:
            continue
        new = new / scales[layer]
        if (most := FP8_MOST.get(dtype)) is not None:
            new = new.clamp(-most, most)
        side[layer][place] = (round_int8(new) if dtype == "int8" else new).to(side[layer].dtype)


def embed(step: TorchStep, op: Embed[Any]) -> Any:
    rows = own_matrix(op.table).values[step.tokens_T]
    for i, token in enumerate(step.tokens_T.tolist() if step.adapters.active else ()):
        change = step.adapters.change(i, op.path)
        if change is None:
            continue
        y = rows[i] if change.weight is None else own_matrix(change.weight).values[token]
        for up in change.ups:
            assert change.down is not None
            low = change.down[up.first :, token][: up.weight.shape[1]]
            y = y + torch.mv(tensor_like(y, up.weight), tensor_like(y, low))
        rows[i] = y if change.gain is None else y * tensor_like(y, change.gain)
    return rows * op.scale


def embed_positions(step: TorchStep, op: EmbedPositions[Any]) -> Any:
    return own_matrix(op.table).values[step.positions_T + op.offset]


def add(step: TorchStep, op: Add[Any]) -> Any:
    return op.x + op.scale * op.other


def scale(step: TorchStep, op: Scale[Any]) -> Any:
    scale, cap = op.scale, op.cap
    if cap is None:
        return op.x * scale
    return by_row(lambda row: cap * torch.tanh(row * scale / cap), op.x)


def multiply(step: TorchStep, op: Multiply[Any]) -> Any:
    return op.x * op.factors.repeat_interleave(op.x.shape[1] // op.factors.shape[1], dim=1)


def apply(step: TorchStep, op: Apply[Any]) -> Any:
    x, function = op.x, op.function
    if isinstance(function, Clamp):
        return x.clamp(-function.limit, function.limit)
    if isinstance(function, Temperature):
        steps = (step.positions_T + function.offset).div(function.length, rounding_mode="floor")
        scales = [1 + function.beta * math.log(1 + step) for step in steps.tolist()]
        return x * torch.tensor(scales, device=x.device)[:, None]
    if isinstance(function, GELU):
        return by_row(functional.gelu, x)
    if isinstance(function, ColumnScale):
        return x * tensor_like(x, np.array(function.factors))
    if isinstance(function, SparseGELU):
        return by_row(partial(sparse_gelu, function), x)
    return by_row(partial(xielu, function), x)


def combine(step: TorchStep, op: Combine[Any]) -> Any:
    return mixed(op.x, tensor_like(op.x, op.factors).expand(len(op.x), *op.factors.shape), op.residual)


def mix(step: TorchStep, op: Mix[Any]) -> Any:
    return mixed(
        op.x, op.factors.reshape(len(op.x), op.factors.shape[1] // op.vectors, op.vectors), op.residual
    )


def match_rms(step: TorchStep, op: MatchRMS[Any]) -> Any:
    return matched_rms(op.x, op.like, op.floor)


def normalize_rows(step: TorchStep, op: Normalize[Any]) -> Any:
    if step.adapters.active:
        return torch.stack(
            [
                norm_row(step.adapters.norm(i, op.path, op.norm), op.x)(row.clone())
                for i, row in enumerate(op.x)
            ]
        )
    return by_row(norm_row(op.norm, op.x), op.x)


def linear(step: TorchStep, op: Linear[Any]) -> Any:
    y = products(step, op.x, op.weight, op.path, op.bias, range(len(op.x)))
    if op.activation is not None:
        y = by_row(partial(activate, op.activation), y)
    return y if op.residual is None else y + op.residual


def gated_linear(step: TorchStep, op: GatedLinear[Any]) -> Any:
    return gated(step, op.x, op.weight, op.path, op.activation, op.bias, range(len(op.x)), op.limit)


def rope_angles(step: TorchStep, op: RopeAngles[Any]) -> Any:
    angles_TR = step.positions_T.float()[:, None] * tensor_like(step.positions_T, op.rope.inv_freq)
    return by_row(lambda row: op.rope.scale * torch.cat([torch.cos(row), torch.sin(row)]), angles_TR)


def store_kv(step: TorchStep, op: StoreKV[Any]) -> Any:
    kept = step.cache.spec.layer(op.layer)
    groups, head_dim = kept.num_kv_heads, kept.head_dim
    heads = op.qkv.reshape(len(op.qkv), op.num_heads + 2 * groups, head_dim)
    queries = []
    for t, heads_NH in enumerate(heads):
        q, k, v = heads_NH.split([op.num_heads, groups, groups])
        turn = None if op.angles is None else op.angles[t]
        q, k = prepare_heads(q, op.q_norm, turn), prepare_heads(k, op.k_norm, turn)
        queries.append(q.reshape(-1))
        store(step, op.layer, t, k, prepare_heads(v, op.v_norm, None))
    return torch.stack(queries)


def prepare_queries(step: TorchStep, op: PrepareQueries[Any]) -> Any:
    rows = op.q.reshape(len(op.q), op.num_heads, -1)
    turns = [None] * len(op.q) if op.angles is None else op.angles
    return torch.stack(
        [prepare_heads(row, op.norm, turn).reshape(-1) for row, turn in zip(rows, turns, strict=True)]
    )


def store_latent(step: TorchStep, op: StoreLatent[Any]) -> Any:
    latent, rotary = len(op.norm.weight), op.angles.shape[1]
    num_heads = op.q_latent.shape[1] // latent
    normed, queries = norm_row(op.norm, op.kv), []
    for t, row in enumerate(op.kv):
        key = torch.cat([normed(row[:latent]), rotate(row[None, latent:], op.angles[t])[0]])
        store(step, op.layer, t, key[None], None)
        turned = rotate(op.q_rope[t].reshape(num_heads, rotary), op.angles[t])
        queries.append(torch.cat([op.q_latent[t].reshape(num_heads, latent), turned], dim=1).reshape(-1))
    return torch.stack(queries)


def head_linear(step: TorchStep, op: HeadLinear[Any]) -> Any:
    heads = op.x.chunk(len(op.weights), dim=1)
    return torch.cat(
        [linear(step, Linear(head, w)) for head, w in zip(heads, op.weights, strict=True)], dim=1
    )


def route(step: TorchStep, op: Route[Any]) -> Any:
    bias = None if op.correction is None else tensor_like(op.scores, op.correction)
    scales = None if op.weight_scales is None else tensor_like(op.scores, op.weight_scales)
    return by_row(lambda row: route_row(row, op.routing, bias, scales), op.scores)


def run_experts(step: TorchStep, op: RunExperts[Any]) -> Any:
    chosen, width = op.routes.shape[1] // 2, op.out_width(op.x.shape[1])
    rows = []
    for t, row in enumerate(op.x):
        total = torch.zeros(width, dtype=torch.float64, device=op.x.device)
        for place in torch.argsort(op.routes[t, :chosen]).tolist():
            expert, weight = op.experts[int(op.routes[t, place])], op.routes[t, chosen + place]
            y = row[None] * weight if op.weigh_inputs else row[None]
            if expert is not None:
                up, down = f"{expert.path}.gate_up", f"{expert.path}.down"
                inner = gated(step, y, expert.up, up, op.activation, expert.up_bias, [t], expert.limit)
                y = products(step, inner, expert.down, down, expert.down_bias, [t])
            total += y[0].double() * (1.0 if op.weigh_inputs else weight.double())
        rows.append(total.float())
    return torch.stack(rows)


def relative_scores(step: TorchStep, op: RelativeScores[Any]) -> Any:
    like: Any = op.by_key if op.by_query is None else op.by_query
    out = like.new_zeros((len(like), op.num_heads, padded_positions(op.places)))
    for seq in step.sequences:
        index = relative_places(seq.length, op.places).to(like.device)
        rows = slice(seq.begin, seq.end)
        out[rows, :, : seq.length] = op.scale * relative(op.by_query, op.by_key, rows, op.num_heads, index)
    return out.reshape(len(like), -1)


def attend_rows(step: TorchStep, op: Attend[Any]) -> Any:
    """One softmax over everything that a query sees, not tiled."""
    keys, values = step.cache.keys[op.layer], step.cache.values[op.layer]
    sinks = None if op.attention.sinks is None else tensor_like(op.q, op.attention.sinks)
    rows = []
    for seq in step.sequences:
        own_keys = keys[seq.places].float() * step.cache.key_scales[op.layer]
        own_values = values[seq.places].float() * step.cache.value_scales[op.layer]
        for t in range(seq.begin, seq.end):
            position = seq.start + t - seq.begin
            seen = slice(
                op.attention.first_seen(position), min(position + op.attention.ahead + 1, seq.length)
            )
            query = op.q[t].reshape(1, op.num_heads, -1)
            added = None if op.scores is None else op.scores[t].reshape(op.num_heads, 1, -1)[:, :, seen]
            around = seen.start, position, op.attention, sinks, added
            out = attend(query, own_keys[seen], own_values[seen], *around)
            rows.append(out.reshape(-1))
    return torch.stack(rows)


def all_reduce(step: TorchStep, op: AllReduce[Any]) -> Any:
    return torch.from_numpy(all_reduced(op.x.cpu().numpy(), op.peers)).to(op.x.device)


def all_gather(step: TorchStep, op: AllGather[Any]) -> Any:
    return torch.from_numpy(all_gathered(op.x.cpu().numpy(), op.widths, op.peers)).to(op.x.device)


def select_rows(step: TorchStep, op: SelectRows[Any]) -> Any:
    step.adapters.select_rows(step.logit_rows_L.tolist())
    return op.x[step.logit_rows_L]


def receive(step: TorchStep, op: Receive[Any]) -> Any:
    return torch.from_numpy(received(step.inputs, op.columns)).to(step.cache.device)


def tap(step: TorchStep, op: Tap[Any]) -> Any:
    step.tapped.append(op.x)
    return op.x


Formulas = dict[type[Op[Any]], Callable[[TorchStep, Any], Any]]

FORMULAS: Formulas = {
    Receive: receive,
    Embed: embed,
    EmbedPositions: embed_positions,
    Add: add,
    Scale: scale,
    Multiply: multiply,
    Apply: apply,
    Combine: combine,
    Mix: mix,
    MatchRMS: match_rms,
    Normalize: normalize_rows,
    Linear: linear,
    GatedLinear: gated_linear,
    HeadLinear: head_linear,
    RopeAngles: rope_angles,
    StoreKV: store_kv,
    PrepareQueries: prepare_queries,
    StoreLatent: store_latent,
    RelativeScores: relative_scores,
    Attend: attend_rows,
    Route: route,
    RunExperts: run_experts,
    AllReduce: all_reduce,
    AllGather: all_gather,
    SelectRows: select_rows,
    Tap: tap,
}
