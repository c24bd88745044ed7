"""Operations that carry a state from token to token, and what each keeps of a sequence.

A record names its state by `layer`, its place in the KV cache, and `state`, its index into KVLayer.states. The state
advances once per token, in float32, by an order of sums that depends on shapes alone: so whole = chunked = batched =
decoded = resumed, bit for bit. Before a sequence's first token it is zero. An open row (ModelInput.states) holds the
inputs by which it advances, side by side.

Only models with such layers import this.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from quire.devices.kv import KVSpec, StateSpec
from quire.devices.operands import Activation, Matrix
from quire.devices.ops import Op, SameWidth, T
from quire.weights.tensor import FloatArray


class Convolve(SameWidth[T], frozen=True, eq=False):
    """A causal convolution of each channel by itself: [T, C] -> [T, C].

    activation(bias + the sum over i of weight[c, i] x[t - (K - 1 - i) dilation, c]); weight is [C, K], bias [C]. The
    state is the input of the last (K - 1) dilation tokens.
    """

    weight: FloatArray
    layer: int
    state: int
    bias: FloatArray | None = None
    activation: Activation | None = None
    dilation: int = 1


class EmbedNgrams(Op[T], frozen=True, eq=False):
    """Rows of several tables [V, D], side by side, for hashes of the step's tokens and the ones before: [T, tables D].

    With N `multipliers` there are as many tables for each number n of tokens, from 2 to N, in this order. The row of
    token t is (id[t] m[0] xor id[t - 1] m[1] ... xor id[t - n + 1] m[n - 1]) modulo V. An `end` before t ends what is
    seen: ids at it and before it count as `end`. Products are below 2^63. The state is the last N - 1 ids, less `end`.
    """

    tables: Sequence[Matrix]
    multipliers: Sequence[int]
    end: int
    layer: int
    state: int

    def width(self: EmbedNgrams[int], kv: KVSpec) -> int:
        return sum(table.shape[1] for table in self.tables)


class DeltaRule(Op[T], frozen=True, eq=False):
    """The gated delta rule (Yang et al. 2024, arXiv:2412.06464), one state S [dk, dv] per value head: [T, Hv dv].

    qkv is [T, 2 Hk dk + Hv dv]: queries, keys, values. Queries and keys are divided by their norm, queries also by
    the root of dk. Value head j reads those of key head j // (Hv / Hk). beta is [T, Hv].

        S = exp(g) S;  S = S + k (v - S^T k)^T beta;  result = S^T q

    g = -rates * steps, or with a `bound` below 0 bound * sigmoid(rates * steps); rates are [Hv]. steps are [T, Hv], or
    [T, Hv dk]: one for each row of S (Kimi Delta Attention, arXiv:2510.26692).
    """

    qkv: T
    steps: T
    beta: T
    rates: FloatArray
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    layer: int
    state: int
    bound: float = 0.0

    def width(self: DeltaRule[int], kv: KVSpec) -> int:
        return self.value_heads * self.value_dim


class StateSpace(Op[T], frozen=True, eq=False):
    """The scan of Mamba-2 (Dao and Gu 2024, arXiv:2405.21060), one state S [N, P] per head: [T, H P].

    xbc is [T, H P + 2 G N]: x by head, then B and C by group; head h reads group h // (H / G). dt [T, H] is bounded by
    `least` and `most`; None: 1.

        S = exp(-rates dt) S + B (dt x)^T;  result = S^T C + skip x

    rates and skip are [H]. Lightning attention is this with x = v, B = k, C = q, and no dt.
    """

    xbc: T
    rates: FloatArray
    heads: int
    head_dim: int
    groups: int
    state_dim: int
    layer: int
    state: int
    dt: T | None = None
    skip: FloatArray | None = None
    least: float = 0.0
    most: float = math.inf

    def width(self: StateSpace[int], kv: KVSpec) -> int:
        return self.heads * self.head_dim


class SelectiveScan(SameWidth[T], frozen=True, eq=False):
    """The scan of Mamba-1 (Gu and Dao 2023, arXiv:2312.00752): x, dt [T, C] and bc [T, 2 N] (B, then C) -> [T, C].

    S[n, c] = exp(-rates[c, n] dt[c]) S[n, c] + B[n] dt[c] x[c]
    result[c] = sum over n of S[n, c] C[n] + skip[c] x[c]
    """

    dt: T
    bc: T
    rates: FloatArray
    skip: FloatArray
    layer: int
    state: int


class GatedRecurrence(SameWidth[T], frozen=True, eq=False):
    """The RG-LRU (De et al. 2024, arXiv:2402.19427) of each channel by itself; x and gates [T, C] -> [T, C].

        a = exp(-rates rate_gate);  S = a S + sqrt(1 - a^2) input_gate x = result

    At position 0 the root counts as 1. rates are [C].
    """

    input_gate: T
    rate_gate: T
    rates: FloatArray
    layer: int
    state: int


def convolution_state(channels: int, taps: int, dilation: int = 1) -> StateSpec:
    """Describe the state of Convolve; with one channel and a tap for each multiplier that of EmbedNgrams."""
    return StateSpec(((taps - 1) * dilation, channels), row=channels, work=taps * channels)


def delta_state(
    key_heads: int, value_heads: int, key_dim: int, value_dim: int, by_channel: bool = False
) -> StateSpec:
    """Describe the state of DeltaRule: a row is keys, values, steps, beta. `by_channel`: steps are [T, Hv dk]."""
    steps = value_heads * key_dim if by_channel else value_heads
    row = key_heads * key_dim + value_heads * value_dim + steps + value_heads
    return StateSpec((value_heads, key_dim, value_dim), row=row, work=3 * value_heads * key_dim * value_dim)


def state_space_state(
    heads: int, head_dim: int, groups: int, state_dim: int, timed: bool = True
) -> StateSpec:
    """Describe the state of StateSpace: a row is x, B, dt. `timed`: there is a dt."""
    row = heads * head_dim + groups * state_dim + (heads if timed else 0)
    return StateSpec((heads, state_dim, head_dim), row=row, work=2 * heads * state_dim * head_dim)


def selective_state(channels: int, state_dim: int) -> StateSpec:
    """Describe the state of SelectiveScan: a row is x, dt, B."""
    return StateSpec((state_dim, channels), row=2 * channels + state_dim, work=2 * state_dim * channels)


def gated_state(channels: int) -> StateSpec:
    """Describe the state of GatedRecurrence: a row is x and both gates."""
    return StateSpec((channels,), row=3 * channels, work=channels)
