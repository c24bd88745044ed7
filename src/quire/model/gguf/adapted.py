"""Names a GGUF model's matrices as adapters do: by its family's names in Hugging Face's files."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from quire.model.apart import ApartCheckpoint, Piece
from quire.model.assemble import Assembly
from quire.model.assemble_parts import Use
from quire.model.families import load_family
from quire.model.families.config import ConfigReader
from quire.model.families.names import TensorNames
from quire.model.spec import ArchSpec
from quire.weights.checkpoint import Checkpoint
from quire.weights.parts import Part
from quire.weights.tensor import Array, FloatArray


def family_names(spec: ArchSpec) -> TensorNames:
    names = load_family(spec.architecture).names
    return names(spec, ConfigReader({}, spec.architecture)) if callable(names) else names


def by_family_names(spec: ArchSpec, own: TensorNames, checkpoint: Checkpoint) -> ApartCheckpoint:
    """Give matrices that both formats store alike the family's names."""
    names = family_names(spec)
    pieces: dict[str, Piece] = {}
    for theirs, ours in zip(_Asked(spec, names).matrices, _Asked(spec, own).matrices, strict=True):
        for wanted, part in zip(theirs, ours, strict=False):
            (name, shape), (source, found) = wanted.tensors[0], part.tensors[0]
            if shape == found and len(theirs) == len(ours) and not names.transposed:
                pieces[name] = Piece(source, _whole, shape)
    return ApartCheckpoint(checkpoint, pieces)


def _whole(array: Array) -> Array:
    return array


class _Asked:
    """A `WeightSource` that notes the parts of each matrix, in the order of the assembly."""

    def __init__(self, spec: ArchSpec, names: TensorNames) -> None:
        self.matrices: list[list[Part]] = []
        Assembly(spec, names, self).weights()

    def matrix(self, parts: Sequence[Part], use: Use = "linear") -> Any:
        self.matrices.append([part for part in parts if len(part.tensors) == 1])

    def gated(self, gate: Part, up: Part) -> Any:
        return self.matrix([gate, up])

    def vector(self, parts: Sequence[Part]) -> FloatArray:
        return np.concatenate([part.outline() for part in parts])
