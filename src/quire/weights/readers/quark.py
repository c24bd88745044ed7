"""Quark's weights of 4 bits by group: words along the outputs, as AWQ has them, in AWQ's order or in a plain one."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from quire.weights.readers.fields import FLOATS, I32, ORDER, Fields, eights
from quire.weights.readers.grouped import Groups, packed_groups, refuse
from quire.weights.readers.packed_modules import Packed
from quire.weights.readers.rules import Rules


class QuarkModules:
    """Settings of single modules: of the last pattern that matches, else the global ones."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        layers = settings.get("layer_quant_config")
        given = list(layers.items()) if isinstance(layers, dict) else []
        self._rules = Rules(pattern for pattern, _ in reversed(given))
        self._configs = [*(own for _, own in reversed(given)), settings.get("global_quant_config")]

    def of(self, module: str) -> Mapping[str, Any]:
        found = self._rules.first(module)
        config = self._configs[-1 if found is None else found]
        return config if isinstance(config, dict) else {}


def quark_int4(fields: Fields, settings: Mapping[str, Any], modules: QuarkModules) -> Packed:
    """weight [K, O / 8], weight_scale [G, O], and with uint4 weight_zero_point [G, O / 8]. Raises ModelError."""
    about = modules.of(fields.module).get("weight")
    kind = about.get("dtype") if isinstance(about, dict) else None
    export = settings.get("export")
    pack = (export.get("pack_method") if isinstance(export, dict) else None) or "reorder"
    if kind not in ("int4", "uint4") or pack not in ("reorder", "order"):
        raise refuse(
            f"quantization_config of {fields.module}", f"dtype {kind!r:.40} in {pack!r:.40} is not read"
        )
    fields.check("weight", (I32,))
    fields.check("weight_scale", FLOATS)
    found, scaled = fields.shape("weight"), fields.shape("weight_scale")
    if (
        len(found) != 2
        or len(scaled) != 2
        or scaled[1] != found[1] * 8
        or not scaled[0]
        or found[0] % scaled[0]
    ):
        raise fields.wrong("weight_scale", f"one for each group of columns of {[found[1] * 8, found[0]]}")
    if kind == "uint4" or "weight_zero_point" in fields:
        fields.check("weight_zero_point", (I32,), (scaled[0], found[1]))
    shape, size = (scaled[1], found[0]), found[0] // scaled[0]
    order = ORDER if pack == "reorder" else tuple(range(8))
    read = partial(_groups, fields, kind == "int4", size, order)
    held = fields.dtype("weight_scale")
    return packed_groups(shape, 4, size, kind == "int4", None, read, scales=held)


def _groups(fields: Fields, signed: bool, size: int, order: tuple[int, ...]) -> Groups:
    """Codes of int4 are in two's complement, and have no zero points."""
    scales = np.ascontiguousarray(fields.floats("weight_scale").T)
    codes = eights(fields.words("weight"), order)
    if signed:
        if "weight_zero_point" in fields and fields.get("weight_zero_point").any():
            raise fields.wrong("weight_zero_point", "0 everywhere, since the weights are signed")
        return Groups(codes ^ np.uint8(8), scales, 8, size)
    return Groups(codes, scales, eights(fields.words("weight_zero_point"), order), size)
