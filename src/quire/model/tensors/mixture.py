"""Finds the pieces of a mixture of experts."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from quire.errors import ModelError
from quire.model.families.names import LLAMA_NAMES
from quire.model.parts.mixture import MixtureConfig
from quire.model.tensors.stored import Shape
from quire.weights.parts import Part, part, row_range
from quire.weights.tensor import Array

if TYPE_CHECKING:
    from quire.model.tensors import LayerTensors


def find(layer: LayerTensors, name: str, kind: str, shape: Shape) -> Part:
    """Find a piece by its path below the mixture."""
    config = layer.config.mlp
    assert isinstance(config, MixtureConfig)
    names, (group, _, rest) = layer.names, name.partition(".")
    if kind == "correction":
        stored = layer.prefix + names["mixture.correction"]
        return (
            part(stored, (1, *shape), lambda array: array[0]) if names.correction_row else part(stored, shape)
        )
    if kind == "table":
        return part(
            layer.prefix + names["mixture.table"], shape, partial(_numbers, config.routing.num_experts)
        )
    if group == "shared":
        return _shared(layer, config, rest, shape)
    number, _, matrix = rest.partition(".")
    if names.expert_stack:
        return _stacked(layer, config, int(number), matrix, kind)
    module = names[f"mixture.expert.{matrix}"]
    return part(f"{layer.prefix}{names['mixture.experts'].format(e=number)}{module}.{kind}", shape)


def _numbers(count: int, table: Array) -> Array:
    """Take a table of experts. ModelError: one names an expert that there is not."""
    if table.size and not 0 <= int(table.min()) <= int(table.max()) < count:
        raise ModelError(
            f"a table of tokens names experts beyond the {count} that there are; the file is damaged"
        )
    return table.astype(np.float32)


def _shared(layer: LayerTensors, config: MixtureConfig, matrix: str, shape: Shape) -> Part:
    names, inner = layer.names, config.shared_intermediate_size
    prefix = layer.prefix + names["mixture.shared"]
    if not names["mixture.shared.gate_up"]:
        modules = LLAMA_NAMES if names.expert_stack or names.plain_shared else names
        module = names[f"mixture.shared.{matrix}.apart"] or modules[f"mixture.expert.{matrix}"]
        return part(f"{prefix}{module}.weight", shape)
    if matrix == "down":
        return part(f"{prefix}{names['mixture.shared.down']}.weight", shape)
    take = row_range(0, inner) if matrix == "gate" else row_range(inner, 2 * inner)
    return part(f"{prefix}{names['mixture.shared.gate_up']}.weight", (2 * inner, *shape[1:]), take)


def _stacked(layer: LayerTensors, config: MixtureConfig, e: int, matrix: str, kind: str) -> Part:
    """Find a matrix or bias of expert e in tensors that hold all experts."""
    names, d, inner = layer.names, config.hidden_size, config.intermediate_size
    count, place = config.routing.num_experts, int(matrix == "up")
    if matrix == "down":
        name, out, width, of = names["mixture.expert.down"], d, inner, 1
    elif names["mixture.expert.gate_apart"]:
        name, out, width, of = names["mixture.expert.up"], inner, d, 1
        name, place = (names["mixture.expert.gate_apart"] if matrix == "gate" else name), 0
    else:
        name, out, width, of = names["mixture.expert.up"], 2 * inner, d, 2
    whole = layer.prefix + names["mixture.experts"] + name
    if kind == "bias":
        if matrix == "down":
            return part(f"{whole}_bias", (count, d), lambda array: array[e])
        whole = f"{layer.prefix}{names['mixture.experts']}{names['mixture.expert.up']}_bias"
        first = int(matrix == "up")
        return part(whole, (count, 2 * inner), lambda array: array[e, first::2])
    taken = slice(place, None, of)
    if names.expert_halves:
        taken = slice(place * out // of, (place + 1) * out // of)
    if names.expert_stack == "columns":
        return part(whole, (count, width, out), lambda array: array[e].T[taken])
    return part(whole, (count, out, width), lambda array: array[e, taken])
