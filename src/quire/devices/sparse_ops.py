"""Operations of sparse attention: they store small keys beside a layer's own, and choose by them what a query sees.

Everything lies in the KV cache: keys per token, or *entries*, one for each window of tokens (KVLayer.every). Scores are
float32 sums whose order depends on shapes alone, so a choice depends on no batch, chunk or thread.

Only models with such layers import this.
"""

from __future__ import annotations

from quire.devices.elementwise import Elementwise
from quire.devices.kv import KVSpec
from quire.devices.operands import Norm, Rope
from quire.devices.ops import Op, SameWidth, T
from quire.weights.tensor import FloatArray


class PositionScale(Elementwise, frozen=True):
    """Each of equal parts of the row of the token at position p is multiplied by growth * log(1 + p) + base."""

    parts: int
    growths: tuple[float, ...]
    bases: tuple[float, ...]


class StoreKeys(SameWidth[T], frozen=True, eq=False):
    """Store one key [D] for each token in the cache of `layer`, or one entry for each whole window of `size` tokens.

    For entries, tokens' rows go to the cache layer `raw` first: x [T, D], of which an entry is the mean. With a `bias`
    [size, C], x is [T, 2 C], keys and gates, or [T, C] with `gates` [T, C]: an entry is the sum of the keys of its
    window, weighted by a softmax, by channel, of gates + bias. C is D. `overlap`: C is 2 D, and the softmax runs over
    2 size rows, the first half of the channels of the window before and the second half of this window (DeepSeek-V4).

    The norm, then the rope are applied to the key; an entry turns by the first position of its window. The result is x.
    """

    layer: int
    norm: Norm | None = None
    rope: Rope | None = None
    size: int = 1
    raw: int | None = None
    bias: FloatArray | None = None
    overlap: bool = False
    gates: T | None = None


class Choose(Op[T], frozen=True, eq=False):
    """The `top_k` pools of `size` positions that score best for each query: their numbers, ascending, then -1.

    q is [T, N D]. Heads are divided evenly into `groups`, each with a choice of its own: [T, groups K], K = top_k, or
    top_k + 1 with `tail`. A key scores the sum over the heads of the group, ascending, of weights[t, h] * relu(scale *
    q[t, h] . key); weights [T, N] are 1 if None, and without `relu` the products count as they are.

    If `layer` has entries, each is a pool's key, and pools that end at or before the query can be chosen; `tail`: the
    query's own pool is chosen besides if it is not whole. If it has a key per token, a pool scores as its best key at
    or before the query, and all pools that begin there can be chosen; the query's own pool and the `local` - 1 before
    it are always among the top_k. Of equal scores, the earlier pool's goes first.
    """

    q: T
    layer: int
    num_heads: int
    top_k: int
    weights: T | None = None
    size: int = 1
    groups: int = 1
    local: int = 0
    tail: bool = False
    scale: float = 1.0
    relu: bool = True

    def width(self: Choose[int], kv: KVSpec) -> int:
        return self.groups * (self.top_k + self.tail)
