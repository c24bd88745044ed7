"""Finds the weights of residual streams."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire.model.tensors.stored import Shape
from quire.weights.parts import Part, part

if TYPE_CHECKING:
    from quire.model.tensors import LayerTensors, Tensors

KINDS = {"weight": "fn", "scales": "scale", "biases": "base"}


def find(layer: LayerTensors, module: str, kind: str, shape: Shape) -> Part:
    """Find those of attention or of an MLP."""
    return part(layer.prefix + layer.names[module.partition(".")[0]] + KINDS[kind], shape)


def find_model(tensors: Tensors, kind: str, shape: Shape) -> Part:
    """Find those at the end of the model."""
    return part(tensors.names["streams"] + KINDS[kind], shape)
