"""Maps the names of `--quantization` to the types that they give each weight. Knows layouts; knows no model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal

import msgspec

from quire.errors import ConfigError
from quire.weights.activations import KeptActivations, Rounding
from quire.weights.layouts import AnyLayout, Blocks, Int4, Int8
from quire.weights.tensor import FloatDtype, Layout

GROUPS = (32, 64, 128)
# METHODS of quantized checkpoints by the names that `--quantization` takes, which are vLLM's.
METHODS: Mapping[str, str] = {
    **{name: name for name in ("auto-round", "awq", "bitsandbytes", "compressed-tensors", "fbgemm_fp8", "fp8", "gguf",
                               "gptq", "hqq", "modelopt", "mxfp4", "mxfp8", "quark", "squeezellm", "torchao")},
    "awq_marlin": "awq",
    "gptq_marlin": "gptq",
    "inc": "auto-round",
    "modelopt_fp4": "modelopt",
}  # fmt: skip

# FLOAT_KINDS round float checkpoints to blocks of a kind, and check that quantized ones use that method.
FLOAT_KINDS = {"fp8": "e4m3", "mxfp4": "mxfp4", "nvfp4": "nvfp4"}
Activations = Literal["float", "int8"]
Asked = Literal["auto", "int8", "float", "checkpoint"]  # what --quantization-activations takes


class Quantized(msgspec.Struct, frozen=True):
    """The type of a quantized weight, and of the activations that multiply it.

    With "int8", activations are rounded to int8 with one scale per row (token), and products are summed as integers.
    A `Rounding` rounds them first; products stay float unless it has one scale in int8 for all rows.
    """

    layout: AnyLayout
    activations: Activations | Rounding = "int8"


WeightType = FloatDtype | Quantized


class Kept(msgspec.Struct, frozen=True, tag="kept"):
    """Weights stay as the checkpoint quantized them, and are multiplied with activations of this type.

    `kinds` names their types once they are known, the most frequent first; `layout` is the layout of the first.
    """

    activations: KeptActivations
    kinds: tuple[str, ...] = ()
    layout: AnyLayout | None = None

    @property
    def linear(self) -> Quantized | None:
        """Return the type of most weights, once it is known."""
        if self.layout is None:
            return None
        # Products stay float however else a checkpoint rounds activations.
        published = self.activations == "checkpoint" and isinstance(self.layout, Int8)
        integers = published or (self.activations == "int8" and not self.layout.floats)
        return Quantized(self.layout, "int8" if integers else "float")


def input_rounding(weight: WeightType, layouts: Iterable[Layout] = ()) -> Rounding | None:
    """Tell how a weight's activations are rounded; None if they stay float.

    `layouts` are its parts' layouts; the widest block counts.
    """
    if not isinstance(weight, Quantized) or weight.activations == "float":
        return None
    if isinstance(weight.activations, Rounding):
        return weight.activations
    columns = max([weight.layout.rounds, *(layout.rounds for layout in layouts)])
    return Rounding(number="int8", columns=columns)


def multiplies_integers(weight: WeightType) -> bool:
    """Whether products with a weight are summed as integers."""
    if not isinstance(weight, Quantized) or weight.activations == "float":
        return False
    return weight.activations == "int8" or (
        isinstance(weight.layout, (Int4, Int8)) and weight.activations.is_int8_of_all
    )


class Scheme(msgspec.Struct, frozen=True, tag="scheme"):
    """The types of a quantized model's matrices: of products, and of the tables of embedding and head."""

    linear: Quantized
    table: Quantized


Quantization = Scheme | Kept


def scheme(
    name: str,
    group_size: int = 64,
    symmetric: bool = True,
    pure: bool = False,
    activations: Asked = "auto",
    rounds: bool = False,
) -> Quantization | None:
    """Choose the types that `--quantization NAME` means; None for names that leave weights as they are.

    With `rounds` the checkpoint holds floats, which fp8, mxfp4 and nvfp4 round too. Four bits are few for the
    embedding and the head, so they get eight unless `pure`. Raises ConfigError.
    """
    if pure and name not in ("int4", "int4wo"):
        raise ConfigError(
            "--quantization-pure is for --quantization int4 or int4wo; leave it out, or choose one"
        )
    if activations == "checkpoint" and (rounds or name not in ("auto", *METHODS)):
        raise ConfigError(
            "--quantization-activations checkpoint is for checkpoints that are quantized, and stay so: leave it out"
        )
    if name.endswith("wo") and activations == "int8":
        raise ConfigError(
            f"--quantization {name} leaves activations float; leave out --quantization-activations int8, or wo"
        )
    if name in FLOAT_KINDS and (rounds or name not in METHODS):
        return _float_scheme(name, activations)
    if name == "auto" or name in METHODS:
        return None if activations == "auto" else Kept(activations)
    if group_size not in GROUPS:
        raise ConfigError(f"--quantization-group-size must be 32, 64 or 128, got {group_size}")
    kind: Activations = "float" if name.endswith("wo") or activations == "float" else "int8"
    int8 = Quantized(Int8(), kind)
    if name in ("int8", "int8wo"):
        return Scheme(int8, int8)
    if name in ("int4", "int4wo"):
        int4 = Quantized(Int4(group_size, symmetric), kind)
        return Scheme(int4, int4 if pure else int8)
    raise ConfigError(
        f"--quantization must be auto, int8, int8wo, int4, int4wo, fp8, mxfp4 or nvfp4, got {name!r}"
    )


def _float_scheme(name: str, activations: Asked) -> Scheme:
    """Make the scheme of FP8, MXFP4 or NVFP4; activations stay float unless int8 is asked for (not with FP8)."""
    blocks = Blocks(FLOAT_KINDS[name])
    if activations == "int8" and blocks.floats:
        raise ConfigError(
            f"--quantization-activations int8 multiplies integers, which {name} does not hold; leave it out, or choose "
            "--quantization int8"
        )
    kind: Activations = "int8" if activations == "int8" else "float"
    linear = Quantized(blocks, kind)
    return Scheme(linear, linear if blocks.floats else Quantized(Int8(), kind))


def asks_for_other(asked: Quantization | None, built: Quantization | None) -> bool:
    """Whether `--quantization` asks for weights other than the built ones."""
    if isinstance(asked, Kept) and isinstance(built, Kept):
        return asked.activations != built.activations
    return asked not in (None, built)


def weights_name(scheme: Quantization | None, dtype: str) -> str:
    """Name the weights' types, as logs and tables do."""
    if scheme is None:
        return dtype
    if isinstance(scheme, Kept):
        kinds = ", ".join(scheme.kinds) or dtype
        by_checkpoint = {
            "int8": "",
            "float": ", activations float",
            "checkpoint": ", activations as published",
        }
        return kinds + by_checkpoint[scheme.activations]
    weights, layout = scheme.linear, scheme.linear.layout
    if isinstance(layout, Blocks):
        return f"{layout.label}{'' if weights.activations == 'float' else ', activations int8'}"
    name = layout.name + ("wo" if weights.activations == "float" else "")
    if isinstance(layout, Int4):
        name += f", groups of {layout.group_size}"
        name += "" if layout.symmetric else ", asymmetric"
        name += ", pure" if scheme.table == weights else ""
    return name
