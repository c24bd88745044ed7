"""The oracle's arithmetic on single rows, in plain numpy and float64. Knows no step and no cache."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from quire.devices.host import Float64Array, activate, normalize
from quire.devices.protocol import XIELU, Activation, Attention, FloatArray, Norm, Routing, SparseGELU


def gate(kind: Activation, x: Float64Array, up: Float64Array, limit: float) -> Float64Array:
    """activation(gate) * up of one row; gpt-oss clamps both and multiplies with up + 1 (arXiv:2508.10925)."""
    if kind != "clamped_swiglu" and limit > 0:
        return np.asarray(np.minimum(activate(kind, x), limit) * np.clip(up, -limit, limit))
    if kind != "clamped_swiglu":
        return activate(kind, x) * up
    low = np.minimum(x, 7.0)
    return np.asarray(low / (1.0 + np.exp(-1.702 * np.maximum(low, -400.0))) * (np.clip(up, -7.0, 7.0) + 1.0))


def xielu(op: XIELU, x: Float64Array) -> Float64Array:
    below = op.alpha_n * (np.expm1(np.minimum(x, op.eps)) - x)
    out: Float64Array = np.where(x > 0, op.alpha_p * x * x, below) + op.beta * x
    return out


def sparse_gelu(op: SparseGELU, x: Float64Array) -> Float64Array:
    return activate("gelu_tanh", np.maximum(x - (x.mean() + op.cutoff * x.std()), 0.0))


def mixed(x: FloatArray, factors: FloatArray, residual: FloatArray | None) -> FloatArray:
    """Rows of A parts [rows, A D] -> rows of B parts [rows, B D], by the factors [rows, B, A]."""
    rows, made, parts = factors.shape
    each = x.shape[1] // parts
    out = np.zeros((rows, made, each))
    for row, total, own in zip(x.astype(np.float64), out, factors.astype(np.float64), strict=True):
        for b, a in np.argwhere(own != 0):
            total[b] += own[b, a] * row[a * each : (a + 1) * each]
    whole = out.reshape(rows, made * each)
    return np.asarray(whole if residual is None else whole + residual, np.float32)


def matched_rms(x: FloatArray, like: FloatArray, floor: float) -> FloatArray:
    """Each part of a row, as long as the row of `like`, scaled to the root mean square of that."""
    out = np.empty(x.shape, np.float32)
    for i, (row, model) in enumerate(zip(x.astype(np.float64), like.astype(np.float64), strict=True)):
        parts, wanted = row.reshape(-1, len(model)), np.mean(model * model)
        for j, part in enumerate(parts):
            parts[j] = part * np.sqrt(wanted / max(float(np.mean(part * part)), floor))
        out[i] = parts.reshape(-1)
    return out


def norm_heads(heads_NH: Float64Array, norm: Norm) -> Float64Array:
    """Norm of queries or keys: one weight shared by all heads, one per head, or over all heads together."""
    size, (count, head_dim) = norm.weight.size, heads_NH.shape
    if norm.weight.ndim == 1 and size == count * head_dim:
        return normalize(heads_NH.reshape(-1), norm).reshape(count, head_dim)
    if norm.weight.ndim == 1:
        return np.stack([normalize(head, norm) for head in heads_NH])
    biases = [None] * count if norm.bias is None else list(norm.bias)
    own = [Norm(norm.kind, w, b, norm.eps) for w, b in zip(norm.weight, biases, strict=True)]
    return np.stack([normalize(head, n) for head, n in zip(heads_NH, own, strict=True)])


def prepare_heads(heads_NH: Float64Array, norm: Norm | None, angles: Float64Array | None) -> Float64Array:
    """Queries or keys, normed and rotated in the norm's order."""
    if norm is not None and not norm.after_rope:
        heads_NH = norm_heads(heads_NH, norm)
    if angles is not None:
        heads_NH = rotate(heads_NH, angles)
    return norm_heads(heads_NH, norm) if norm is not None and norm.after_rope else heads_NH


def rotate(x_NH: Float64Array, angles: Float64Array) -> Float64Array:
    """Rope on the first rotary_dim elements of each head; `angles` [rotary_dim]: cosines, then sines."""
    half = len(angles) // 2
    cos, sin = angles[:half], angles[half:]
    first, second, rest = x_NH[:, :half], x_NH[:, half : 2 * half], x_NH[:, 2 * half :]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=1)


def attention_weights(
    products_RS: Float64Array,
    attention: Attention,
    heads: slice,
    own: int,
    added_RS: FloatArray | None = None,
) -> Float64Array:
    """q . k of some heads with S positions, their own at index `own` -> the weights of those positions."""
    scores = products_RS * attention.scale
    if attention.cap is not None:
        scores = attention.cap * np.tanh(scores / attention.cap)
    if attention.slopes is not None:
        scores = scores + attention.slopes[heads, None] * (np.arange(scores.shape[1]) - own)
    if attention.bias is not None:
        reach = attention.bias.shape[1] // 2
        distances = np.clip(np.arange(scores.shape[1]) - own, -reach, reach)
        scores = scores + attention.bias[heads][:, distances + reach]
    if added_RS is not None:
        scores = scores + added_RS
    if attention.sinks is not None:
        scores = np.concatenate([scores, attention.sinks[heads, None]], axis=1)
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    weights /= weights.sum(axis=1, keepdims=True)
    return np.asarray(weights if attention.sinks is None else weights[:, :-1])


def route_row(
    scores: Float64Array, routing: Routing, correction: FloatArray | None, scales: FloatArray | None
) -> Float64Array:
    """One token's choice: ids, then weights. Of equal scores the lower id goes first."""
    weights = scores[: routing.num_experts]
    if routing.sparse_mixer:
        return _mix(weights, routing)
    if routing.scoring == "sigmoid":
        weights = 1.0 / (1.0 + np.exp(-weights))
    elif not routing.softmax_after:
        weights = np.exp(weights - weights.max())
        weights = weights / weights.sum()
    ranks = weights if correction is None else weights + correction
    if routing.correct_logits and correction is not None:
        ranks = scores[: routing.num_experts] + correction
    if routing.num_groups > 1:
        groups = ranks.reshape(routing.num_groups, -1)
        best = np.sort(groups, axis=1)[:, -2 if routing.group_sum else -1 :].sum(axis=1)
        kept = np.argsort(-best, kind="stable")[: routing.top_groups]
        ranks = np.where(np.isin(np.arange(routing.num_groups), kept)[:, None], groups, -np.inf).reshape(-1)
    ids = np.argsort(-ranks, kind="stable")[: routing.top_k]
    weights = weights[ids]
    if routing.softmax_after:
        weights = np.exp(weights - weights.max())
        weights = weights / weights.sum()
    if routing.renormalize:
        weights = weights / (weights.sum() + 1e-20)
    weights = weights * routing.scale
    weights = weights if scales is None else weights * scales[ids]
    if routing.shared:
        own = 1.0 / (1.0 + np.exp(-scores[-1])) if routing.shared_gate else 1.0
        ids, weights = np.append(ids, routing.num_experts), np.append(weights, own)
    return np.concatenate([ids, weights])


def _mix(scores: Float64Array, routing: Routing) -> Float64Array:
    """SparseMixer: experts one by one; a weight is a share among the scores near the greatest left."""
    left, ids, weights = scores.copy(), [], []
    for _ in range(routing.top_k):
        best = int(np.argmax(left))
        near = (left[best] - scores) / np.maximum(np.abs(scores), left[best]) <= 2 * routing.sparse_mixer
        weights.append(routing.scale / np.exp(left[near] - left[best]).sum())
        ids.append(float(best))
        left[best] = -np.inf
    return np.array([*ids, *weights])


def by_row(function: Callable[[Float64Array], Float64Array], x: FloatArray, width: int) -> FloatArray:
    """`function` of each row alone, in float64, rounded to float32: [rows, any] -> [rows, width]."""
    out = np.empty((len(x), width), np.float32)
    for i, row in enumerate(x):
        out[i] = function(row.astype(np.float64))
    return out
