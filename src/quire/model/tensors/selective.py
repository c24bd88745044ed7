"""Finds the pieces of Mamba-1's mixer."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from quire.model.parts.selective import SelectiveConfig
from quire.model.tensors.recurrent import rates, scan_module, taps
from quire.model.tensors.stored import Shape, fused
from quire.weights.parts import Part, part, row_range

if TYPE_CHECKING:
    from quire.model.tensors import LayerTensors


def find(layer: LayerTensors, name: str, kind: str, shape: Shape) -> Part:
    """Find a piece by its path below the mixer."""
    config, names = layer.mixer(SelectiveConfig), layer.names
    own, inner, n = partial(scan_module, layer, "selective"), config.inner, config.state_dim
    if kind == "rates":
        return rates(names, own("A_log"), (inner, n))
    if kind == "skip":
        return part(own("D"), shape)
    if name == "taps":
        return taps(names, own("conv1d"), kind, inner, config.taps)
    if name == "steps_norm":
        return part(f"{own('dt_layernorm')}.weight", shape)
    if name == "bc_norm":
        stored = tuple((f"{own(f'{letter}_layernorm')}.weight", (n,)) for letter in "bc")
        return Part(stored, lambda b, c: np.concatenate([b, c]), shape)
    if name in ("out", "steps"):
        module = "out_proj" if name == "out" else "dt_proj"
        return fused(names, own(module), kind, shape, None)
    module, first, size = {
        "x": ("in_proj", 0, (2 * inner, config.hidden_size)),
        "gate": ("in_proj", inner, (2 * inner, config.hidden_size)),
        "down": ("x_proj", 0, (config.rank + 2 * n, inner)),
        "bc": ("x_proj", config.rank, (config.rank + 2 * n, inner)),
    }[name]
    return fused(names, own(module), kind, size, row_range(first, first + shape[0]))
