"""Parameters of operations on activations: norms, rotary embedding, attention. Plain structs."""

from __future__ import annotations

from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from quire.weights.tensor import FloatArray

NormKind = Literal["rms", "layer"]
SCORE_TILE = 64  # positions


class Norm(msgspec.Struct, frozen=True):
    """y = x / rms(x) * weight, or LayerNorm with bias; statistics over the last axis in float32.

    For queries and keys (`store_kv`) the weight is [H], shared by all heads; [N, H], one per head; or [N H], with
    statistics over all heads together. With `after_rope` the norm follows the rotation.
    """

    kind: NormKind
    weight: FloatArray
    bias: FloatArray | None
    eps: float
    after_rope: bool = False


class Rope(msgspec.Struct, frozen=True):
    """Rotary embedding in the half-split convention: pairs are (i, i + rotary_dim / 2).

    `inv_freq` [rotary_dim / 2] float32; angle = float32(position) * inv_freq; cos and sin are multiplied by `scale`.
    """

    inv_freq: FloatArray
    scale: float = 1.0


class Attention(msgspec.Struct, frozen=True):
    """The positions that a query sees, and the changes to its scores before the softmax.

    A query at position p sees positions from max(p - window + 1, p // chunk * chunk, 0) to p + ahead (0: causal), up
    to the end of the sequence. A score is scale * q . k, then cap * tanh(score / cap), then
    slopes[head] * (position - p) is added (ALiBi, Press et al. 2022, arXiv:2108.12409), and bias[head, position - p +
    reach]; farther than its reach, the bias is that of its end. A sink is an extra score of its head without a value.
    slopes and sinks are [N], the bias is [N, 2 reach + 1].
    """

    scale: float
    window: int | None = None
    chunk: int | None = None
    ahead: int = 0
    cap: float | None = None
    slopes: FloatArray | None = None
    sinks: FloatArray | None = None
    bias: FloatArray | None = None


def padded_positions(places: NDArray[np.int32]) -> int:
    """The row length of `Ops.relative_scores`: the positions of [2 P - 1] places, in whole tiles."""
    positions = (len(places) + 1) // 2
    return -(-positions // SCORE_TILE) * SCORE_TILE
