"""Finds the pieces of Mamba-2's mixer, whose products are one module: z, x, B, C and dt."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from quire.model.parts.state_space import StateSpaceConfig
from quire.model.tensors.recurrent import rates, scan_module, taps
from quire.model.tensors.stored import Shape, fused
from quire.weights.parts import Part, part, row_range

if TYPE_CHECKING:
    from quire.model.tensors import LayerTensors

VECTORS = {"steps": "dt_bias", "skip": "D"}


def find(layer: LayerTensors, name: str, kind: str, shape: Shape) -> Part:
    """Find a piece by its path below the mixer."""
    config, names = layer.mixer(StateSpaceConfig), layer.names
    own = partial(scan_module, layer, "state_space")
    if kind == "rates":
        return rates(names, own("A_log"), shape)
    if not name:
        return part(own(VECTORS[kind]), shape)
    if name == "norm":
        return part(f"{own('norm')}.{kind}", shape)
    if name == "taps":
        return taps(names, own("conv1d"), kind, config.channels, config.taps)
    if name == "out":
        return fused(names, own("out_proj"), kind, shape, None)
    first = {"z": 0, "xbc": config.inner, "dt": config.inner + config.channels}[name]
    size = config.inner + config.channels + config.num_heads
    return fused(names, own("in_proj"), kind, (size, config.hidden_size), row_range(first, first + shape[0]))
