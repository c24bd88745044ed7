"""A family's description in words: the fields of a spec that differ from their defaults."""

from __future__ import annotations

from typing import Any

import msgspec

from quire.model.spec import ArchSpec


def describe(spec: ArchSpec) -> dict[str, Any]:
    """Names of fields and their values as plain data. A field by layer is split by value, unless all layers agree."""
    return _fields(spec, spec.num_layers)


def _fields(struct: msgspec.Struct, layers: int) -> dict[str, Any]:
    found = {}
    for field in msgspec.structs.fields(struct):
        value = getattr(struct, field.name)
        if field.required or value != field.default:
            found[field.name] = _plain(value, layers)
    return found


def _plain(value: Any, layers: int) -> Any:
    if isinstance(value, msgspec.Struct):
        return _fields(value, layers)
    if isinstance(value, tuple) and len(value) == layers and not isinstance(value[0], float):
        return _by_layer([_plain(item, layers) for item in value])
    return list(value) if isinstance(value, tuple) else value


def _by_layer(values: list[Any]) -> Any:
    """One value if all layers have it; else the value of each range of layers."""
    kinds: list[Any] = []
    for value in values:
        if value not in kinds:
            kinds.append(value)
    if len(kinds) == 1:
        return kinds[0]
    return {_ranges([i for i, value in enumerate(values) if value == kind]): kind for kind in kinds}


def _ranges(layers: list[int]) -> str:
    """`layers 0-4, 6-10`."""
    runs: list[list[int]] = []
    for layer in layers:
        if runs and layer == runs[-1][1] + 1:
            runs[-1][1] = layer
        else:
            runs.append([layer, layer])
    return "layers " + ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
