"""The oracle's paged KV cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np

from quire.devices.kv import FP8_MOST
from quire.devices.protocol import Array, FloatArray, KVDtype, KVSpec
from quire.errors import EngineError
from quire.weights.activations import round_int8

KEPT: dict[KVDtype, Any] = {
    "float32": np.float32,
    "bfloat16": ml_dtypes.bfloat16,
    "float16": np.float16,
    "int8": np.float32,
    "fp8_e4m3": ml_dtypes.float8_e4m3fn,
    "fp8_e5m2": ml_dtypes.float8_e5m2,
}


class ReferenceKVCache:
    """Keys and values of each layer [num_blocks, rows, G, H], NaN until written: a stray read shows.

    The states of each layer are [num_states, ...], and their open rows [num_states, num_open, W].
    """

    def __init__(
        self, spec: KVSpec, num_blocks: int, block_size: int, num_states: int = 0, num_open: int = 0
    ) -> None:
        kept = KEPT[spec.dtype]
        layers = [spec.layer(index) for index in range(spec.num_layers)]
        shapes = [
            (num_blocks, layer.rows(block_size), layer.num_kv_heads, layer.head_dim) for layer in layers
        ]
        self.keys = [np.full(shape, np.nan, kept) for shape in shapes]
        self.values = [
            np.full(keys.shape, np.nan, kept) if layer.value_dim is None else keys[..., : layer.value_dim]
            for keys, layer in zip(self.keys, layers, strict=True)
        ]
        self.spec, self.num_blocks, self.block_size = spec, num_blocks, block_size
        self.num_states, self.num_open = num_states, num_open
        sizes = [[(state.shape, (num_open, state.row)) for state in layer.states] for layer in layers]
        self.states = [[_rows(num_states, shape) for shape, _ in layer] for layer in sizes]
        self.open = [[_rows(num_states, shape) for _, shape in layer] for layer in sizes]
        scales = [spec.scales_of(index) for index in range(spec.num_layers)]
        self.key_scales = [np.array(own.keys, np.float32)[:, None] for own in scales]  # [heads, 1]
        self.value_scales = [np.array(own.values, np.float32)[:, None] for own in scales]

    def places(self, layer: int, positions: Array) -> tuple[Array, Array]:
        """Find the tokens at some positions, or the entries that end there: blocks of the sequence, rows in them."""
        size = self.block_size
        return positions // size, positions % size // min(self.spec.layer(layer).every, size)

    def rounded(self, heads: Array, scales: FloatArray) -> FloatArray:
        """Keys or values [heads, H] as the cache keeps them, before its own type's rounding. scales are [heads, 1]."""
        values: FloatArray = heads.astype(np.float32) / scales
        if self.spec.dtype == "int8":
            return round_int8(values)
        most = FP8_MOST.get(self.spec.dtype)
        return values if most is None else np.clip(values, -most, most)

    def place_blocks(self, rows: Sequence[Sequence[int]]) -> None:
        raise EngineError("this backend keeps blocks whole")

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        for source, destination in copies:
            for side in self.keys + self.values:
                side[destination] = side[source]

    def copy_states(self, copies: Sequence[tuple[int, int]]) -> None:
        for source, destination in copies:
            for rows in (array for layers in (self.states, self.open) for layer in layers for array in layer):
                rows[destination] = rows[source]


def _rows(count: int, shape: tuple[int, ...]) -> FloatArray:
    return np.full((count, *shape), np.nan, np.float32)
