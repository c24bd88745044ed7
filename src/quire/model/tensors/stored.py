"""Takes the matrices and norms of a module as a family stores them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from quire.errors import ModelError
from quire.model.families.names import TensorNames
from quire.weights.parts import Part, Take, chain, part, transposed
from quire.weights.tensor import Array

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


def norm(names: TensorNames, module: str, kind: str, shape: Shape, take: Take | None = None) -> Part:
    """Take the weight of a norm, to which a family may add a number, or its bias."""
    added: Callable[[Array], Array] | None = None
    if kind == "weight" and names.norm_offset:
        offset = np.float32(names.norm_offset)
        added = lambda array: np.asarray(array, np.float32) + offset  # noqa: E731
    return part(f"{module}.{kind}", shape, chain(take, added))


def taps(
    names: TensorNames, module: str, kind: str, channels: int, count: int, take: Take | None = None
) -> Part:
    """Take rows of the weights [C, 1, K] of a convolution by channel, one after the other, or of its biases."""
    if kind == "bias":
        return part(f"{module}.bias", (channels,), take)
    flat: Take = lambda array: array.reshape(-1)  # noqa: E731
    return part(f"{module}.{kind}", (channels, *names.taps_axes, count), chain(take, flat))


def rates(names: TensorNames, module: str, shape: Shape, take: Take | None = None) -> Part:
    """Take the positive rates of a recurrence, which files hold as logarithms or as negative numbers."""

    def positive(array: Array) -> Array:
        values = array.reshape(-1).astype(np.float64)
        with np.errstate(over="ignore"):
            found = -values if names.rates == "negative" else np.exp(values)
        if not (np.isfinite(found) & (found >= 0)).all():
            raise ModelError(f"{module} must hold finite numbers; the file is damaged")
        return np.asarray(found, np.float32)

    return part(module, shape, chain(positive, take))
