"""Splits a checkpoint so that each matrix of a layer is a tensor [O, K] of its own, as quantized formats have it.

Stacked experts and a fused shared expert are split, and matrices with outputs as columns are transposed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from quire.model.families.names import TensorNames
from quire.model.parts.decoder import Decoder, DecoderConfig
from quire.model.parts.source import Listing
from quire.model.tensors import Tensors
from quire.weights.activations import KeptActivations, Rounding
from quire.weights.checkpoint import Checkpoint
from quire.weights.layouts import AnyLayout
from quire.weights.parts import Take, transposed
from quire.weights.tensor import Array, QuantTensor, Rows

LINEAR = (
    *(f"attention.{name}" for name in ("q", "k", "v", "qkv", "out")),
    *(f"mlp.{name}" for name in ("gate", "up", "gate_up", "down")),
)


@dataclass(frozen=True, slots=True)
class TensorPart:
    """A tensor that is a part of another one, or all of it."""

    source: str
    take: Take | None
    shape: tuple[int, ...]


class ApartCheckpoint:
    """A `Checkpoint` around another one. `pieces` take the place of the tensors that they are parts of."""

    def __init__(self, inner: Checkpoint, pieces: dict[str, TensorPart]) -> None:
        self._inner, self._pieces = inner, pieces
        used = {piece.source for piece in pieces.values()}
        self._names = [*(name for name in inner.names() if name not in used), *pieces]

    def names(self) -> Iterable[str]:
        return self._names

    def shape(self, name: str) -> tuple[int, ...]:
        return self._pieces[name].shape if name in self._pieces else self._inner.shape(name)

    def dtype(self, name: str) -> np.dtype[Any]:
        return self._inner.dtype(self._source(name))

    def path(self, name: str) -> Path:
        return self._inner.path(self._source(name))

    def get(self, name: str) -> Array:
        return self.piece(name, self._inner.get)

    def piece(self, name: str, read: Callable[[str], Array]) -> Array:
        """Read one tensor out of the stacked tensor that holds it; `read` reads that one."""
        if name not in self._pieces:
            return read(name)
        found = self._pieces[name]
        whole = read(found.source)
        return np.ascontiguousarray(whole if found.take is None else found.take(whole))

    @property
    def activations(self) -> KeptActivations:
        return self._inner.activations

    def layout(self, name: str) -> AnyLayout | None:
        return None if name in self._pieces else self._inner.layout(name)

    def quantized(self, name: str, rows: Rows) -> QuantTensor:
        return self._inner.quantized(name, rows)

    def rounding(self, name: str) -> Rounding | None:
        return None if name in self._pieces else self._inner.rounding(name)

    def _source(self, name: str) -> str:
        return self._pieces[name].source if name in self._pieces else name


def taken_apart(
    spec: DecoderConfig,
    names: TensorNames,
    checkpoint: Checkpoint,
    turns: Callable[[str], bool] = lambda name: True,
) -> tuple[ApartCheckpoint, TensorNames]:
    """Split the checkpoint, and adapt its names. `turns` tells which matrices of a transposed family are transposed."""
    pieces = _experts(spec, names) if names.expert_stack else {}
    layers = [names.layer.format(i=i) for i in range(spec.num_layers if names.transposed else 0)]
    modules = {f"{layer}{names[path]}.weight" for layer in layers for path in LINEAR}
    for name in sorted(modules & set(checkpoint.names())):
        if turns(name):
            pieces[name] = TensorPart(name, transposed, checkpoint.shape(name)[::-1])
    apart = ApartCheckpoint(checkpoint, pieces)
    plain = names.changed({"transposed": False})
    return apart, plain.fitted(apart.names())


def _experts(spec: DecoderConfig, names: TensorNames) -> dict[str, TensorPart]:
    """Find each expert's matrices and biases, and a fused shared expert's, by the names of split ones."""
    split = names.fitted([f"{names.layer.format(i=0)}{names['mixture.experts']}0."])
    listing, stored, wanted = Listing(), Tensors(spec, names), Tensors(spec, split)
    Decoder(spec, listing)
    pieces: dict[str, TensorPart] = {}
    for piece in (piece for piece in listing.pieces if ".mixture." in piece.path):
        part, ((name, shape),) = stored.part(piece), wanted.part(piece).tensors
        if part.tensors[0][0] != name:
            pieces[name] = TensorPart(part.tensors[0][0], part.take, shape)
    return pieces
