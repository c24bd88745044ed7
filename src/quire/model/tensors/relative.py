"""Finds the pieces of scores by distance, which a family's own embeddings of distances make."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from quire.model.parts.attention import AttentionConfig
from quire.model.parts.relative import RelativeConfig
from quire.model.tensors.stored import Shape
from quire.weights.parts import Part
from quire.weights.tensor import Array

if TYPE_CHECKING:
    from quire.model.tensors import LayerTensors


def find(layer: LayerTensors, config: AttentionConfig, name: str, shape: Shape) -> Part:
    """Project the embeddings of distances by the rows that belong to a head: [2 span, H]."""
    names, (role, _, head) = layer.names, name.partition(".")
    relative = config.relative
    assert isinstance(relative, RelativeConfig)
    shared, h = relative.shared, config.head_dim
    module = names[f"attention.relative.{role}"]
    if shared:
        module = names["attention.k"] if role == "keys" else names["attention.q"]
    bias = role == "queries" or shared or names.relative_keys_bias
    d, size, eps = config.hidden_size, config.num_heads * h, layer.config.norm.eps
    own = slice(int(head) * h, (int(head) + 1) * h)
    norm, module = names["relative_norm"] if relative.normed else "", layer.prefix + module
    wanted: list[tuple[str, Shape]]
    wanted = [(f"{names['relative']}.weight", (2 * relative.span, d)), (f"{module}.weight", (size, d))]
    wanted += [(f"{module}.bias", (size,))] if bias else []
    wanted += [(f"{norm}.{kind}", (d,)) for kind in ("weight", "bias")] if norm else []

    def project(*arrays: Array) -> Array:
        table, weight, *others = arrays
        table = table.astype(np.float64)
        if norm:
            table = table - table.mean(axis=1, keepdims=True)
            table = table / np.sqrt((table * table).mean(axis=1, keepdims=True) + eps)
            table = table * others[-2] + others[-1]
        made = table @ weight[own].T.astype(np.float64)
        return np.asarray(made + others[0][own] if bias else made, np.float32)

    return Part(tuple(wanted), project, shape)
