"""Operations and functions of rows that are several equal parts, such as residual streams."""

from __future__ import annotations

from quire.devices.elementwise import Elementwise
from quire.devices.kv import KVSpec
from quire.devices.ops import Op, SameWidth, T
from quire.weights.tensor import FloatArray


class Combine(Op[T], frozen=True, eq=False):
    """Linear combinations of the equal parts of each row: [rows, A D] -> [rows, B D] + residual.

    `factors` is [B, A]. Part b of the result is the sum over a, in ascending order, of factors[b, a] times part a;
    parts whose factor is 0 are left out.
    """

    x: T
    factors: FloatArray
    residual: T | None = None

    def width(self: Combine[int], kv: KVSpec) -> int:
        made, parts = self.factors.shape
        return self.x // int(parts) * int(made)


class Mix(Op[T], frozen=True, eq=False):
    """Combine with factors of its own for each row, [rows, B A]; A = `vectors`."""

    x: T
    factors: T
    vectors: int
    residual: T | None = None

    def width(self: Mix[int], kv: KVSpec) -> int:
        return self.x // self.vectors * (self.factors // self.vectors)


class MatchRMS(SameWidth[T], frozen=True, eq=False):
    """Scale each part of a row, as wide as `like`, to its root mean square: [rows, A D], [rows, D] -> [rows, A D].

    A mean square of a part below `floor` counts as `floor`.
    """

    like: T
    floor: float


class CompareParts(Op[T], frozen=True, eq=False):
    """How well each of the `parts` of a row agrees with that of another row: [rows, A D], [rows, A D] -> [rows, A].

    sigmoid(sign(z) sqrt(max(|z|, floor))), where z is the dot product of the parts times `scale`.
    """

    x: T
    other: T
    parts: int
    scale: float
    floor: float

    def width(self: CompareParts[int], kv: KVSpec) -> int:
        return self.parts


class StreamGates(Elementwise, frozen=True):
    """Weights of n residual streams (Xie et al. 2025, arXiv:2512.24880) from a row times `factors` plus `biases`.

    The first n: sigmoid + eps, how a block reads the streams. If the row is wider, n more: magnitude * sigmoid + floor,
    how its result joins them. If it is n (n + 2) wide, n x n more, transposed: softmax by row + eps, then columns, and
    `iterations` - 1 times rows and columns, are divided by their sums + eps.
    """

    streams: int
    iterations: int
    eps: float
    magnitude: float
    floor: float
    factors: tuple[float, ...]
    biases: tuple[float, ...]
