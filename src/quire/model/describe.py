"""Describes a model in words: the fields of its tree of configs that differ from their defaults."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from quire.model.parts.decoder import DecoderConfig
from quire.model.parts.part import Part, kind_of

Layers = Sequence[tuple[int, Any]]
"""Layers pair the indices of layers with their values."""


def describe(config: DecoderConfig) -> dict[str, Any]:
    """Give names of fields and their values as plain data. A field of layers is split by value, unless all agree."""
    layers = _by_layer(list(enumerate(config.layers)))
    rest = msgspec.structs.replace(config, layers=())
    return {**_fields(rest), "num_layers": config.num_layers, "layers": layers}


def _fields(struct: msgspec.Struct) -> dict[str, Any]:
    found = _kind(struct)
    for field in msgspec.structs.fields(struct):
        value = getattr(struct, field.name)
        if field.required or value != field.default:
            found[field.name] = _plain(value)
    return found


def _kind(struct: msgspec.Struct) -> dict[str, Any]:
    return {"kind": kind_of(struct)} if isinstance(struct, Part) else {}


def _plain(value: Any) -> Any:
    if isinstance(value, msgspec.Struct):
        return _fields(value)
    return list(value) if isinstance(value, tuple) else value


def _by_layer(given: Layers) -> Any:
    """Give one value if all layers have it; structs field by field; else the value of each range of layers."""
    values = [value for _, value in given]
    if all(value == values[0] for value in values):
        return _plain(values[0])
    if all(isinstance(value, msgspec.Struct) and type(value) is type(values[0]) for value in values):
        found = _kind(values[0])
        for field in msgspec.structs.fields(values[0]):
            own = [(i, getattr(value, field.name)) for i, value in given]
            if field.required or any(value != field.default for _, value in own):
                found[field.name] = _by_layer(own)
        return found
    kinds: list[tuple[Any, list[tuple[int, Any]]]] = []
    for i, value in given:
        key = type(value) if isinstance(value, msgspec.Struct) else value
        same = next((members for kind, members in kinds if kind == key), None)
        if same is None:
            kinds.append((key, [(i, value)]))
        else:
            same.append((i, value))
    return {_ranges([i for i, _ in members]): _by_layer(members) for _, members in kinds}


def _ranges(layers: list[int]) -> str:
    """Format `layers 0-4, 6-10`."""
    runs: list[list[int]] = []
    for layer in layers:
        if runs and layer == runs[-1][1] + 1:
            runs[-1][1] = layer
        else:
            runs.append([layer, layer])
    return "layers " + ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
