"""Finds the pieces of what Gemma 3n adds to layers, and of the ends of its streams."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire.model.parts.gemma3n import ModelExtrasConfig
from quire.model.tensors.stored import Shape, linear, norm
from quire.weights.parts import Part, part, row_range

if TYPE_CHECKING:
    from quire.model.tensors import LayerTensors, Tensors

# Modules of LAuReL and AltUp, below the prefixes of these names.
ADDITIONS = {
    "laurel.left": "linear_left",
    "laurel.right": "linear_right",
    "altup.router": "modality_router",
    "altup.predict": "prediction_coefs",
    "altup.correct": "correction_coefs",
}
ADDED_NORMS = {"laurel.norm": "post_laurel_norm", "altup.router_norm": "router_norm"}


def find(layer: LayerTensors, module: str, kind: str, shape: Shape) -> Part:
    """Find a piece by its module below the layer."""
    names, (group, _, name) = layer.names, module.partition(".")
    if group == "input":
        return _input(layer, name, kind, shape)
    prefix = layer.prefix + names[group]
    if module in ADDED_NORMS:
        return norm(names, prefix + ADDED_NORMS[module], kind, shape)
    if module in ADDITIONS:
        return linear(names, prefix + ADDITIONS[module], shape)
    return part(f"{prefix}correct_output_scale", shape)


def _input(layer: LayerTensors, name: str, kind: str, shape: Shape) -> Part:
    names, (size, *rest) = layer.names, shape
    if name == "norm":
        return norm(names, names["input.norm"], kind, shape)
    own = row_range(layer.index * size, (layer.index + 1) * size)
    return part(f"{names['input.model']}.weight", (layer.count * size, *rest), own)


def find_model(tensors: Tensors, base: str, number: str, shape: Shape) -> Part:
    """Find a projection of a stream, or stored rows of the table of inputs by layer; other tokens get the first one."""
    names, additions = tensors.names, tensors.config.additions
    if base in ("spread", "merge"):
        return linear(names, names[base].format(s=number), shape)
    assert isinstance(additions, ModelExtrasConfig)
    assert additions.inputs is not None
    stored = f"{names['layer_inputs']}.weight", (additions.inputs.vocab_size, shape[1])
    return part(*stored, (lambda array: array[[0] * shape[0]]) if number == "others" else None)
