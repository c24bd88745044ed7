"""Predicts the layouts of a quantized model's weights from its config alone, for `quire plan --config`.

A reader (the other modules here) decides by the tensors themselves. This follows the config, which they should match.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import msgspec
import numpy as np

from quire.errors import ModelError
from quire.weights.checkpoint.protocol import Unquantized
from quire.weights.layouts import AnyLayout, Blocks, Int8
from quire.weights.layouts.blocks.make import affine_kind, byte_kind
from quire.weights.readers.fields import BF16
from quire.weights.readers.grouped import Groups, packed_groups
from quire.weights.readers.quark import QuarkModules
from quire.weights.readers.rules import Dynamic, Rules, Targets, short_name, texts
from quire.weights.readers.scaled import block_size, inner_settings
from quire.weights.tensor import Array

GROUPS_OF_4 = {"num_bits": 4, "type": "int", "symmetric": True, "group_size": 128, "strategy": "group"}
USUAL: Mapping[str, Mapping[str, Any]] = {
    "auto-round": {"bits": 4, "group_size": 128, "sym": True},
    "awq": {"bits": 4, "group_size": 128, "zero_point": True},
    "bitsandbytes": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "compressed-tensors": {
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": GROUPS_OF_4}},
        "ignore": ["lm_head"],
    },
    "fbgemm_fp8": {},
    "gptq": {"bits": 4, "group_size": 128, "sym": True, "desc_act": False},
    "hqq": {"quant_config": {"weight_quant_params": {"nbits": 4, "group_size": 64, "axis": 1}}},
    "modelopt": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]},
    "modelopt_fp4": {"quant_algo": "NVFP4", "exclude_modules": ["lm_head"]},
    "mxfp8": {},
    "squeezellm": {"wbits": 4},
}
"""USUAL are the settings of most published checkpoints, by the names that --quantization takes."""

Layouts = Callable[[str, int], AnyLayout | None]  # of a module, by its name and number of columns


class PlannedCheckpoint(Unquantized):
    """The part of a `Checkpoint` that planning needs: layouts by name.

    `tensors` are the names and shapes of a model, `dtype` is the type that its config names, in which some libraries
    write scales.

    Raises ModelError, naming the setting, if no layout holds a weight.
    """

    def __init__(
        self,
        path: Path,
        method: str,
        settings: Mapping[str, Any],
        tensors: Mapping[str, tuple[int, ...]],
        dtype: str = "",
    ) -> None:
        self._path, self._tensors = path, tensors
        settings = inner_settings(settings)
        of = _planner(method, settings, BF16 if dtype == "bfloat16" else None)
        skipped = Rules.skipped(settings)
        self._layouts: dict[str, AnyLayout] = {}
        for name, shape in tensors.items():
            module = name.removesuffix(".weight")
            if len(shape) < 2 or (method == "mxfp4" and len(shape) < 3):
                continue
            if _is_table(module) and not (module.endswith("lm_head") and _has_head(method, settings)):
                continue
            if skipped.match(module) and "moe_quant_algo" not in settings:  # which speaks of experts alone
                continue
            layout = of(module, shape[-1])
            if layout is not None:
                self._layouts[name] = layout

    def names(self) -> Iterable[str]:
        return self._tensors

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors[name]

    def dtype(self, name: str) -> np.dtype[Any]:
        held: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
        return held

    def path(self, name: str) -> Path:
        return self._path

    def get(self, name: str) -> Array:
        raise ModelError(f"{self._path}: a config has no values of {name}")

    def layout(self, name: str) -> AnyLayout | None:
        return self._layouts.get(name)


def _is_table(module: str) -> bool:
    last = module.rpartition(".")[2]
    return "embed" in last or last in ("lm_head", "head", "wte", "wpe", "output")


def _has_head(method: str, settings: Mapping[str, Any]) -> bool:
    """Whether a method quantizes the head like other modules, unless its config says otherwise."""
    return method in ("modelopt", "compressed-tensors") or (
        method == "gptq" and settings.get("lm_head") is True
    )


def _planner(method: str, settings: Mapping[str, Any], scales: np.dtype[Any] | None) -> Layouts:
    if method in ("fp8", "fbgemm_fp8", "mxfp8"):
        return _fp8(method, settings)
    if method == "mxfp4":
        return lambda module, columns: Blocks("mxfp4")
    if method in ("awq", "gptq", "auto-round"):
        return _integers(method, settings)
    if method == "modelopt":
        return _modelopt(settings)
    if method == "compressed-tensors":
        return _compressed(settings, scales)
    if method == "bitsandbytes":
        return _bitsandbytes(settings)
    if method == "squeezellm" and (bits := settings.get("wbits", settings.get("bits"))) in (3, 4):
        return lambda module, columns: None if columns % 32 else Blocks(f"lut{bits}")
    if method == "quark":
        modules = QuarkModules(settings)
        return lambda module, columns: _quark(modules.of(module).get("weight"), columns)
    if method == "hqq":
        return _hqq(settings)
    raise ModelError(f"quantization_config: the size of {method} weights is not planned from a config alone")


def _bitsandbytes(settings: Mapping[str, Any]) -> Layouts:
    if settings.get("load_in_8bit", settings.get("_load_in_8bit")):
        return lambda module, columns: Int8()
    kind = settings.get("bnb_4bit_quant_type", "fp4")
    if kind not in ("nf4", "fp4"):
        raise ModelError(
            f"quantization_config (bitsandbytes): bnb_4bit_quant_type {kind!r:.40} is not planned"
        )
    return lambda module, columns: None if columns % 64 else Blocks(kind)


def _quark(weight: object, columns: int) -> AnyLayout | None:
    about = weight if isinstance(weight, dict) else {}
    kind, size = about.get("dtype"), about.get("group_size")
    if kind == "fp8_e4m3":
        return _bytes("e4m3", columns, columns)
    if kind == "fp4":
        return None if columns % 32 else Blocks("mxfp4")
    if kind in ("int4", "uint4"):
        return _groups(4, size or -1, columns, kind == "int4")
    if kind == "int8":
        return Int8()
    raise ModelError(f"quantization_config (quark): weights of dtype {kind!r:.40} are not planned")


def _hqq(settings: Mapping[str, Any]) -> Layouts:
    inner = settings.get("quant_config")
    params = inner.get("weight_quant_params") if isinstance(inner, dict) else None
    bits, size, axis = (
        params.get(key) if isinstance(params, dict) else None for key in ("nbits", "group_size", "axis")
    )
    if type(bits) is not int or type(size) is not int or size < 1:
        raise ModelError("quantization_config (hqq): weight_quant_params has no nbits and group_size")

    def of(module: str, columns: int) -> AnyLayout | None:
        kind = affine_kind(bits, columns, size) if axis == 1 and columns % size == 0 else None
        return None if kind is None else Blocks(kind)

    return of


def _fp8(method: str, settings: Mapping[str, Any]) -> Layouts:
    what = settings.get("moe_quant_algo") or settings.get("expert_dtype") or "fp8"
    if method != "fp8" or what == "fp8":
        return _eight_bits(method, settings)
    if not isinstance(what, str) or what not in EXPERTS:
        raise ModelError(f"quantization_config: fp8 with experts in {what!r:.40} is not planned")
    own, others = ALGORITHMS[EXPERTS[what]], _eight_bits(method, settings)
    return lambda module, columns: own(columns) if ".experts." in module else others(module, columns)


def _eight_bits(method: str, settings: Mapping[str, Any]) -> Layouts:
    blocks = settings.get("weight_block_size")
    kind = "e5m2" if settings.get("fmt") == "e5m2" else "e4m3"
    if method == "mxfp8" or blocks == [1, 32]:
        return lambda module, columns: None if columns % 32 else Blocks("mxfp8")
    group = block_size(settings)[1] if blocks else 0
    return lambda module, columns: _bytes(kind, columns, group or columns)


def _bytes(prefix: str, columns: int, group: int) -> AnyLayout | None:
    kind = byte_kind(prefix, columns, group)
    return None if kind is None else Blocks(kind)


def _integers(method: str, settings: Mapping[str, Any]) -> Layouts:
    bits = settings.get("bits", settings.get("w_bit", 4))
    size = settings.get("group_size", settings.get("q_group_size", 128))
    if type(bits) is not int or type(size) is not int or bits not in (2, 3, 4, 8):
        raise ModelError(f"quantization_config ({method}): bits and group_size must be known numbers")
    symmetric = method != "awq" and settings.get("sym", True)
    rules = Dynamic(settings)
    ordered = bool(settings.get("desc_act")) and not settings.get("static_groups")
    key = "block_name_to_quantize" if settings.get("block_name_to_quantize") else "to_quant_block_names"
    blocks = settings.get(key)
    only = Rules(blocks.split(",") if isinstance(blocks, str) else texts(settings, key))

    def of(module: str, columns: int) -> AnyLayout | None:
        if blocks and not only.match(module):
            return None
        changes = rules.changes(module)
        if changes is None:
            return None
        own_bits, own_size = changes.get("bits", bits), changes.get("group_size", size)
        return _ordered(_groups(own_bits, own_size, columns, symmetric), ordered and own_size != -1)

    return of


def _groups(
    bits: int, size: int, columns: int, symmetric: bool, scales: np.dtype[Any] | None = None
) -> AnyLayout | None:
    size = columns if size in (-1, None) else size
    return packed_groups((1, columns), bits, size, symmetric, None, _no_groups, scales=scales).layout


def _ordered(layout: AnyLayout | None, ordered: bool) -> AnyLayout | None:
    return msgspec.structs.replace(layout, inputs=True) if layout is not None and ordered else layout


def _no_groups() -> Groups:
    raise ModelError("a plan has no values")


EXPERTS = {"fp4": "MXFP4", "NVFP4": "NVFP4"}
ALGORITHMS: Mapping[str, Callable[[int], AnyLayout | None]] = {
    "FP8": lambda columns: _bytes("e4m3", columns, columns),
    "FP8_PER_CHANNEL_PER_TOKEN": lambda columns: _bytes("e4m3", columns, columns),
    "FP8_PB_WO": lambda columns: _bytes("e4m3", columns, 128),
    "MXFP8": lambda columns: None if columns % 32 else Blocks("mxfp8"),
    "MXFP4": lambda columns: Blocks("mxfp4"),
    "NVFP4": lambda columns: None if columns % 64 else Blocks("nvfp4"),
    "W4A16_NVFP4": lambda columns: None if columns % 64 else Blocks("nvfp4"),
    "W4A16_AWQ": lambda columns: _groups(4, 128, columns, True),
}


def _modelopt(settings: Mapping[str, Any]) -> Layouts:
    layers = settings.get("quantized_layers")

    def algorithm(found: object) -> Callable[[int], AnyLayout | None]:
        if not isinstance(found, str) or found not in ALGORITHMS:
            raise ModelError(f"quantization_config (modelopt): quant_algo {found!r:.80} is not planned")
        return ALGORITHMS[found]

    if settings.get("quant_algo") != "MIXED_PRECISION":
        of_all = algorithm(settings.get("quant_algo"))
        return lambda module, columns: of_all(columns)
    if not isinstance(layers, dict):
        raise ModelError(
            "quantization_config (modelopt): MIXED_PRECISION without quantized_layers is not read"
        )
    named = {short_name(module): algorithm(about.get("quant_algo")) for module, about in layers.items()}

    def of(module: str, columns: int) -> AnyLayout | None:
        module = short_name(module)
        while module:  # a parent stands for all in it
            if module in named:
                return named[module](columns)
            module = module.rpartition(".")[0]
        return None

    return of


def _compressed(settings: Mapping[str, Any], scales: np.dtype[Any] | None) -> Layouts:
    targets, made = Targets(settings), dict[tuple[int, int], AnyLayout | None]()

    def of(module: str, columns: int) -> AnyLayout | None:
        group = targets.group(module)
        if group is None:
            return None
        key = id(group), columns  # there are tens of thousands of experts, and few groups
        if key not in made:
            made[key] = _scheme(group.get("weights") or {}, group.get("format"), columns, scales)
        return made[key]

    return of


def _scheme(
    weights: Mapping[str, Any], form: object, columns: int, scales: np.dtype[Any] | None
) -> AnyLayout | None:
    bits, size, symmetric = weights.get("num_bits"), weights.get("group_size"), weights.get("symmetric", True)
    if weights.get("type") == "float":
        if bits == 4:
            nv = size == 16
            return (None if columns % 64 else Blocks("nvfp4_div")) if nv else Blocks("mxfp4")
        return _bytes("e4m3", columns, 128 if weights.get("strategy") == "block" else size or columns)
    if type(bits) is not int:
        raise ModelError(
            f"quantization_config (compressed-tensors): num_bits must be a number, got {bits!r:.40}"
        )
    if bits == 8 and form == "int-quantized" and not size:
        return Int8()
    ordered = weights.get("actorder") in ("group", "dynamic", True)
    return _ordered(_groups(bits, size or -1, columns, symmetric, scales), ordered)
