"""Finds the pieces of latent attention."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire.model.parts.latent import LatentConfig
from quire.model.tensors.stored import Shape, linear, norm
from quire.weights.parts import Part, Take, chain, halves, part, row_range, rows_of_groups, transposed

if TYPE_CHECKING:
    from quire.model.tensors import LayerTensors


def find(layer: LayerTensors, name: str, kind: str, shape: Shape) -> Part:
    """Find a piece by its path below attention."""
    config = layer.mixer(LatentConfig)
    if name in ("out", "gate"):
        return linear(layer.names, layer.prefix + layer.names[f"attention.{name}"], shape)
    names, nope, rope = layer.names, config.nope_dim, config.rope_dim
    turn = halves(rope, rope) if names.interleaved else None
    if kind in ("growths", "bases"):
        return part(layer.prefix + names[f"attention.{kind}"], shape)
    if name == "q_norm":
        return norm(names, layer.prefix + names["attention.q_down_norm"], kind, shape)
    if name in ("q_nope", "q_rope"):
        module = layer.prefix + (names["attention.q"] if config.q_rank is None else names["attention.q_up"])
        take: Take | None = rows_of_groups(config.num_heads, 0, nope)
        if name == "q_rope":
            take = chain(rows_of_groups(config.num_heads, nope, nope + rope), turn)
        return part(f"{module}.weight", (config.num_heads * (nope + rope), *shape[1:]), take)
    if name.startswith("kv_down"):
        picked: Take | None
        rank, size = config.kv_rank, config.kv_rank + rope
        latent = name.endswith("latent")
        picked = row_range(0, rank) if latent else chain(row_range(rank, size), turn)
        return part(f"{layer.prefix}{names['attention.kv_down']}.{kind}", (size, *shape[1:]), picked)
    name, _, head = name.partition(".")
    size = nope + config.value_dim
    first = int(head) * size
    rows: Take | None = row_range(first + nope, first + size)
    if name == "keys":
        rows = chain(row_range(first, first + nope), transposed)
    return part(
        f"{layer.prefix}{names['attention.kv_up']}.weight", (config.num_heads * size, config.kv_rank), rows
    )
