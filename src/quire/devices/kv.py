"""The shape of a KV cache. Knows sizes; knows no backend."""

from __future__ import annotations

from math import prod
from typing import Literal

import msgspec

from quire.shapes import WHOLE_BLOCK, BlockShape

KVDtype = Literal["float32", "bfloat16", "float16", "int8", "fp8_e4m3", "fp8_e5m2"]
ELEMENT_BYTES: dict[KVDtype, int] = {
    "float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1
}  # fmt: skip
USUAL_BLOCK = 16
"""Tokens of a block for which columns are planned; entries take whole rows of each block."""
FP8_MOST = {"fp8_e4m3": 448.0, "fp8_e5m2": 57344.0}  # larger magnitudes are stored as these


class StateSpec(msgspec.Struct, frozen=True):
    """A float32 array that a layer keeps for each sequence, whatever its length: the state of a recurrence, say.

    `row` is the number of elements of an open row (ModelInput.states). A token needs `work` multiply-adds to advance
    and read it.
    """

    shape: tuple[int, ...]
    row: int = 0
    work: int = 0


class KVLayer(msgspec.Struct, frozen=True):
    """The cache of one layer, per token: G x H keys and as many values. No heads: the layer keeps nothing.

    With `value_dim` a value is the first elements of its key. A query sees at most the last `reach` positions, its own
    included; 0: all. Of each sequence the layer keeps `states` beside.

    `every` above 1: the layer has *entries* in place of tokens. Entry w is of positions w every .. (w + 1) every - 1,
    and lies where the last of them does: in its block, row (position % block_size) // min(every, block_size).
    """

    num_kv_heads: int
    head_dim: int
    reach: int = 0
    value_dim: int | None = None
    states: tuple[StateSpec, ...] = ()
    every: int = 1

    def rows(self, block_size: int) -> int:
        """Count the rows of a block."""
        return -(-block_size // self.every)


class KVScales(msgspec.Struct, frozen=True):
    """What FP8 stores the keys and the values of a layer divided by: one positive scale for each head [G]."""

    keys: tuple[float, ...]
    values: tuple[float, ...]

    def of(self, heads: range) -> KVScales:
        return KVScales(self.keys[heads.start : heads.stop], self.values[heads.start : heads.stop])


class KVSpec(msgspec.Struct, frozen=True):
    """Shape of the cache of all layers: per token and layer, G x H keys and G x H values.

    In int8, each key and each value of a head has its own float32 scale. In FP8, `scales` has an entry for each layer,
    None if the layer has no scales.
    With `value_dim` (latent attention) there are no values: a value is the first value_dim elements of its key.
    `layers`, if given, is the shape of each layer, its value_dim too; num_kv_heads and head_dim are then the largest.
    Behind a model's layers come those that sparse attention keeps beside them.

    With `apart`, a block consists of slabs of one size, and layers with a reach lie in slabs of their own, which are
    given back when no query will see the block again (`columns`, `block_shape`).
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: KVDtype
    value_dim: int | None = None
    layers: tuple[KVLayer, ...] | None = None
    scales: tuple[KVScales | None, ...] = ()
    apart: bool = False

    def divided(self) -> KVSpec:
        """Return the same cache with its windowed layers apart, if it has any."""
        reaches = [layer.reach for layer in self.layers or () if layer.num_kv_heads]
        return msgspec.structs.replace(self, apart=any(reaches) and len(reaches) > 1)

    @property
    def columns(self) -> tuple[int, ...]:
        """Return the number of the slab of a block in which each layer lies."""
        return self._columns[0]

    @property
    def block_shape(self) -> BlockShape:
        """Return the slabs of a block."""
        columns, full = self._columns
        if not self.apart:
            return WHOLE_BLOCK
        reach = max(layer.reach for layer in self.layers or ())
        return BlockShape(full, max(columns) + 1 - full, reach)

    @property
    def _columns(self) -> tuple[tuple[int, ...], int]:
        """Choose columns by layer, and how many hold layers that see all positions: the division that wastes least."""
        if not self.apart:
            return (0,) * self.num_layers, 1
        sizes = self._sizes(USUAL_BLOCK)
        windowed = [self.layer(index).reach > 0 for index in range(self.num_layers)]
        if all(windowed):  # what is left of a block must lie somewhere
            windowed[0] = False
        most = max(sizes)
        found = [_packed(sizes, windowed, count * most) for count in range(1, self.num_layers + 1)]
        return min(found, key=lambda division: (_block_bytes(division[0], sizes), max(division[0])))

    def scales_of(self, layer: int) -> KVScales:
        """Return the scales of a layer; all are 1 if it has none."""
        ones = (1.0,) * self.layer(layer).num_kv_heads
        return (self.scales[layer] if self.scales else None) or KVScales(ones, ones)

    def layer(self, index: int) -> KVLayer:
        if self.layers is not None:
            return self.layers[index]
        return KVLayer(self.num_kv_heads, self.head_dim, value_dim=self.value_dim)

    def bytes_per_state(self, num_open: int) -> int:
        """Count the bytes of a row of states, with as many open rows."""
        states = [state for layer in self.layers or () for state in layer.states]
        return sum(4 * (prod(state.shape) + state.row * num_open) for state in states)

    @property
    def bytes_per_token(self) -> int:
        return self.token_bytes(USUAL_BLOCK)

    def token_bytes(self, block_size: int) -> int:
        """Count the bytes of a block of that size by the token, rounded up."""
        return -(-_block_bytes(self.columns, self._sizes(block_size)) // block_size)

    def _sizes(self, block_size: int) -> list[int]:
        """Count the bytes of a block in each layer."""
        layers = range(self.num_layers)
        return [self.layer_bytes(index) * self.layer(index).rows(block_size) for index in layers]

    def layer_bytes(self, index: int) -> int:
        """Count the bytes that one token, or entry, takes in a layer."""
        layer = self.layer(index)
        heads = layer.num_kv_heads * (2 if layer.value_dim is None else 1)
        if self.dtype == "int8":
            return heads * (-(-layer.head_dim // 4) * 4 + 4)
        return heads * layer.head_dim * ELEMENT_BYTES[self.dtype]


def _packed(sizes: list[int], windowed: list[bool], most: int) -> tuple[tuple[int, ...], int]:
    """Choose columns by layer, each of at most `most` bytes: first those that are not windowed. And their number."""
    columns, column, full = [0] * len(sizes), -1, 0
    for kind in (False, True):
        left = 0
        for layer in [i for i, own in enumerate(windowed) if own == kind]:
            if sizes[layer] > left:
                column, left = column + 1, most
            columns[layer] = max(column, 0)
            left -= sizes[layer]
        full = full or column + 1
    return tuple(columns), full


def _block_bytes(columns: tuple[int, ...], sizes: list[int]) -> int:
    """Count the bytes of a block whose slabs are as large as the largest column."""
    sums = [0] * (max(columns) + 1)
    for column, size in zip(columns, sizes, strict=True):
        sums[column] += size
    return max(sums) * len(sums)
