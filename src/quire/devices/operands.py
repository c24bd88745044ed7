"""Weights and parameters of operations: matrices, norms, rotary embedding, attention, experts. Plain structs."""

from __future__ import annotations

from typing import Any, Literal, Protocol, runtime_checkable

import msgspec

from quire.weights.tensor import FloatArray

NormKind = Literal["rms", "layer"]


Activation = Literal[
    "silu", "gelu", "gelu_tanh", "relu", "relu2", "sigmoid", "softplus", "clamped_swiglu", "clamped_silu"
]


@runtime_checkable
class Matrix(Protocol):
    """A weight [O, K] packed for a backend's kernels."""

    @property
    def shape(self) -> tuple[int, int]: ...

    @property
    def nbytes(self) -> int: ...

    @property
    def greedy_nbytes(self) -> int:
        """Approximate bytes read to find the largest output of a row; can be below `nbytes` for a `Backend.head`."""
        return self.nbytes

    def dequantize(self) -> FloatArray:
        """Return the weight as float32 [O, K], in the row order in which `Backend.matrix` received it."""


class Norm(msgspec.Struct, frozen=True):
    """y = x / rms(x) * weight, or LayerNorm with bias; statistics over the last axis in float32.

    For queries and keys (StoreKV) the weight is [H], shared by all heads; [N, H], one per head; or [N H], with
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
    reach]; beyond its reach, the bias stays at its last value. A sink is an extra score of its head without a value.
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

    def first_seen(self, position: int) -> int:
        """Return the first position that a query at `position` sees."""
        first = 0 if self.window is None else max(0, position - self.window + 1)
        return first if self.chunk is None else max(first, position // self.chunk * self.chunk)

    def sees(self, queries: Any, keys: Any) -> Any:
        """Tell which queries see which keys, by arrays of their positions in one sequence."""
        seen = keys <= queries + self.ahead
        if self.window is not None:
            seen &= keys > queries - self.window
        if self.chunk is not None:
            seen &= keys >= queries // self.chunk * self.chunk
        return seen


class Routing(msgspec.Struct, frozen=True):
    """How a token chooses experts from its scores [E]; `correction` [E] affects the choice, not the weights.

    Scores go through a sigmoid, the root of a softplus, or a softmax (over all experts, or with `softmax_after` over
    the chosen ones). With `num_groups`, only experts of the `top_groups` best groups can be chosen; a group is as
    good as its best expert, or with `group_sum` as its two best together. A `shared` expert, the last one, always
    takes part; its weight is 1, or with `shared_gate` the sigmoid of one extra score. The weights multiply the
    experts' outputs, or with `weigh_inputs` their inputs. With `correct_logits` the correction is added to the scores
    themselves, and the choice uses that sum. `sparse_mixer`, if not 0, is the threshold of SparseMixer (Liu et al.
    2023, arXiv:2310.00811), which takes experts one by one: each weight is the share of the largest remaining score
    among the remaining scores that are within twice the threshold of it. `renormalize` divides the weights by their
    sum and `floor`.
    """

    num_experts: int
    top_k: int
    scoring: Literal["softmax", "sigmoid", "root_softplus"] = "softmax"
    softmax_after: bool = False
    renormalize: bool = False
    scale: float = 1.0
    num_groups: int = 1
    top_groups: int = 1
    group_sum: bool = False
    shared: bool = False
    shared_gate: bool = False
    weigh_inputs: bool = False
    correct_logits: bool = False
    sparse_mixer: float = 0.0
    floor: float = 1e-20


class Expert(msgspec.Struct, frozen=True):
    """`up` is a gated matrix [2 I, D], or a plain one [I, D]; `down` is [D, I]; `limit` as in GatedLinear.

    Their paths are `path`.gate_up and `path`.down.
    """

    up: Matrix
    up_bias: FloatArray | None
    down: Matrix
    down_bias: FloatArray | None
    limit: float = 0.0
    path: str = ""
