"""Finds the pieces of an indexer; elements that turn come first, in halves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from quire.model.tensors.stored import Shape, norm, places
from quire.weights.parts import Part, Take, chain, halves, part, row_range
from quire.weights.tensor import Array

if TYPE_CHECKING:
    from quire.model.tensors import LayerTensors


def find(layer: LayerTensors, name: str, kind: str, shape: Shape) -> Part:
    """Find a piece by its path below the indexer."""
    mixer: Any = layer.config.mixer
    names, rope, dim, take = layer.names, mixer.rope, mixer.indexer.keys.head_dim, None
    if name in ("q", "k") and names["indexer.qk"]:  # queries, then the key
        queries = mixer.indexer.num_heads * dim
        whole, first = (queries + dim, *shape[1:]), 0 if name == "q" else queries
        stored = f"{layer.prefix}{names['indexer.qk']}.{kind}"
        return part(stored, whole, row_range(first, first + shape[0]))
    module = layer.prefix + names[f"indexer.{name or kind}"]
    if (kind == "places" or name in ("q", "k", "gate", "q_norm", "k_norm")) and rope is not None:
        moved = last_first(dim, rope.rotary_dim) if names.index_last else None
        take = chain(moved, halves(dim, rope.rotary_dim) if names.index_interleaved else None)
    if kind == "places":
        return places(module, mixer.indexer.keys.size, shape, take)
    if name.endswith("norm"):
        return norm(names, module, kind, shape, take)
    alone = names[f"indexer.{name}.{kind}"]  # a tensor of no module
    stored = layer.prefix + alone if alone else f"{module}.{kind}" if name else module
    return part(stored, shape, take)


def last_first(head_dim: int, count: int) -> Take:
    """Reorder rows of heads: the last `count` of each head come first."""
    order = np.roll(np.arange(head_dim), count)

    def take(array: Array) -> Array:
        if not any(array.strides):
            return array  # an outline, whose rows are all alike
        return array.reshape(-1, head_dim, *array.shape[1:])[:, order].reshape(array.shape)

    return take
