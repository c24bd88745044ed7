"""The oracle's paged KV cache."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from quire.devices.protocol import (
    Array,
    FloatArray,
    KVSpec,
)
from quire.devices.reference.weights import DTYPES, round_int8


class ReferenceKVCache:
    """Keys and values [layers, num_blocks, block_size, G, H], NaN until written: a stray read shows."""

    def __init__(self, spec: KVSpec, num_blocks: int, block_size: int) -> None:
        shape = (spec.num_layers, num_blocks, block_size, spec.num_kv_heads, spec.head_dim)
        kept = np.float32 if spec.dtype == "int8" else DTYPES[spec.dtype]
        self.keys = np.full(shape, np.nan, kept)
        if spec.value_dim is None:
            self.values = np.full(shape, np.nan, kept)
        else:
            self.values = self.keys[..., : spec.value_dim]
        self._spec = spec

    @property
    def spec(self) -> KVSpec:
        return self._spec

    @property
    def num_blocks(self) -> int:
        return int(self.keys.shape[1])

    @property
    def block_size(self) -> int:
        return int(self.keys.shape[2])

    def rounded(self, heads: Array) -> FloatArray:
        """Keys or values [heads, H] as the cache keeps them, before its own type's rounding."""
        values: FloatArray = heads.astype(np.float32)
        return round_int8(values) if self._spec.dtype == "int8" else values

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        for source, destination in copies:
            self.keys[:, destination] = self.keys[:, source]
            if self._spec.value_dim is None:
                self.values[:, destination] = self.values[:, source]
