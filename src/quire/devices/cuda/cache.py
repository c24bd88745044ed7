"""A paged KV cache of tensors on a device: a head's tokens of a block lie side by side."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from quire.devices.cuda.copies import sent
from quire.devices.cuda.kernels.attention import LayerCache
from quire.devices.cuda.kernels.recurrent import State
from quire.devices.protocol import KVCache, KVDtype, KVSpec
from quire.devices.torch import cache
from quire.errors import ConfigError, EngineError

DTYPES: dict[KVDtype, Any] = {**cache.DTYPES, "int8": torch.int8}


class CudaKVCache:
    """Keys and values of each layer [num_blocks, G, block_size, H], and its states. Latent attention has no values."""

    def __init__(
        self,
        spec: KVSpec,
        num_blocks: int,
        block_size: int,
        device: Any,
        num_states: int = 0,
        num_open: int = 0,
    ) -> None:
        if block_size < 16 or block_size & (block_size - 1):
            raise ConfigError(
                f"a GPU needs a --block-size that is a power of two from 16 on, got {block_size}"
            )
        self.spec, self.num_blocks, self.block_size, self.device = spec, num_blocks, block_size, device
        self.num_states, self.num_open = num_states, num_open
        # A place in a block beyond all others, for tokens of no sequence.
        self.scratch = num_blocks * block_size
        self.layers = [self._layer(index) for index in range(spec.num_layers)]
        real = partial(self._room, num_states, dtype=torch.float32)
        self.states = [
            [State(real(*state.shape), real(num_open, state.row)) for state in spec.layer(index).states]
            for index in range(spec.num_layers)
        ]

    def _layer(self, index: int) -> LayerCache:
        layer, spec = self.spec.layer(index), self.spec
        shape = layer.num_kv_heads, layer.rows(self.block_size)
        sides = 2 if layer.value_dim is None else 1
        kept = [self._blocks(*shape, layer.head_dim, dtype=DTYPES[spec.dtype]) for _ in range(sides)]
        scales: list[Any] = [None, None]
        if spec.dtype == "int8":
            scales = [self._blocks(*shape, dtype=torch.float32) for _ in range(2)]
        elif spec.dtype.startswith("fp8"):
            found = spec.scales_of(index)
            given = found.keys, found.values
            scales = [torch.tensor(each, dtype=torch.float32, device=self.device) for each in given]
        return LayerCache(kept[0], kept[-1] if sides == 2 else None, *scales)

    def _blocks(self, *shape: int, dtype: Any) -> Any:
        """Memory of all blocks, with the scratch block behind it."""
        return self._room(self.num_blocks + 1, *shape, dtype=dtype)[: self.num_blocks]

    def _room(self, *shape: int, dtype: Any) -> Any:
        return torch.empty(shape, dtype=dtype, device=self.device)

    def place_blocks(self, rows: Sequence[Sequence[int]]) -> None:
        raise EngineError("this backend keeps blocks whole")

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        for batch in _independent(copies):
            sources, destinations = sent(np.array(batch), self.device).T
            for layer in self.layers:
                by_token = (layer.key_scales, layer.value_scales) if self.spec.dtype == "int8" else ()
                for side in (layer.keys, layer.values, *by_token):
                    if side is not None:
                        raw = side.view(torch.uint8)  # not all types are copied by index
                        raw[destinations] = raw[sources]

    def copy_states(self, copies: Sequence[tuple[int, int]]) -> None:
        for batch in _independent(copies):
            sources, destinations = sent(np.array(batch), self.device).T
            for state in (state for layer in self.states for state in layer):
                state.rows[destinations] = state.rows[sources]
                state.waiting[destinations] = state.waiting[sources]


def own_cache(kv: KVCache) -> CudaKVCache:
    """Check that a cache is this backend's."""
    if not isinstance(kv, CudaKVCache):
        raise EngineError(f"a GPU's backend got a KV cache of {type(kv).__name__}")
    return kv


def _independent(copies: Sequence[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """Cut copies, in order, into batches that may be made at once: none reads or writes what another one writes."""
    batches: list[list[tuple[int, int]]] = []
    written: set[int] = set()
    for source, destination in copies:
        if not batches or source in written or destination in written:
            batches.append([])
            written = set()
        batches[-1].append((source, destination))
        written.add(destination)
    return batches
