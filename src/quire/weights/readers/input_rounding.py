"""Reads how checkpoints of scaled weights round activations, module by module when asked."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from quire.weights.activations import Number, Rounding
from quire.weights.checkpoint.protocol import Checkpoint
from quire.weights.readers.fields import E4M3, FLOATS, I8, I32, U8, Fields
from quire.weights.readers.quark import QuarkModules
from quire.weights.readers.rules import Rules, Targets

# INPUTS end the names of tensors that belong to activations, beside the weight's own.
INPUTS = ("input_scale", "input_scale_ub", "input_zero_point", "input_global_scale", "activation_scale")

EXPERT = re.compile(r"\.experts\.|moe\.\d+\.")


class InputRoundings:
    """Input roundings of a checkpoint's modules. `blocks` are the rows and columns that share a scale of a weight.

    Inputs of a mixture's experts stay whole, unless they are multiplied as integers.
    """

    def __init__(
        self,
        settings: Mapping[str, Any],
        checkpoint: Checkpoint,
        blocks: tuple[int, int],
        modules: QuarkModules,
    ) -> None:
        self._settings, self._checkpoint, self._blocks = settings, checkpoint, blocks
        self._names = frozenset(checkpoint.names())
        producer = settings.get("producer")
        self._modelopt = "quant_algo" in settings or (
            isinstance(producer, dict) and producer.get("name") == "modelopt"
        )
        by_group = not self._modelopt and settings.get("config_groups") is not None
        self._targets = Targets(settings) if by_group else None
        self._skipped = Rules.skipped(settings) if by_group else None
        self._quark = modules

    @property
    def are_integers(self) -> bool:
        """Whether the format rounds to int8 wherever it rounds at all."""
        if self._targets is not None:
            abouts = [group.get("input_activations") for group in self._targets.groups]
            given = [about for about in abouts if isinstance(about, dict)]
            return bool(given) and all(
                about.get("type", "int") == "int" and about.get("num_bits") == 8 for about in given
            )
        about = self._quark.of("").get("input_tensors")
        return isinstance(about, dict) and about.get("dtype") == "int8"

    def of(self, module: str, suffixes: Iterable[str]) -> Rounding | None:
        """Find the rounding of a module with these tensors. Raises ModelError if a static scale is missing or wrong."""
        found = self._found(module, suffixes)
        integers = found is not None and (found.is_int8_by_row or found.is_int8_of_all)
        return found if integers or not EXPERT.search(module) else None

    def _found(self, module: str, suffixes: Iterable[str]) -> Rounding | None:
        own = frozenset(name for name in INPUTS if f"{module}.{name}" in self._names)
        fields = Fields(self._checkpoint, module, frozenset(suffixes) | own)
        if self._targets is not None and self._skipped is not None:
            group = None if self._skipped.match(module) else self._targets.group(module)
            about = None if group is None else group.get("input_activations")
            return _of_scheme(fields, about) if isinstance(about, dict) else None
        if "global_quant_config" in self._settings:
            return _of_quark(fields, self._quark.of(fields.module).get("input_tensors"))
        return _of_modelopt(fields, self._settings) if self._modelopt else self._of_fp8(fields)

    def _of_fp8(self, fields: Fields) -> Rounding | None:
        """Read FP8 as DeepSeek, Qwen, AutoFP8 and fbgemm publish it."""
        settings = self._settings
        if not fields.is_of("weight", E4M3):
            return None
        if settings.get("activation_scheme") == "static":
            return _static(
                fields, "e4m3", "activation_scale" if "activation_scale" in fields else "input_scale"
            )
        if settings.get("quant_method") == "mxfp8" or self._blocks == (1, 32):
            return Rounding(number="e4m3", scales="e8m0", columns=32)
        if settings.get("weight_block_size"):
            powers = settings.get("scale_fmt") == "ue8m0"
            return Rounding(number="e4m3", scales="powers" if powers else "float32", columns=self._blocks[1])
        bound = settings.get("activation_scale_ub")
        if "input_scale_ub" in fields:
            bound = _scalar(fields, "input_scale_ub")
        return Rounding(
            number="e4m3", most=float(bound) if isinstance(bound, (int, float)) and bound > 0 else 0.0
        )


def _of_scheme(fields: Fields, about: Mapping[str, Any]) -> Rounding | None:
    """Read compressed-tensors' input_activations."""
    bits, size, strategy = about.get("num_bits"), about.get("group_size"), about.get("strategy")
    columns = size if type(size) is int and strategy in ("group", "tensor_group") else 0
    if about.get("type") == "float" and bits == 4:
        if columns == 16:
            return _nvfp4(fields, "input_global_scale", divides=True)
        return Rounding(number="e2m1", scales="e8m0", columns=32)
    if bits != 8:
        return None
    number: Number = "e4m3" if about.get("type") == "float" else "int8"
    if not about.get("dynamic"):
        return _static(fields, number, "input_scale")
    if number == "e4m3" and columns == 32:
        return Rounding(number=number, scales="e8m0", columns=32)
    if number == "int8" and about.get("symmetric") is False:
        return Rounding(number=number, columns=columns, asymmetric=True)
    return Rounding(number=number, columns=columns)


def _of_modelopt(fields: Fields, settings: Mapping[str, Any]) -> Rounding | None:
    """Go by the tensors: scales of inputs are there if inputs are rounded."""
    if fields.is_of("weight", E4M3):
        if fields.is_of("weight_scale", U8):
            return Rounding(number="e4m3", scales="e8m0", columns=32)
        if "input_scale" in fields:
            return _static(fields, "e4m3", "input_scale")
        by_token = settings.get("quant_algo") == "FP8_PER_CHANNEL_PER_TOKEN"
        return Rounding(number="e4m3") if by_token else None
    if "input_scale" not in fields:
        return None
    if fields.is_of("weight", I8):
        return _static(fields, "int8", "input_scale")
    if fields.is_of("weight_scale", E4M3):
        return _nvfp4(fields, "input_scale", divides=False)
    return _static(fields, "e4m3", "input_scale") if fields.is_of("weight_scale", *FLOATS) else None


def _of_quark(fields: Fields, about: object) -> Rounding | None:
    if not isinstance(about, dict):
        return None
    numbers: Mapping[Any, Number] = {"fp8_e4m3": "e4m3", "int8": "int8", "fp4": "e2m1"}
    number = numbers.get(about.get("dtype"))
    if number is None or number == "e2m1":
        return None if number is None else Rounding(number="e2m1", scales="e8m0", columns=32)
    if not about.get("is_dynamic"):
        return _static(fields, number, "input_scale")
    return Rounding(number=number)


def _scalar(fields: Fields, suffix: str) -> float:
    fields.check(suffix, FLOATS, (), (1,))
    return float(fields.floats(suffix).reshape(()))


def _positive(fields: Fields, suffix: str) -> float:
    value = _scalar(fields, suffix)
    if value <= 0:
        raise fields.wrong(suffix, "greater than 0")
    return value


def _static(fields: Fields, number: Number, suffix: str) -> Rounding:
    zero = 0
    if "input_zero_point" in fields and number == "int8":
        fields.check("input_zero_point", (I8, I32), (), (1,))
        zero = int(fields.get("input_zero_point").reshape(()))
        if not -128 <= zero <= 127:
            raise fields.wrong("input_zero_point", "from -128 to 127")
    return Rounding(number=number, scales="fixed", outer=_positive(fields, suffix), zero=zero)


def _nvfp4(fields: Fields, suffix: str, divides: bool) -> Rounding:
    """Read NVFP4's outer scale: it divides E4M3 scales, or with ModelOpt multiplies them."""
    outer = _positive(fields, suffix)
    divisor = outer if divides else float(np.float32(1) / np.float32(outer))
    return Rounding(number="e2m1", scales="e4m3", columns=16, outer=divisor)
