"""Weights by path: the pieces that a part asks for, and the sources that supply them. Knows no file and no family.

A path names a weight everywhere: `layers.3.attention.q`. Its values are `layers.3.attention.q.weight` and `.bias`.
Over a source that reads and packs, a decoder loads; over `Listing` it lists what it needs. So both always agree.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import msgspec
import numpy as np

from quire.devices.graph import Recorder
from quire.devices.ops import RopeAngles, Value
from quire.devices.protocol import FloatArray, Matrix
from quire.errors import ModelError
from quire.model.parts.rope import RopeSpec, make_rope

Choice = tuple[Value, int, int]
"""Numbers of pools that queries see, the positions of a pool, and the groups of heads that chose (ops.Attend)."""


@dataclass(slots=True)
class Recording:
    """The recorder `g`, and values that several layers read.

    Layer i keeps its keys and values in layer i - `first` of the cache. `embedding` [T, D] and rows of the `table`
    [T, layers P] make the inputs by layer. `carried` holds what joins the residual stream after the next layer.
    `further` are the numbers of the cache layers that a layer keeps beside (Mixer.further); `chosen` is the last choice
    of positions, which later layers may share.
    """

    g: Recorder
    first: int = 0
    embedding: Value | None = None
    table: Value | None = None
    further: Mapping[int, range] = field(default_factory=dict)
    chosen: Choice | None = None
    carried: list[Value] = field(default_factory=list)
    _angles: dict[RopeSpec, Value] = field(default_factory=dict)

    def angles(self, rope: RopeSpec | None) -> Value | None:
        """cos and sin of the step's positions, computed once for all layers; None without a rope."""
        if rope is None:
            return None
        if rope not in self._angles:
            self._angles[rope] = self.g(RopeAngles(make_rope(rope)))
        return self._angles[rope]


# The use of a matrix decides its type: products; the embedding; the head, or an embedding tied to it; learned
# positions; matrices that stay float32; tables of whole numbers, which are float32 too.
Use = Literal["linear", "table", "head", "positions", "exact", "numbers"]
Weights = Mapping[str, Any]
"""Packed matrices and float32 vectors by path."""


class Piece(msgspec.Struct, frozen=True):
    """A matrix [O, K] or a vector [O] of a model by its path; a rank has `rows` and `columns` of it, or all.

    With `fill` it has this value everywhere, and no tensor holds it. `integers`: a tensor of integers holds the vector.
    """

    path: str
    shape: tuple[int, ...]
    rows: range | None = None
    columns: range | None = None
    fill: float | None = None
    integers: bool = False

    @property
    def bias(self) -> Piece:
        """The bias of a matrix: one value for each of its rows."""
        return Piece(f"{self.path.removesuffix('.weight')}.bias", self.shape[:1], self.rows)

    @property
    def own_shape(self) -> tuple[int, ...]:
        """The shape of a rank's piece."""
        cuts = (self.rows, self.columns)[: len(self.shape)]
        return tuple(size if cut is None else len(cut) for size, cut in zip(self.shape, cuts, strict=True))


def matrix_of(
    path: str, out: int, width: int, rows: range | None = None, columns: range | None = None
) -> Piece:
    """The weight [out, width] of a module."""
    return Piece(f"{path}.weight", (out, width), rows, columns)


class WeightSource(Protocol):
    """Supplies the weight at a path, made of pieces stacked on their rows, in the type that its use calls for."""

    def matrix(self, path: str, pieces: Sequence[Piece], use: Use = "linear") -> Matrix: ...

    def gated(self, path: str, gate: Piece, up: Piece) -> Matrix: ...

    def vector(self, path: str, pieces: Sequence[Piece]) -> FloatArray: ...


def read_vector(source: WeightSource, path: str, size: int, own: range | None = None) -> FloatArray:
    """Read the vector [size] at a path, or the `own` values of it."""
    return source.vector(path, [Piece(path, (size,), own)])


class Given:
    """A source of weights that are packed already. ModelError for a path that they lack."""

    def __init__(self, weights: Weights) -> None:
        self._weights = weights

    def matrix(self, path: str, pieces: Sequence[Piece], use: Use = "linear") -> Matrix:
        found: Matrix = self._get(path)
        return found

    def gated(self, path: str, gate: Piece, up: Piece) -> Matrix:
        return self.matrix(path, (gate, up))

    def vector(self, path: str, pieces: Sequence[Piece]) -> FloatArray:
        found: FloatArray = self._get(path)
        return found

    def _get(self, path: str) -> Any:
        if path not in self._weights:
            raise ModelError(f"the weight {path} is missing")
        return self._weights[path]


class Kept:
    """Passes requests on to a source, and keeps the `weights` that it gives by path. Layers may share a matrix."""

    def __init__(self, source: WeightSource) -> None:
        self._source = source
        self.weights: dict[str, Any] = {}

    def matrix(self, path: str, pieces: Sequence[Piece], use: Use = "linear") -> Matrix:
        if path not in self.weights:
            self.weights[path] = self._source.matrix(path, pieces, use)
        matrix: Matrix = self.weights[path]
        return matrix

    def gated(self, path: str, gate: Piece, up: Piece) -> Matrix:
        matrix = self.weights[path] = self._source.gated(path, gate, up)
        return matrix

    def vector(self, path: str, pieces: Sequence[Piece]) -> FloatArray:
        vector = self.weights[path] = self._source.vector(path, pieces)
        return vector


class Listing:
    """A source that only notes the `pieces` that are asked for, with their uses."""

    def __init__(self) -> None:
        self.pieces: dict[Piece, Use] = {}

    def matrix(self, path: str, pieces: Sequence[Piece], use: Use = "linear") -> Any:
        self.pieces.update(dict.fromkeys(pieces, use))

    def gated(self, path: str, gate: Piece, up: Piece) -> Any:
        self.matrix(path, (gate, up))

    def vector(self, path: str, pieces: Sequence[Piece]) -> FloatArray:
        self.pieces.update({piece: "numbers" if piece.integers else "exact" for piece in pieces})
        return np.zeros(sum(piece.own_shape[0] for piece in pieces), np.float32)
