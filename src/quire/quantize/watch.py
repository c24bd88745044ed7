"""`Ops` that note which activations each weight multiplies, and tap them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from quire.devices.protocol import Activation, Expert, FloatArray, Matrix
from quire.model.assemble_parts import Use
from quire.model.pack import Packer
from quire.model.weights import LayerWeights
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

    def tensors(self, matrix: Matrix) -> tuple[str, ...] | None:
        """The tensors of a matrix; None if they are not whole rows of matrices, or stay float."""
        _, parts, use = self.parts[id(matrix)]
        plain = use == "linear" and all(
            len(part.tensors) == 1 and part.shape is None and len(part.tensors[0][1]) == 2
            and part.rows() is not None for part in parts
        )  # fmt: skip
        return tuple(dict.fromkeys(part.tensors[0][0] for part in parts)) if plain else None


@dataclass(slots=True, eq=False)
class Node:
    """A tensor of the graph. `made` tells what it was made by: an operation, and a norm or a matrix."""

    value: Any
    made: tuple[str, Any] = ("", None)
    readers: list[str] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Input:
    """What one or several weights multiply: `tensors` by name, the node, and its place among the taps.

    `others` are matrices that multiply it too and stay float: a router.
    """

    node: Node
    tensors: list[str] = field(default_factory=list)
    others: list[str] = field(default_factory=list)
    tap: int = -1


class WatchOps:
    """Passes every operation on to `ops`, whose tensors it wraps."""

    def __init__(self, ops: Any, noted: Noted) -> None:
        self._ops, self._noted = ops, noted
        self.inputs: list[Input] = []
        self._taps = 0

    def __getattr__(self, name: str) -> Any:
        operation = getattr(self._ops, name)

        def call(*args: Any, **kwargs: Any) -> Node:
            given = [self._read(name, value) for value in args]
            named = {key: self._read(name, value) for key, value in kwargs.items()}
            about = next((value for value in args if not isinstance(value, Node)), None)
            return Node(operation(*given, **named), (name, about))

        return call

    def _read(self, reader: str, value: Any) -> Any:
        if not isinstance(value, Node):
            return value
        value.readers.append(reader)
        return value.value

    def tap(self, x: Node) -> None:
        self._ops.tap(x.value)
        self._taps += 1

    def linear(
        self,
        x: Node,
        weight: Matrix,
        bias: FloatArray | None = None,
        activation: Activation | None = None,
        residual: Node | None = None,
    ) -> Node:
        self._see(x, weight)
        added = None if residual is None else self._read("add", residual)
        return Node(self._ops.linear(x.value, weight, bias, activation, added), ("linear", weight))

    def gated_linear(
        self,
        x: Node,
        weight: Matrix,
        activation: Activation,
        bias: FloatArray | None = None,
        limit: float = 0.0,
    ) -> Node:
        self._see(x, weight)
        made = "gated" if activation != "clamped_swiglu" and not limit else "clamped"
        return Node(self._ops.gated_linear(x.value, weight, activation, bias, limit), (made, weight))

    def experts(
        self,
        x: Node,
        routes: Node,
        experts: Sequence[Expert | None],
        activation: Activation,
        weigh_inputs: bool = False,
    ) -> Node:
        """All experts also compute all tokens, so that none is calibrated on a few."""
        for expert in experts:
            if expert is not None:
                self._see(
                    self.gated_linear(x, expert.up, activation, expert.up_bias, expert.limit), expert.down
                )
        chosen = self._read("experts", routes)
        return Node(self._ops.experts(x.value, chosen, experts, activation, weigh_inputs), ("experts", None))

    def _see(self, x: Node, weight: Matrix) -> None:
        found = next((seen for seen in self.inputs if seen.node is x), None)
        if found is None:
            found = Input(x)
            self.inputs.append(found)
        tensors = self._noted.tensors(weight)
        if tensors is None:
            _, parts, _ = self._noted.parts[id(weight)]
            found.others += [name for part in parts for name, _ in part.tensors]
            return
        if found.tap < 0:
            found.tap = self._taps
            self.tap(x)
        found.tensors += [name for name in tensors if name not in found.tensors]


def norm_of(node: Node, layer: LayerWeights) -> str | None:
    """The norm of a layer that made a node: "attention" or "mlp", if it is one of these two."""
    made, about = node.made
    if made != "norm" or about is None:
        return None
    return "attention" if about is layer.attention_norm else "mlp" if about is layer.mlp_norm else None
