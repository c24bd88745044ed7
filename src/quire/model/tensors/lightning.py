"""Finds the pieces of lightning attention; queries, keys and values of a head lie together in one module."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire.model.parts.lightning import LightningConfig
from quire.model.tensors.stored import Shape, linear
from quire.weights.parts import Part, rows_of_groups

if TYPE_CHECKING:
    from quire.model.tensors import LayerTensors


def find(layer: LayerTensors, name: str, kind: str, shape: Shape) -> Part:
    """Find a piece by its path below the mixer."""
    config, names = layer.mixer(LightningConfig), layer.names
    if name == "out":
        return linear(names, layer.prefix + names["lightning.out"], shape)
    first = "qkv".index(name) * config.head_dim
    take = rows_of_groups(config.num_heads, first, first + config.head_dim)
    return linear(names, layer.prefix + names["lightning.qkv"], (3 * shape[0], shape[1]), take)
