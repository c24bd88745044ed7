"""Finds what a layer's use adds to a block that layers share, and what joins the block to the layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire.model.tensors.stored import Shape, linear
from quire.weights.parts import Part, part, row_range

if TYPE_CHECKING:
    from quire.model.tensors import LayerTensors


def find(layer: LayerTensors, name: str, kind: str, shape: Shape) -> Part:
    """Find a piece by the module that is added to, the number of the use, and its end."""
    if not name:
        return linear(layer.names, layer.prefix + layer.names["join"], shape)
    module, use, end = name.split(".")
    stored = f"{layer.prefix}{layer.names[f'low.{module}']}.{use}.{int(end != 'down')}.weight"
    if module != "gate_up" or end == "down":
        return part(stored, shape)
    first = shape[0] * (end == "up")
    return part(stored, (2 * shape[0], shape[1]), row_range(first, first + shape[0]))
