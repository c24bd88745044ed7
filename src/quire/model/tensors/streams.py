"""Finds the weights of residual streams."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire.model.families.names import TensorNames
from quire.model.tensors.stored import Shape, norm
from quire.weights.parts import Part, part

if TYPE_CHECKING:
    from quire.model.tensors import LayerTensors, Tensors

# By kind, the vectors and matrices of hyper-connections, and the modules of gated streams.
KINDS = {"gates.weight": "fn", "scales": "scale", "biases": "base"}
MODULES = {
    "norm": "hc_norm",
    "down": "input_mix_weight_down",
    "up": "input_mix_weight_up",
    "join": "block_inject_weight",
}


def find(layer: LayerTensors, module: str, kind: str, shape: Shape) -> Part:
    """Find those of attention or of an MLP."""
    group, _, name = module.partition(".")
    return _find(layer.names, layer.prefix + layer.names[group], name, kind, shape)


def find_model(tensors: Tensors, name: str, kind: str, shape: Shape) -> Part:
    """Find those at the end of the model."""
    return _find(tensors.names, tensors.names["streams"], name, kind, shape)


def _find(names: TensorNames, prefix: str, name: str, kind: str, shape: Shape) -> Part:
    if name not in MODULES:
        return part(prefix + KINDS[f"{name}.{kind}".lstrip(".")], shape)
    stored = prefix + MODULES[name]
    return norm(names, stored, kind, shape) if name == "norm" else part(f"{stored}.{kind}", shape)
