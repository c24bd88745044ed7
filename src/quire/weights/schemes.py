"""The names of `--quantization` and the types that they give each weight. Knows layouts; knows no model."""

from __future__ import annotations

from typing import Literal

import msgspec

from quire.errors import ConfigError
from quire.weights.layouts import AnyLayout, Int4, Int8
from quire.weights.tensor import FloatDtype

GROUPS = (32, 64, 128)

Activations = Literal["float", "int8"]


class Quantized(msgspec.Struct, frozen=True):
    """The type of a quantized weight, and of the activations that multiply it.

    With "int8", activations are rounded to int8 with one scale per row (token), and products are summed as integers.
    """

    layout: AnyLayout
    activations: Activations = "int8"


WeightType = FloatDtype | Quantized


def rounds_activations(weight: WeightType) -> bool:
    return isinstance(weight, Quantized) and weight.activations == "int8"


class Scheme(msgspec.Struct, frozen=True):
    """The types of a quantized model's matrices: those of products, and the tables of embedding and head."""

    linear: Quantized
    table: Quantized


def scheme(name: str, group_size: int = 64, symmetric: bool = True, pure: bool = False) -> Scheme | None:
    """The types that `--quantization NAME` means; None for "auto", which leaves weights as they are.

    Four bits are few for the embedding and the head, so they get eight unless `pure`. Raises ConfigError.
    """
    if pure and name not in ("int4", "int4wo"):
        raise ConfigError(
            "--quantization-pure is for --quantization int4 or int4wo; leave it out, or choose one"
        )
    if name == "auto":
        return None
    if group_size not in GROUPS:
        raise ConfigError(f"--quantization-group-size must be 32, 64 or 128, got {group_size}")
    activations: Activations = "float" if name.endswith("wo") else "int8"
    int8 = Quantized(Int8(), activations)
    if name in ("int8", "int8wo"):
        return Scheme(int8, int8)
    if name in ("int4", "int4wo"):
        int4 = Quantized(Int4(group_size, symmetric), activations)
        return Scheme(int4, int4 if pure else int8)
    raise ConfigError(f"--quantization must be auto, int8, int8wo, int4 or int4wo, got {name!r}")


def weights_name(scheme: Scheme | None, dtype: str) -> str:
    """The weights' types, as logs and tables name them."""
    if scheme is None:
        return dtype
    weights, layout = scheme.linear, scheme.linear.layout
    name = layout.name + ("wo" if weights.activations == "float" else "")
    if isinstance(layout, Int4):
        name += f", groups of {layout.group_size}"
        name += "" if layout.symmetric else ", asymmetric"
        name += ", pure" if scheme.table == weights else ""
    return name
