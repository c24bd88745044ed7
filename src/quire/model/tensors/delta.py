"""Finds the pieces of the delta rule: projections that are fused, by key head or not, and convolutions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire.model.parts.delta import DeltaConfig
from quire.model.tensors.recurrent import rates, taps
from quire.model.tensors.stored import Shape
from quire.weights.parts import Part, Take, chain, part, row_range, rows_of_groups
from quire.weights.tensor import Array

if TYPE_CHECKING:
    from quire.model.tensors import LayerTensors


def find(layer: LayerTensors, name: str, kind: str, shape: Shape) -> Part:
    """Find a piece by its path below the delta rule."""
    config, names = layer.mixer(DeltaConfig), layer.names
    if kind == "rates":
        return _rates(layer, config)
    if name.endswith("_taps"):
        return _taps(layer, config, name[0])
    if kind == "bias":
        size = shape[0] // config.value_heads
        return part(layer.prefix + names["delta.steps.bias"], shape, _untiled(layer, config, size))
    if name == "out" and names.tiled:
        return _tiled_out(layer, config, shape)
    module, size, take = _place(layer, config, name, shape)
    return part(f"{layer.prefix}{module}.{kind}", (size, *shape[1:]), take)


def _place(layer: LayerTensors, config: DeltaConfig, name: str, shape: Shape) -> tuple[str, int, Take | None]:
    """Find the module of a projection, its stored rows, and the part to take."""
    names, groups, k = layer.names, config.key_heads, config.key_dim
    each, keys, size = config.value_heads // config.key_heads, config.key_heads * k, shape[0]
    v = each * config.value_dim
    if name in ("q", "k", "v", "gate") and names["delta.qkvz"]:
        bounds = {"q": (0, k), "k": (k, 2 * k), "v": (2 * k, 2 * k + v), "gate": (2 * k + v, 2 * (k + v))}
        return names["delta.qkvz"], groups * 2 * (k + v), rows_of_groups(groups, *bounds[name])
    if name in ("beta", "steps") and names["delta.ba"]:
        first = 0 if name == "beta" else each
        return names["delta.ba"], groups * 2 * each, rows_of_groups(groups, first, first + each)
    take: Take | None = None
    if name in ("v", "gate", "beta", "steps"):
        take = _untiled(layer, config, size // config.value_heads)
    if name in ("q", "k", "v") and names["delta.qkv"]:
        start = ("q", "k", "v").index(name) * keys
        return names["delta.qkv"], 2 * keys + groups * v, chain(row_range(start, start + size), take)
    return names[f"delta.{name}"], size, take


def _taps(layer: LayerTensors, config: DeltaConfig, name: str) -> Part:
    """Find the weights of the convolution of queries, keys or values, in a module of their own or of all."""
    names = layer.names
    keys, values = config.key_heads * config.key_dim, config.value_heads * config.value_dim
    own, start = values if name == "v" else keys, ("q", "k", "v").index(name) * keys
    untiled = _untiled(layer, config, config.value_dim) if name == "v" else None
    if module := names[f"delta.{name}_taps"]:
        return taps(names, layer.prefix + module, "weight", own, config.taps, untiled)
    module, take = layer.prefix + names["delta.taps"], chain(row_range(start, start + own), untiled)
    return taps(names, module, "weight", 2 * keys + values, config.taps, take)


def _rates(layer: LayerTensors, config: DeltaConfig) -> Part:
    names, heads = layer.names, config.value_heads
    shape = (1, 1, heads, 1) if names.rates_axes else (heads,)
    return rates(names, layer.prefix + names["delta.rates"], shape, _untiled(layer, config, 1))


def _untiled(layer: LayerTensors, config: DeltaConfig, size: int) -> Take | None:
    """Bring tiled value heads of `size` rows into the order of their key heads."""
    groups, each = config.key_heads, config.value_heads // config.key_heads
    if not layer.names.tiled or each == 1:
        return None

    def take(array: Array) -> Array:
        if not any(array.strides):
            return array  # an outline, whose rows are all alike
        rest = array.shape[1:]
        return array.reshape(each, groups, size, *rest).swapaxes(0, 1).reshape(-1, *rest)

    return take


def _tiled_out(layer: LayerTensors, config: DeltaConfig, shape: Shape) -> Part:
    take = _untiled(layer, config, config.value_dim)
    stored = f"{layer.prefix}{layer.names['delta.out']}.weight"
    if take is None:
        return part(stored, shape)
    return Part(((stored, shape),), lambda array: take(array.T).T, shape)
