"""Finds the values that weights multiply, in a graph, and taps them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

from quire.devices.graph import Graph, Recorder
from quire.devices.ops import GatedLinear, Linear, Op, RunExperts, Tap, Value, operands
from quire.devices.protocol import FloatArray, Matrix
from quire.model.assemble_parts import Use
from quire.model.pack import Packer
from quire.weights.parts import Part


@dataclass(slots=True)
class Noted:
    """A `WeightSource` that remembers the tensors of each matrix, and reads only those whose names are `wanted`."""

    packer: Packer
    outline: Packer
    wanted: Callable[[str], bool]
    parts: dict[int, tuple[Matrix, tuple[Part, ...], Use]] = field(default_factory=dict)

    def matrix(self, parts: Sequence[Part], use: Use = "linear") -> Matrix:
        matrix = self._packer(parts).matrix(parts, use)
        self.parts[id(matrix)] = matrix, tuple(parts), use
        return matrix

    def gated(self, gate: Part, up: Part) -> Matrix:
        matrix = self._packer([gate, up]).gated(gate, up)
        self.parts[id(matrix)] = matrix, (gate, up), "linear"
        return matrix

    def vector(self, parts: Sequence[Part]) -> FloatArray:
        if self._packer(parts) is self.packer:
            return self.packer.vector(parts)
        return np.concatenate([np.array(part.outline(), np.float32) for part in parts])

    def _packer(self, parts: Sequence[Part]) -> Packer:
        wanted = all(self.wanted(name) for part in parts for name, _ in part.tensors)
        return self.packer if wanted else self.outline

    def names(self, matrix: Matrix) -> list[str]:
        """All tensors that a matrix is made of."""
        _, parts, _ = self.parts[id(matrix)]
        return [name for part in parts for name, _ in part.tensors]

    def tensors(self, matrix: Matrix) -> tuple[str, ...] | None:
        """The tensors of a matrix; None if they are not whole rows of matrices, or stay float."""
        _, parts, use = self.parts[id(matrix)]
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
    """A graph without a head that also taps the inputs of its weights, and these inputs.

    All experts compute all tokens there, so that none is calibrated on a few.
    """
    g = Recorder()
    g.ops.extend(graph.ops)
    found: dict[Value, Input] = {}

    def see(x: Value, weight: Matrix) -> None:
        seen = found.setdefault(x, Input(x, g.ops[x]))
        tensors = noted.tensors(weight)
        if tensors is None:
            seen.others += noted.names(weight)
        else:
            seen.tensors += [name for name in tensors if name not in seen.tensors]

    for op in graph.ops:
        if isinstance(op, (Linear, GatedLinear)):
            see(op.x, op.weight)
        elif isinstance(op, RunExperts):
            for expert in filter(None, op.experts):
                see(op.x, expert.up)
                inner = GatedLinear(op.x, expert.up, op.activation, expert.up_bias, expert.limit)
                see(g(inner), expert.down)
    inputs = list(found.values())
    for tap, seen in enumerate([seen for seen in inputs if seen.tensors]):
        seen.tap = tap
        g(Tap(seen.value))
    for op in graph.ops:
        if isinstance(op, (GatedLinear, RunExperts)):
            continue
        for value in [op.residual] if isinstance(op, Linear) else operands(op):
            if value in found:
                found[value].shared = True
    return msgspec.structs.replace(graph, ops=tuple(g.ops), body=len(g.ops)), inputs
