"""Finds the pieces of gated convolutions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire.model.parts.convolution import ConvolutionConfig
from quire.model.tensors.recurrent import taps
from quire.model.tensors.stored import Shape, fused
from quire.weights.parts import Part, row_range

if TYPE_CHECKING:
    from quire.model.tensors import LayerTensors


def find(layer: LayerTensors, name: str, kind: str, shape: Shape) -> Part:
    """Find a piece of a gated convolution, whose b, c and x are one module."""
    config, names = layer.mixer(ConvolutionConfig), layer.names
    d, stored = config.hidden_size, layer.prefix + names["convolution.in"]
    if name == "out":
        return fused(names, layer.prefix + names["convolution.out"], kind, shape, None)
    if name == "taps":
        return taps(names, f"{layer.prefix}{names['convolution.taps']}", kind, d, config.taps)
    first = ("b", "c", "x").index(name) * d
    return fused(names, stored, kind, (3 * d, d), row_range(first, first + d))
