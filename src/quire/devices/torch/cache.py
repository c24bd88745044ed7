"""A paged KV cache of torch tensors, and the places of a step's tokens in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from quire.devices.inputs import sequences_of
from quire.devices.kv import FP8_MOST
from quire.devices.protocol import Activation, Array, IntArray, KVDtype, KVSpec, Matrix, ModelInput
from quire.devices.step import StepAdapters
from quire.devices.torch.weights import own_matrix, round_int8
from quire.errors import EngineError

# int8 values are kept in float32, rounded.
DTYPES: dict[KVDtype, Any] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "int8": torch.float32,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}


class TorchKVCache:
    """Keys and values of each layer [num_blocks * rows, G, H]. In latent attention, values are views of keys.

    States of each layer [num_states, ...] are NaN until written, and so are their open rows.
    """

    def __init__(
        self,
        spec: KVSpec,
        num_blocks: int,
        block_size: int,
        device: Any,
        num_states: int = 0,
        num_open: int = 0,
    ) -> None:
        self.spec, self.num_blocks, self.block_size, self.device = spec, num_blocks, block_size, device
        self.num_states, self.num_open = num_states, num_open
        self.keys, self.values, self.states, self.open = [], [], [], []
        self.constants: dict[int, tuple[Array, Any]] = {}  # of graphs, as tensors of the device

        def nan(*shape: int) -> Any:
            return torch.full(shape, torch.nan, device=device)

        for layer in map(spec.layer, range(spec.num_layers)):
            self.states.append([nan(num_states, *state.shape) for state in layer.states])
            self.open.append([nan(num_states, num_open, state.row) for state in layer.states])
            shape = (num_blocks * layer.rows(block_size), layer.num_kv_heads, layer.head_dim)
            keys = torch.empty(shape, dtype=DTYPES[spec.dtype], device=device)
            self.keys.append(keys)
            own = layer.value_dim is None
            self.values.append(torch.empty_like(keys) if own else keys[..., : layer.value_dim])
        scales = [spec.scales_of(index) for index in range(spec.num_layers)]
        self.key_scales = [torch.tensor(own.keys, device=device)[:, None] for own in scales]  # [G, 1]
        self.value_scales = [torch.tensor(own.values, device=device)[:, None] for own in scales]

    def place_blocks(self, rows: Sequence[Sequence[int]]) -> None:
        raise EngineError("this backend keeps blocks whole")

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        for side in self.keys + self.values:
            rows = len(side) // self.num_blocks
            for source, destination in copies:
                side[destination * rows :][:rows] = side[source * rows :][:rows]

    def copy_states(self, copies: Sequence[tuple[int, int]]) -> None:
        for source, destination in copies:
            for rows in (array for layers in (self.states, self.open) for layer in layers for array in layer):
                rows[destination] = rows[source]


@dataclass(frozen=True, slots=True)
class SequenceStep:
    """Tokens begin..end-1 of a step, at positions up to length - 1. `places` [length] locates all of the sequence."""

    begin: int
    end: int
    length: int
    places: Any

    @property
    def start(self) -> int:
        """Position of its first token in the step."""
        return self.length - (self.end - self.begin)


def activate(kind: Activation, x: Any) -> Any:
    if kind == "silu":
        return functional.silu(x)
    if kind == "relu":
        return torch.relu(x)
    if kind == "relu2":
        return torch.relu(x).square()
    if kind == "sigmoid":
        return torch.sigmoid(x)
    if kind == "softplus":
        return functional.softplus(x)
    if kind in ("gelu", "gelu_tanh"):
        return functional.gelu(x, approximate="tanh" if kind == "gelu_tanh" else "none")
    raise EngineError(f"the torch backend has no activation {kind!r}")


class TorchStep:
    """A `ModelInput` on the device, and the cache that it reads and writes. A place is block * block_size + offset.

    `tapped` fills with the tensors that the graph taps.
    """

    def __init__(
        self, inputs: ModelInput, cache: TorchKVCache, adapters: StepAdapters, at_once: bool = False
    ) -> None:
        def tensor(values: IntArray) -> Any:
            return torch.from_numpy(values.astype(np.int64)).to(cache.device)

        self.inputs, self.cache, self.adapters, self.at_once = inputs, cache, adapters, at_once
        self.seen: dict[Any, Any] = {}  # what attention at once gathers for layers of one kind
        self.tapped: list[Any] = []
        self.tokens_T, self.positions_T = tensor(inputs.tokens_T), tensor(inputs.positions_T)
        self.logit_rows_L = tensor(inputs.logit_rows_L)
        self.sequences: list[SequenceStep] = []
        offsets = np.arange(cache.block_size)
        cu_q, kv_len = inputs.cu_q_B1.tolist(), inputs.kv_len_B.tolist()
        for b, slot in enumerate(inputs.slots_B.tolist()):
            blocks = inputs.block_table_SM[slot, : -(-kv_len[b] // cache.block_size)]
            places = (blocks[:, None] * cache.block_size + offsets).reshape(-1)[: kv_len[b]]
            self.sequences.append(SequenceStep(cu_q[b], cu_q[b + 1], kv_len[b], tensor(places)))
        self.places_T = torch.cat([s.places[s.start :] for s in self.sequences])

    xp: Any = torch

    @property
    def kv_spec(self) -> KVSpec:
        return self.cache.spec

    def wide(self, x: Any) -> Any:
        return x.float()

    single = wide

    def double(self, x: Any) -> Any:
        return x.float() if self.at_once else x.double()  # some devices lack float64

    def own(self, values: Array) -> Any:
        return torch.from_numpy(np.array(values, np.float32)).to(self.cache.device)

    def constant(self, values: Array) -> Any:
        kept = self.cache.constants
        if id(values) not in kept:
            kept[id(values)] = values, self.own(values)  # values stay alive, and so does their id
        return kept[id(values)][1]

    def host(self, x: Any) -> Array:
        return np.asarray(x.cpu().numpy())

    def row(self, x: Any, i: int) -> Any:
        return x[i].float().clone()

    def order(self, x: Any) -> Any:
        return torch.argsort(x, stable=True)

    def taken(self, x: Any, places: Any) -> Any:
        return torch.take_along_dim(x, places.long(), -1)

    def add_rows(self, total: Any, rows: Array, values: Any) -> None:
        total.index_add_(0, torch.from_numpy(rows).to(total.device), values)

    def activate(self, kind: Activation, x: Any) -> Any:
        return activate(kind, x)

    def times(self, weight: Matrix, x: Any) -> Any:
        own = own_matrix(weight)
        if self.at_once or len(x) == 0:
            return own.times(x).float()
        return torch.stack([own.times(row.clone()) for row in x])

    def embedded(self, table: Matrix, ids: Any) -> Any:
        return own_matrix(table).values[torch.as_tensor(ids).long().to(self.cache.device)]

    def states(self, layer: int, state: int) -> tuple[Any, Any]:
        return self.cache.states[layer][state], self.cache.open[layer][state]

    def _places(self, layer: int, b: IntArray | int, positions: IntArray) -> Any:
        """Find the rows of a layer where tokens of sequences `b` lie at some positions, or entries that end there."""
        size, kept = self.cache.block_size, self.cache.spec.layer(layer)
        blocks = self.inputs.block_table_SM[self.inputs.slots_B[b], positions // size].astype(np.int64)
        rows = positions % size // min(kept.every, size)
        return torch.from_numpy(blocks * kept.rows(size) + rows).to(self.cache.device)

    def _rows(self, side: Any, layer: int, b: int) -> Any:
        every, seq = self.cache.spec.layer(layer).every, self.sequences[b]
        if every == 1:
            return side[seq.places].float()
        return side[self._places(layer, b, np.arange(every - 1, seq.length, every, dtype=np.int32))].float()

    def keys(self, layer: int, b: int) -> Any:
        return self._rows(self.cache.keys[layer], layer, b) * self.cache.key_scales[layer]

    def values(self, layer: int, b: int) -> Any:
        return self._rows(self.cache.values[layer], layer, b) * self.cache.value_scales[layer]

    def store(self, layer: int, tokens: Sequence[int], keys: Any, values: Any) -> None:
        places, cache = self.places_T, self.cache
        if cache.spec.layer(layer).every > 1:
            owners = sequences_of(self.inputs, tokens)
            places = self._places(layer, owners, self.inputs.positions_T[tokens])
        elif len(tokens) < len(places):
            places = places[list(tokens)]
        sides = (cache.keys, keys, cache.key_scales), (cache.values, values, cache.value_scales)
        for side, new, scales in sides:
            if new is None:
                continue
            new = new / scales[layer]
            if (most := FP8_MOST.get(cache.spec.dtype)) is not None:
                new = new.clamp(-most, most)
            kept = round_int8(new) if cache.spec.dtype == "int8" else new
            side[layer][places] = kept.to(side[layer].dtype)
