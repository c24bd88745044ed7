"""The operations of a forward pass: one record for each, with its formula and the width of its result.

A record's operands are `Value`s, the results of earlier records (graph.py). `resolved` replaces them by whatever the
reader of a list works with: arrays to compute, widths to measure, numbers of buffers to encode. That is the T of each
class.

`path` names the weight of a record (`layers.3.attention.out`), for adapters and calibration; weights that neither
knows have none.

Shape letters are defined in protocol.py; rows are the step's tokens, after SelectRows its logit rows.

Exactness (docs/architecture.md): each row of a result depends only on its own row (and, in attention, its own
sequence), with an order of reduction that does not depend on how many rows or sequences are in the step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import msgspec

from quire.devices.elementwise import Elementwise
from quire.devices.kv import KVSpec
from quire.devices.operands import Activation, Attention, Expert, Matrix, Norm, Rope, Routing
from quire.devices.peers import Peers
from quire.weights.tensor import FloatArray

T = TypeVar("T")
R = TypeVar("R")


class Value(int):
    """The result of the operation at this index of a graph's list."""

    __slots__ = ()


class Op(msgspec.Struct, Generic[T], frozen=True, eq=False):
    """One operation over operands T."""

    def width(self: Op[int], kv: KVSpec) -> int:
        """Count the elements per row of the result, given the widths of the operands."""
        raise NotImplementedError

    @property
    def inner_width(self) -> int:
        """Count the elements per row that computing it may hold beside its operands and its result."""
        return 0


class SameWidth(Op[T], frozen=True, eq=False):
    """An operation whose result is as wide as x, its first operand."""

    x: T

    def width(self: SameWidth[int], kv: KVSpec) -> int:
        return self.x


def operands(op: Op[Any]) -> list[Value]:
    """Return the values that an operation reads."""
    fields = (getattr(op, name) for name in op.__struct_fields__)
    return [value for value in fields if isinstance(value, Value)]


def resolved(op: Op[Value], lookup: Callable[[Value], R]) -> Op[R]:
    """Return the operation over what `lookup` gives for each of its values."""
    fields = {name: getattr(op, name) for name in op.__struct_fields__}
    found: Any = {name: lookup(value) for name, value in fields.items() if isinstance(value, Value)}
    replaced: Op[Any] = msgspec.structs.replace(op, **found)
    return replaced


class Receive(Op[T], frozen=True, eq=False):
    """ModelInput.hidden_TD with D = `columns`; at most once in a graph."""

    columns: int

    def width(self: Receive[int], kv: KVSpec) -> int:
        return self.columns


class Embed(Op[T], frozen=True, eq=False):
    """Rows of `table` [V, D] for the step's tokens, times scale: [T, D]."""

    table: Matrix
    scale: float = 1.0
    path: str = ""

    def width(self: Embed[int], kv: KVSpec) -> int:
        return self.table.shape[1]


class EmbedPositions(Op[T], frozen=True, eq=False):
    """Rows of `table` at each token's position + offset: [T, D]."""

    table: Matrix
    offset: int = 0

    def width(self: EmbedPositions[int], kv: KVSpec) -> int:
        return self.table.shape[1]


class Add(SameWidth[T], frozen=True, eq=False):
    """x + scale * other; both have the same shape."""

    other: T
    scale: float = 1.0


class Scale(SameWidth[T], frozen=True, eq=False):
    """scale * x, then cap * tanh(x / cap)."""

    scale: float
    cap: float | None = None


class Multiply(SameWidth[T], frozen=True, eq=False):
    """x [rows, D] times factors [rows, F]: each factor multiplies D / F neighbouring elements."""

    factors: T


class Apply(SameWidth[T], frozen=True, eq=False):
    """The same function of each element, of its token's position too for Temperature: one row per token."""

    function: Elementwise


class Normalize(SameWidth[T], frozen=True, eq=False):
    """The norm of each row, with the statistics of each of `groups` equal parts: [rows, D] -> [rows, D]."""

    norm: Norm
    path: str = ""
    groups: int = 1


class Linear(Op[T], frozen=True, eq=False):
    """activation(x @ weight.T + bias) + residual: [rows, K] -> [rows, O]."""

    x: T
    weight: Matrix
    bias: FloatArray | None = None
    activation: Activation | None = None
    residual: T | None = None
    path: str = ""

    def width(self: Linear[int], kv: KVSpec) -> int:
        return self.weight.shape[0]


class GatedLinear(Op[T], frozen=True, eq=False):
    """activation(gate) * up of a weight made by `Backend.gated_matrix`: [rows, K] -> [rows, O / 2].

    `bias` is [O]: the gate's, then the up projection's. With a `limit` above 0 the activated gate is at most that,
    and up is bounded by it both ways. clamped_swiglu and clamped_silu bound both before, the first by 7 without a
    limit.
    """

    x: T
    weight: Matrix
    activation: Activation
    bias: FloatArray | None = None
    limit: float = 0.0
    path: str = ""

    def width(self: GatedLinear[int], kv: KVSpec) -> int:
        return self.weight.shape[0] // 2


class HeadLinear(Op[T], frozen=True, eq=False):
    """activation(head n of x times weights[n].T + bias): [T, N K] -> [T, N O]; bias is [N O]."""

    x: T
    weights: Sequence[Matrix]
    bias: FloatArray | None = None
    activation: Activation | None = None

    def width(self: HeadLinear[int], kv: KVSpec) -> int:
        return len(self.weights) * self.weights[0].shape[0]


class RopeAngles(Op[T], frozen=True, eq=False):
    """cos and sin of the step's positions, computed once and shared by layers: [T, rotary_dim]."""

    rope: Rope

    def width(self: RopeAngles[int], kv: KVSpec) -> int:
        return 2 * len(self.rope.inv_freq)


class StoreKV(Op[T], frozen=True, eq=False):
    """Apply norm and rope (if `angles`) to q and k, in the norm's order; store k and v in the cache of `layer`.

    qkv is [T, (N + 2 G) H]: q heads, then k heads, then v heads. The result is q, normed and rotated: [T, N H].
    """

    qkv: T
    layer: int
    num_heads: int
    angles: T | None = None
    q_norm: Norm | None = None
    k_norm: Norm | None = None
    v_norm: Norm | None = None

    def width(self: StoreKV[int], kv: KVSpec) -> int:
        return self.num_heads * kv.layer(self.layer).head_dim


class PrepareQueries(Op[T], frozen=True, eq=False):
    """The queries [T, N H] of a layer that stores no keys, normed and rotated as by StoreKV."""

    q: T
    num_heads: int
    angles: T | None = None
    norm: Norm | None = None

    def width(self: PrepareQueries[int], kv: KVSpec) -> int:
        return self.q


class StoreLatent(Op[T], frozen=True, eq=False):
    """The StoreKV of latent attention (DeepSeek-V2, arXiv:2405.04434): one key of C + R elements per token.

    kv is [T, C + R]: the latent, which is normed here, and the rotated part; None: the layer's keys are there already.
    The result is q [T, N (C + R)], made of q_latent [T, N C] and the rotated q_rope [T, N R].
    """

    kv: T | None
    q_latent: T
    q_rope: T
    layer: int
    angles: T
    norm: Norm | None

    def width(self: StoreLatent[int], kv: KVSpec) -> int:
        return self.q_latent + self.q_rope


class Attend(Op[T], frozen=True, eq=False):
    """Paged attention over `layer`'s cache: [T, N H] -> [T, N H]; for latent attention [T, N value_dim].

    `scores` [T, N S] are added to each query's scores, by position.
    Query head i reads key/value head i // (N / G).
    `chosen` are numbers of pools of `pool` positions (sparse_ops.Choose), of all heads or of each of the `groups`, one
    per key/value head: a query sees the positions of those alone. With `entries`, a cache layer that has some
    (KVLayer.every), it sees its own layer as ever and, in the same softmax, all entries that end at or before it, or
    the chosen ones of them.
    Softmax is online over tiles of positions aligned to absolute position 0 (Milakov and Gimelshein 2018).
    """

    q: T
    layer: int
    num_heads: int
    attention: Attention
    scores: T | None = None
    chosen: T | None = None
    pool: int = 1
    groups: int = 1
    entries: int | None = None

    def width(self: Attend[int], kv: KVSpec) -> int:
        layer = kv.layer(self.layer)
        return self.num_heads * (layer.value_dim or layer.head_dim)


class Route(Op[T], frozen=True, eq=False):
    """Scores [T, E] (and the shared expert's) -> ids of the chosen experts, then their weights: [T, 2 chosen].

    `weight_scales` [E]: the weight of each chosen expert is multiplied by its own. With `ids` [T, top_k] these are the
    chosen experts, and scores give their weights alone.
    """

    scores: T
    routing: Routing
    correction: FloatArray | None = None
    weight_scales: FloatArray | None = None
    ids: T | None = None

    def width(self: Route[int], kv: KVSpec) -> int:
        return 2 * (self.routing.top_k + self.routing.shared)


class RunExperts(Op[T], frozen=True, eq=False):
    """Sum over a token's experts, in ascending order, of weight * down(gated(up(x))): [T, D] -> [T, D].

    An expert that is None returns x. `weigh_inputs`: as in Routing. If all `down` have fewer rows, because other
    ranks have the others, the result is [T, rows].
    """

    x: T
    routes: T
    experts: Sequence[Expert | None]
    activation: Activation
    weigh_inputs: bool = False

    def width(self: RunExperts[int], kv: KVSpec) -> int:
        return self.out_width(self.x)

    def out_width(self, width: int) -> int:
        """Return the width of the result for inputs of a width."""
        return next((expert.down.shape[0] for expert in self.experts if expert is not None), width)

    @property
    def inner_width(self) -> int:
        return max(expert.up.shape[0] for expert in self.experts if expert is not None)


class AllReduce(SameWidth[T], frozen=True, eq=False):
    """The sum of all ranks' x, added in the order of `ranks`. `peers` may be None in a graph to measure."""

    peers: Peers | None
    ranks: int = 1


class AllGather(Op[T], frozen=True, eq=False):
    """The columns of all ranks side by side: [rows, widths[rank]] -> [rows, sum of widths].

    `unrounded`: a residual is added to the result before it is rounded, as by the Linear of a rank that has all rows.
    """

    x: T
    widths: Sequence[int]
    peers: Peers | None
    unrounded: bool = False

    def width(self: AllGather[int], kv: KVSpec) -> int:
        return sum(self.widths)


class SelectRows(SameWidth[T], frozen=True, eq=False):
    """The rows in ModelInput.logit_rows: [T, D] -> [L, D]."""


class Tap(SameWidth[T], frozen=True, eq=False):
    """Keep x [T, D] of all tokens for `Executable.taps`. Its own result is x."""
