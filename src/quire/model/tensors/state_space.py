"""Finds the pieces of Mamba-2's mixer, whose products are one module: z, x, B, C and dt."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire.model.parts.state_space import StateSpaceConfig
from quire.model.tensors.recurrent import rates, taps
from quire.model.tensors.stored import Shape, fused
from quire.weights.parts import Part, part, row_range

if TYPE_CHECKING:
    from quire.model.tensors import LayerTensors

VECTORS = {"steps": "dt_bias", "skip": "D"}


def find(layer: LayerTensors, name: str, kind: str, shape: Shape) -> Part:
    """Find a piece by its path below the mixer."""
    config, names = layer.mixer(StateSpaceConfig), layer.names
    prefix = layer.prefix + names["state_space"]
    if kind == "rates":
        return rates(names, f"{prefix}A_log", shape)
    if not name:
        return part(prefix + VECTORS[kind], shape)
    if name == "norm":
        return part(f"{prefix}norm.{kind}", shape)
    if name == "taps":
        return taps(names, f"{prefix}conv1d", kind, config.channels, config.taps)
    if name == "out":
        return fused(names, f"{prefix}out_proj", kind, shape, None)
    first = {"z": 0, "xbc": config.inner, "dt": config.inner + config.channels}[name]
    size = config.inner + config.channels + config.num_heads
    return fused(
        names, f"{prefix}in_proj", kind, (size, config.hidden_size), row_range(first, first + shape[0])
    )
