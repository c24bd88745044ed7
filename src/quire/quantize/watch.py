"""Finds the values that weights multiply, in a graph, and taps them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

from quire.devices.graph import Graph, Recorder
from quire.devices.ops import GatedLinear, Linear, Op, RunExperts, Tap, Value, operands
from quire.devices.protocol import FloatArray, Matrix
from quire.errors import ModelError
from quire.model.packing import Packer
from quire.model.parts.source import Piece, Use
from quire.model.tensors import Tensors
from quire.weights.parts import Part


class Noted:
    """A `WeightSource` that notes the parts of each matrix by path, and reads only those whose names are `wanted`."""

    def __init__(
        self, tensors: Tensors, packer: Packer, outline: Packer, wanted: Callable[[str], bool]
    ) -> None:
        self._tensors, self._packer, self._outline, self._wanted = tensors, packer, outline, wanted
        self._parts: dict[str, tuple[list[Part], Use]] = {}

    def matrix(self, path: str, pieces: Sequence[Piece], use: Use = "linear") -> Matrix:
        parts = [self._tensors.part(piece) for piece in pieces]
        self._parts[path] = parts, use
        return self._reader(parts).matrix(parts, use)

    def gated(self, path: str, gate: Piece, up: Piece) -> Matrix:
        parts = [self._tensors.part(gate), self._tensors.part(up)]
        self._parts[path] = parts, "linear"
        return self._reader(parts).gated(*parts)

    def vector(self, path: str, pieces: Sequence[Piece]) -> FloatArray:
        parts = [self._tensors.part(piece) for piece in pieces]
        if self._reader(parts) is self._packer:
            return self._packer.vector(parts)
        return np.concatenate([np.array(part.outline(), np.float32) for part in parts])

    def _reader(self, parts: Sequence[Part]) -> Packer:
        wanted = all(self._wanted(name) for part in parts for name, _ in part.tensors)
        return self._packer if wanted else self._outline

    def names(self, path: str) -> list[str]:
        """List all tensors that a matrix is made of. ModelError if they belong to another layer."""
        parts, _ = self._parts[path]
        if self._reader(parts) is self._outline:
            raise ModelError(
                f"{path} serves several layers: round this model when it is loaded (--quantization)"
            )
        return [name for part in parts for name, _ in part.tensors]

    def tensors(self, path: str) -> tuple[str, ...] | None:
        """List the tensors of a matrix; None if they are not whole rows of matrices, or stay float."""
        parts, use = self._parts[path]
        plain = use == "linear" and all(
            len(part.tensors) == 1 and part.shape is None and len(part.tensors[0][1]) == 2
            and part.rows() is not None for part in parts
        )  # fmt: skip
        return tuple(dict.fromkeys(part.tensors[0][0] for part in parts)) if plain else None


@dataclass(slots=True, eq=False)
class Input:
    """A value that one or several weights multiply: `tensors` by name, and its place among the taps.

    `made` is the operation that computes it. `others` are matrices that multiply it too and stay float: a router.
    `shared`: something other than products reads it.
    """

    value: Value
    made: Op[Value]
    tensors: list[str] = field(default_factory=list)
    others: list[str] = field(default_factory=list)
    tap: int = -1
    shared: bool = False


def watched(graph: Graph, noted: Noted) -> tuple[Graph, list[Input]]:
    """Make a graph without a head that also taps the inputs of its weights; return these inputs too.

    All experts compute all tokens there, so that none is calibrated on a few.
    """
    g = Recorder()
    g.ops.extend(graph.ops)
    found: dict[Value, Input] = {}

    def see(x: Value, path: str) -> None:
        seen = found.setdefault(x, Input(x, g.ops[x]))
        names, tensors = noted.names(path), noted.tensors(path)
        if tensors is None:
            seen.others += names
        else:
            seen.tensors += [name for name in tensors if name not in seen.tensors]

    for op in graph.ops:
        if isinstance(op, (Linear, GatedLinear)) and op.path:
            see(op.x, op.path)
        elif isinstance(op, RunExperts):
            for expert in filter(None, op.experts):
                path = f"{expert.path}.gate_up"
                see(op.x, path)
                inner = GatedLinear(op.x, expert.up, op.activation, expert.up_bias, expert.limit, path)
                see(g(inner), f"{expert.path}.down")
    inputs = list(found.values())
    for tap, seen in enumerate([seen for seen in inputs if seen.tensors]):
        seen.tap = tap
        g(Tap(seen.value))
    for op in graph.ops:
        if isinstance(op, (GatedLinear, RunExperts)):
            continue
        for value in [op.residual] if isinstance(op, Linear) and op.path else operands(op):
            if value in found:
                found[value].shared = True
    return msgspec.structs.replace(graph, ops=tuple(g.ops), body=len(g.ops)), inputs
