"""Reads scales of keys and values stored with quantized weights, under the names that exporters give them.

compressed-tensors: self_attn.k_scale, v_scale. ModelOpt: k_proj.k_scale, v_proj.v_scale. AutoFP8: kv_scale, for both.
Quark and old compressed-tensors: k_proj.output_scale, v_proj.output_scale.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from quire.devices.protocol import KVScales
from quire.weights.checkpoint.protocol import Checkpoint
from quire.weights.readers.fields import FLOATS, Fields

SCALE = re.compile(
    r"(?:[\w.]+\.)?(?:(?P<both>kv_scale)|(?P<keys>k_scale|k_proj\.output_scale)|(?P<values>v_scale|v_proj\.output_scale))"
)


def read_kv_scales(
    checkpoint: Checkpoint, layers: Sequence[str], heads: Sequence[int]
) -> tuple[KVScales | None, ...]:
    """Read the scales of layers, given the prefix of each layer's tensors and its number of key/value heads.

    Empty if there are none. A side without a scale takes the other's. Raises ModelError, naming the tensor, for a shape
    that is neither one for all nor one for each head, and for NaN.
    """
    owners = {prefix: index for index, prefix in enumerate(layers)}
    found: list[dict[str, tuple[float, ...]]] = [{} for _ in layers]
    for name in checkpoint.names():
        if not name.endswith("_scale"):
            continue
        prefix = next((name[: at + 1] for at in _dots(name) if name[: at + 1] in owners), None)
        match = None if prefix is None else SCALE.fullmatch(name.removeprefix(prefix))
        if prefix is None or match is None or match.lastgroup is None:
            continue
        index = owners[prefix]
        found[index][match.lastgroup] = _scales(checkpoint, name, heads[index])
    return tuple(map(_both, found)) if any(found) else ()


def _dots(name: str) -> list[int]:
    return [at for at, sign in enumerate(name) if sign == "."]


def _scales(checkpoint: Checkpoint, name: str, heads: int) -> tuple[float, ...]:
    """Read one scale for each head; exporters write 0 or less for a scale that was never measured."""
    module, _, suffix = name.rpartition(".")
    fields = Fields(checkpoint, module, frozenset({suffix}))
    fields.check(suffix, FLOATS)
    values = fields.floats(suffix).reshape(-1)
    if values.size not in (1, heads):
        raise fields.wrong(suffix, f"one for all, or one for each of {heads} heads")
    values = np.where(values > 0, values, np.float32(1))
    return tuple(np.broadcast_to(values, heads).tolist())


def _both(found: dict[str, tuple[float, ...]]) -> KVScales | None:
    keys = found.get("keys") or found.get("both") or found.get("values")
    values = found.get("values") or found.get("both") or found.get("keys")
    return None if keys is None or values is None else KVScales(keys, values)
