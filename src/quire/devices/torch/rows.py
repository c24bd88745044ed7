"""Arithmetic on single rows in plain torch. Knows no step and no cache."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from quire.devices.protocol import XIELU, Activation, IntArray, Routing, SparseGELU
from quire.errors import EngineError


def activate(kind: Activation, x: Any) -> Any:
    if kind == "silu":
        return functional.silu(x)
    if kind == "relu":
        return torch.relu(x)
    if kind == "relu2":
        return torch.relu(x).square()
    if kind == "sigmoid":
        return torch.sigmoid(x)
    if kind == "softplus":
        return functional.softplus(x)
    if kind in ("gelu", "gelu_tanh"):
        return functional.gelu(x, approximate="tanh" if kind == "gelu_tanh" else "none")
    raise EngineError(f"the torch backend has no activation {kind!r}")


def gate(kind: Activation, x: Any, up: Any, limit: float) -> Any:
    """activation(x) * up; gpt-oss clamps both and multiplies with up + 1 (arXiv:2508.10925)."""
    if kind != "clamped_swiglu" and limit > 0:
        return activate(kind, x).clamp(max=limit) * up.clamp(-limit, limit)
    if kind != "clamped_swiglu":
        return activate(kind, x) * up
    low = x.clamp(max=7.0)
    return low * torch.sigmoid(1.702 * low) * (up.clamp(-7.0, 7.0) + 1.0)


def xielu(op: XIELU, x: Any) -> Any:
    below = op.alpha_n * (torch.expm1(x.clamp(max=op.eps)) - x)
    return torch.where(x > 0, op.alpha_p * x * x, below) + op.beta * x


def sparse_gelu(op: SparseGELU, x: Any) -> Any:
    deviation, mean = torch.std_mean(x.double(), correction=0)
    kept = (x.double() - (mean + op.cutoff * deviation)).clamp(min=0.0).float()
    return functional.gelu(kept, approximate="tanh")


def mixed(x: Any, factors: Any, residual: Any) -> Any:
    """Rows of A parts [rows, A D] -> rows of B parts [rows, B D], by the factors [rows, B, A]."""
    rows, made, parts = factors.shape
    split = x.reshape(rows, parts, x.shape[1] // parts)
    out = torch.zeros_like(split[:, :1]).repeat(1, made, 1)
    for b in range(made):
        for a in range(parts):
            own = factors[:, b, a, None]
            out[:, b] = torch.where(own != 0, out[:, b] + own * split[:, a], out[:, b])
    whole = out.reshape(rows, made * split.shape[2])
    return whole if residual is None else whole + residual


def matched_rms(x: Any, like: Any, floor: float) -> Any:
    """Each part of a row, as long as the row of `like`, scaled to the root mean square of that."""
    rows = []
    for row, model in zip(x, like, strict=True):
        wanted = model.double().square().mean()
        for part in row.reshape(-1, len(model)):
            own = part.double().square().mean().clamp(min=floor)
            rows.append(part * torch.sqrt(wanted / own).float())
    return torch.stack(rows).reshape(x.shape) if rows else x


def relative_places(length: int, places: IntArray) -> Any:
    """The place of each query and key of a sequence: [length, length]."""
    positions, numbers = (len(places) + 1) // 2, torch.arange(length)
    return torch.from_numpy(places).long()[numbers[None] - numbers[:, None] + positions - 1]


def relative(by_query: Any, by_key: Any, rows: slice, num_heads: int, index: Any) -> Any:
    """What distances add to scores before their scale, of one sequence: [length, N, length]."""
    length = len(index)
    total = torch.zeros((length, num_heads, length), device=index.device)
    if by_query is not None:
        queries = by_query[rows].reshape(length, num_heads, -1)
        total = total + queries.gather(2, index[:, None].expand(-1, num_heads, -1))
    if by_key is not None:
        keys = by_key[rows].reshape(length, num_heads, -1)
        total = total + keys.gather(2, index.T[:, None].expand(-1, num_heads, -1)).transpose(0, 2)
    return total


def route_row(scores: Any, routing: Routing, correction: Any, scales: Any) -> Any:
    """One token's choice: ids, then weights. Of equal scores the lower id goes first."""
    weights = scores[: routing.num_experts].double()
    if routing.sparse_mixer:
        return _mix(weights, routing)
    if routing.scoring == "sigmoid":
        weights = torch.sigmoid(weights)
    elif not routing.softmax_after:
        weights = weights.softmax(0)
    ranks = weights if correction is None else weights + correction
    if routing.correct_logits and correction is not None:
        ranks = scores[: routing.num_experts].double() + correction
    if routing.num_groups > 1:
        groups = ranks.reshape(routing.num_groups, -1)
        best = groups.sort(1).values[:, -2 if routing.group_sum else -1 :].sum(1)
        kept = torch.argsort(best, descending=True, stable=True)[: routing.top_groups]
        hidden = torch.full_like(best, -torch.inf)
        hidden[kept] = 0
        ranks = (groups + hidden[:, None]).reshape(-1)
    ids = torch.argsort(ranks, descending=True, stable=True)[: routing.top_k]
    weights = weights[ids]
    if routing.softmax_after:
        weights = weights.softmax(0)
    if routing.renormalize:
        weights = weights / (weights.sum() + 1e-20)
    weights = weights * routing.scale
    weights = weights if scales is None else weights * scales[ids]
    if routing.shared:
        own = torch.sigmoid(scores[-1:].double()) if routing.shared_gate else weights.new_ones(1)
        ids, weights = torch.cat([ids, ids.new_tensor([routing.num_experts])]), torch.cat([weights, own])
    return torch.cat([ids.double(), weights]).float()


def _mix(scores: Any, routing: Routing) -> Any:
    """SparseMixer: experts one by one; a weight is a share among the scores near the greatest left."""
    left, ids, weights = scores.clone(), [], []
    for _ in range(routing.top_k):
        best = int(left.argmax())
        top = left[best].clone()
        near = (top - scores) / torch.maximum(scores.abs(), top) <= 2 * routing.sparse_mixer
        weights.append(routing.scale / torch.exp(left[near] - top).sum())
        ids.append(scores.new_tensor(best))
        left[best] = -torch.inf
    return torch.stack([*ids, *weights]).float()
