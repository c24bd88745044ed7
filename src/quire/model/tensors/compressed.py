"""Finds the pieces of attention over compressed entries. Elements that turn are the last of a head, and neighbours."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire.model.parts.compressed import CompressedConfig
from quire.model.tensors.indexer import last_first
from quire.model.tensors.stored import Shape, norm, places
from quire.weights.parts import Part, Take, chain, halves, part, row_range, transposed

if TYPE_CHECKING:
    from quire.model.tensors import LayerTensors


def find(layer: LayerTensors, name: str, kind: str, shape: Shape) -> Part:
    """Find a piece by its path below attention; elements that turn are put first, in halves."""
    config = layer.mixer(CompressedConfig)
    turn = turned_first(config.head_dim, config.rope.rotary_dim)
    if kind == "places":
        assert config.keys is not None
        return places(layer.prefix + layer.names["compressed.entries.places"], config.keys.size, shape, turn)
    base, _, group = name.partition(".")
    stored = layer.prefix + layer.names[f"compressed.{base if base == 'low' else name}"]
    if base == "low":
        rows, first = config.groups * shape[0], int(group) * shape[0]
        take = chain(row_range(first, first + shape[0]), transposed, turn, transposed)
        return Part(((f"{stored}.{kind}", (rows, shape[1])),), take, shape)  # columns move: it keeps no codes
    turn = None if name in ("q_down", "q_norm", "out") else turn
    return (
        norm(layer.names, stored, kind, shape, turn)
        if name.endswith("norm")
        else part(f"{stored}.{kind}", shape, turn)
    )


def turned_first(head_dim: int, rotary_dim: int) -> Take | None:
    """Reorder rows of heads: the last `rotary_dim` of each come first, in halves."""
    return chain(last_first(head_dim, rotary_dim), halves(head_dim, rotary_dim))
