"""Finds the pieces of convolutions and recurrences, whose rates and taps families store in several ways."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from quire.errors import ModelError
from quire.model.families.names import TensorNames
from quire.model.parts.convolution import ConvolutionConfig
from quire.model.parts.gated_recurrence import GatedRecurrenceConfig
from quire.model.parts.lightning import LightningConfig
from quire.model.parts.selective import SelectiveConfig
from quire.model.parts.state_space import StateSpaceConfig
from quire.model.tensors.stored import Shape, fused, linear
from quire.weights.parts import Part, Take, chain, part, row_range, rows_of_groups
from quire.weights.tensor import Array

if TYPE_CHECKING:
    from quire.model.tensors import LayerTensors

RATES: dict[str, Callable[[Array], Array]] = {  # what files hold in place of rates
    "logarithms": np.exp,
    "negative": np.negative,
    "softplus": lambda values: 8.0 * np.logaddexp(0.0, values),  # the RG-LRU's parameter
}


def scan_module(layer: LayerTensors, mixer: str, name: str) -> str:
    """Name a module of a scan, or a tensor that is its own."""
    return layer.prefix + layer.names[mixer] + (layer.names[f"scan.{name}"] or name)


def taps(
    names: TensorNames, module: str, kind: str, channels: int, count: int, take: Take | None = None
) -> Part:
    """Take rows of the weights [C, 1, K] of a convolution by channel, one after the other, or of its biases."""
    if kind == "bias":
        return part(f"{module}.bias", (channels,), take)
    flat: Take = lambda array: array.reshape(-1)  # noqa: E731
    return part(f"{module}.{kind}", (channels, *names.taps_axes, count), chain(take, flat))


def rates(names: TensorNames, module: str, shape: Shape, take: Take | None = None) -> Part:
    """Take the positive rates of a recurrence, which files hold in another form."""

    def positive(array: Array) -> Array:
        values = array.reshape(-1).astype(np.float64)
        with np.errstate(over="ignore"):
            found = RATES[names.rates](values)
        if not (np.isfinite(found) & (found >= 0)).all():
            raise ModelError(f"{module} must hold finite numbers; the file is damaged")
        return np.asarray(found, np.float32)

    return part(module, shape, chain(positive, take))


def find_convolution(layer: LayerTensors, name: str, kind: str, shape: Shape) -> Part:
    """Find a piece of a gated convolution, whose b, c and x are one module."""
    config, names = layer.mixer(ConvolutionConfig), layer.names
    d, stored = config.hidden_size, layer.prefix + names["convolution.in"]
    if name == "out":
        return fused(names, layer.prefix + names["convolution.out"], kind, shape, None)
    if name == "taps":
        return taps(names, f"{layer.prefix}{names['convolution.taps']}", kind, d, config.taps)
    first = ("b", "c", "x").index(name) * d
    return fused(names, stored, kind, (3 * d, d), row_range(first, first + d))


VECTORS = {"steps": "dt_bias", "skip": "D"}


def find_state_space(layer: LayerTensors, name: str, kind: str, shape: Shape) -> Part:
    """Find a piece by its path below the mixer."""
    config, names = layer.mixer(StateSpaceConfig), layer.names
    own = partial(scan_module, layer, "state_space")
    if kind == "rates":
        return rates(names, own("A_log"), shape)
    if not name:
        return part(own(VECTORS[kind]), shape)
    if name == "norm":
        return part(f"{own('norm')}.{kind}", shape)
    if name == "taps":
        return taps(names, own("conv1d"), kind, config.channels, config.taps)
    if name == "out":
        return fused(names, own("out_proj"), kind, shape, None)
    first = {"z": 0, "xbc": config.inner, "dt": config.inner + config.channels}[name]
    size = config.inner + config.channels + config.num_heads
    return fused(names, own("in_proj"), kind, (size, config.hidden_size), row_range(first, first + shape[0]))


def find_selective(layer: LayerTensors, name: str, kind: str, shape: Shape) -> Part:
    """Find a piece by its path below the mixer."""
    config, names = layer.mixer(SelectiveConfig), layer.names
    own, inner, n = partial(scan_module, layer, "selective"), config.inner, config.state_dim
    if kind == "rates":
        return rates(names, own("A_log"), (inner, n))
    if kind == "skip":
        return part(own("D"), shape)
    if name == "taps":
        return taps(names, own("conv1d"), kind, inner, config.taps)
    if name == "steps_norm":
        return part(f"{own('dt_layernorm')}.weight", shape)
    if name == "bc_norm":
        stored = tuple((f"{own(f'{letter}_layernorm')}.weight", (n,)) for letter in "bc")
        return Part(stored, lambda b, c: np.concatenate([b, c]), shape)
    if name in ("out", "steps"):
        module = "out_proj" if name == "out" else "dt_proj"
        return fused(names, own(module), kind, shape, None)
    module, first, size = {
        "x": ("in_proj", 0, (2 * inner, config.hidden_size)),
        "gate": ("in_proj", inner, (2 * inner, config.hidden_size)),
        "down": ("x_proj", 0, (config.rank + 2 * n, inner)),
        "bc": ("x_proj", config.rank, (config.rank + 2 * n, inner)),
    }[name]
    return fused(names, own(module), kind, size, row_range(first, first + shape[0]))


def find_lightning(layer: LayerTensors, name: str, kind: str, shape: Shape) -> Part:
    """Find a piece by its path below the mixer."""
    config, names = layer.mixer(LightningConfig), layer.names
    if name == "out":
        return linear(names, layer.prefix + names["lightning.out"], shape)
    first = "qkv".index(name) * config.head_dim
    take = rows_of_groups(config.num_heads, first, first + config.head_dim)
    return linear(names, layer.prefix + names["lightning.qkv"], (3 * shape[0], shape[1]), take)


MODULES = {"x": "linear_x", "gate": "linear_y", "out": "linear_out"}


def find_gated_recurrence(layer: LayerTensors, name: str, kind: str, shape: Shape) -> Part:
    """Find a piece by its path below the mixer."""
    config, names = layer.mixer(GatedRecurrenceConfig), layer.names
    prefix, blocks, size = layer.prefix + names["gated_recurrence"], config.num_heads, config.size
    if kind == "rates":
        return rates(names, f"{prefix}rg_lru.recurrent_param", shape)
    if name == "taps":
        return taps(names, f"{prefix}conv_1d", kind, blocks * size, config.taps)
    if name in MODULES:
        return fused(names, prefix + MODULES[name], kind, shape, None)
    gate, _, block = name.partition(".")
    if kind == "bias":
        return part(f"{prefix}rg_lru.{gate}_bias", (blocks, size), np.ravel)
    return part(f"{prefix}rg_lru.{gate}_weight", (blocks, size, size), lambda array: array[int(block)].T)
