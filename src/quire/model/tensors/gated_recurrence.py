"""Finds the pieces of the RG-LRU, whose gates are tensors [blocks, in, out]."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from quire.model.parts.gated_recurrence import GatedRecurrenceConfig
from quire.model.tensors.recurrent import rates, taps
from quire.model.tensors.stored import Shape, fused
from quire.weights.parts import Part, part

if TYPE_CHECKING:
    from quire.model.tensors import LayerTensors

MODULES = {"x": "linear_x", "gate": "linear_y", "out": "linear_out"}


def find(layer: LayerTensors, name: str, kind: str, shape: Shape) -> Part:
    """Find a piece by its path below the mixer."""
    config, names = layer.mixer(GatedRecurrenceConfig), layer.names
    prefix, blocks, size = layer.prefix + names["gated_recurrence"], config.num_heads, config.size
    if kind == "rates":
        return rates(names, f"{prefix}rg_lru.recurrent_param", shape)
    if name == "taps":
        return taps(names, f"{prefix}conv_1d", kind, blocks * size, config.taps)
    if name in MODULES:
        return fused(names, prefix + MODULES[name], kind, shape, None)
    gate, _, block = name.partition(".")
    if kind == "bias":
        return part(f"{prefix}rg_lru.{gate}_bias", (blocks, size), np.ravel)
    return part(f"{prefix}rg_lru.{gate}_weight", (blocks, size, size), lambda array: array[int(block)].T)
