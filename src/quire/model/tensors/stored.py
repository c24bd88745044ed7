"""Takes the matrices and norms of a module as a family stores them."""

from __future__ import annotations

import numpy as np

from quire.model.families.names import TensorNames
from quire.weights.parts import Part, Take, chain, part, transposed

Shape = tuple[int, ...]


def linear(names: TensorNames, module: str, shape: Shape, take: Take | None = None) -> Part:
    """Take rows of a matrix stored as [out, width], or transposed."""
    stored, flip = ((shape[1], shape[0]), transposed) if names.transposed else (shape, None)
    return part(f"{module}.weight", stored, chain(flip, take))


def fused(names: TensorNames, module: str, kind: str, stored: Shape, take: Take | None) -> Part:
    """Take rows of a matrix, or the same elements of its bias."""
    if kind == "weight":
        return linear(names, module, stored, take)
    return part(f"{module}.{kind}", stored[:1], take)


def places(stored: str, size: int, shape: Shape, turn: Take | None) -> Part:
    """Take the biases of a window's places [size, C], one place after the other."""
    flat: Take = lambda array: array.reshape(-1)  # noqa: E731
    return part(stored, (size, shape[0] // size), chain(flat, turn))


def norm(names: TensorNames, module: str, kind: str, shape: Shape, take: Take | None = None) -> Part:
    """Take the weight of a norm, to which a family may add a number, or its bias."""
    return part(f"{module}.{kind}", shape, chain(take, plus(names.norm_offset) if kind == "weight" else None))


def plus(offset: float) -> Take | None:
    """Add a number to each element, in float32; None if it is 0."""
    return (lambda array: np.asarray(array, np.float32) + np.float32(offset)) if offset else None
