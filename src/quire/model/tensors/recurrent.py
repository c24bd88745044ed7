"""Takes the weights of convolutions and the rates of recurrences as a family stores them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from quire.errors import ModelError
from quire.model.families.names import TensorNames
from quire.model.tensors.stored import Shape
from quire.weights.parts import Part, Take, chain, part
from quire.weights.tensor import Array

if TYPE_CHECKING:
    from quire.model.tensors import LayerTensors

RATES: dict[str, Callable[[Array], Array]] = {  # what files hold in place of rates
    "logarithms": np.exp,
    "negative": np.negative,
    "softplus": lambda values: 8.0 * np.logaddexp(0.0, values),  # the RG-LRU's parameter
}


def scan_module(layer: LayerTensors, mixer: str, name: str) -> str:
    """Name a module of a scan, or a tensor that is its own."""
    return layer.prefix + layer.names[mixer] + (layer.names[f"scan.{name}"] or name)


def taps(
    names: TensorNames, module: str, kind: str, channels: int, count: int, take: Take | None = None
) -> Part:
    """Take rows of the weights [C, 1, K] of a convolution by channel, one after the other, or of its biases."""
    if kind == "bias":
        return part(f"{module}.bias", (channels,), take)
    flat: Take = lambda array: array.reshape(-1)  # noqa: E731
    return part(f"{module}.{kind}", (channels, *names.taps_axes, count), chain(take, flat))


def rates(names: TensorNames, module: str, shape: Shape, take: Take | None = None) -> Part:
    """Take the positive rates of a recurrence, which files hold in another form."""

    def positive(array: Array) -> Array:
        values = array.reshape(-1).astype(np.float64)
        with np.errstate(over="ignore"):
            found = RATES[names.rates](values)
        if not (np.isfinite(found) & (found >= 0)).all():
            raise ModelError(f"{module} must hold finite numbers; the file is damaged")
        return np.asarray(found, np.float32)

    return part(module, shape, chain(positive, take))
