"""The shape of a KV cache. Knows sizes; knows no backend."""

from __future__ import annotations

from typing import Literal

import msgspec

KVDtype = Literal["float32", "bfloat16", "float16", "int8", "fp8_e4m3", "fp8_e5m2"]
ELEMENT_BYTES: dict[KVDtype, int] = {
    "float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1
}  # fmt: skip
FP8_MOST = {"fp8_e4m3": 448.0, "fp8_e5m2": 57344.0}  # larger magnitudes are stored as these


class KVLayer(msgspec.Struct, frozen=True):
    """The cache of one layer, per token: G x H keys and as many values. No heads: the layer keeps nothing."""

    num_kv_heads: int
    head_dim: int


class KVScales(msgspec.Struct, frozen=True):
    """What FP8 stores the keys and the values of a layer divided by: one positive scale for each head [G]."""

    keys: tuple[float, ...]
    values: tuple[float, ...]

    def of(self, heads: range) -> KVScales:
        return KVScales(self.keys[heads.start : heads.stop], self.values[heads.start : heads.stop])


class KVSpec(msgspec.Struct, frozen=True):
    """Shape of the cache of all layers: per token and layer, G x H keys and G x H values.

    In int8, each key and each value of a head has its own float32 scale. In FP8, `scales` are those of each layer that
    has any.
    With `value_dim` (latent attention) there are no values: a value is the first value_dim elements of its key.
    `layers`, if given, is the shape of each layer; num_kv_heads and head_dim are then the largest.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: KVDtype
    value_dim: int | None = None
    layers: tuple[KVLayer, ...] | None = None
    scales: tuple[KVScales | None, ...] = ()

    def scales_of(self, layer: int) -> KVScales | None:
        return self.scales[layer] if self.scales else None

    def layer(self, index: int) -> KVLayer:
        return KVLayer(self.num_kv_heads, self.head_dim) if self.layers is None else self.layers[index]

    @property
    def bytes_per_token(self) -> int:
        return sum(self.layer_bytes(index) for index in range(self.num_layers))

    def layer_bytes(self, index: int) -> int:
        """Bytes that one token takes in a layer."""
        layer = self.layer(index)
        heads = layer.num_kv_heads * (2 if self.value_dim is None else 1)
        if self.dtype == "int8":
            return heads * (-(-layer.head_dim // 4) * 4 + 4)
        return heads * layer.head_dim * ELEMENT_BYTES[self.dtype]
