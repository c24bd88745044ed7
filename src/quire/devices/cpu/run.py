"""Runs a recorded plan over a paged KV cache: one native call per step, without the GIL."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import TYPE_CHECKING

import numpy as np
from msgspec.structs import astuple

from quire import _native
from quire.devices.cpu.errors import NATIVE, engine_error, native_errors
from quire.devices.cpu.record import Recording
from quire.devices.host import HostLogits
from quire.devices.protocol import FloatArray, IntArray, KVLayer, KVSpec, Limits, ModelInput

if TYPE_CHECKING:
    from quire.devices.adapters import Adapter
    from quire.devices.cpu.adapters import AdapterPacker


LayerTuple = tuple[int, int, int, int, list[tuple[int, int]]]


def layer_tuples(spec: KVSpec) -> list[LayerTuple]:
    """(kv heads, head_dim, value_dim or 0, every, sizes of states and their open rows) of each layer."""

    def entry(layer: KVLayer) -> LayerTuple:
        states = [(prod(state.shape), state.row) for state in layer.states]
        return layer.num_kv_heads, layer.head_dim, layer.value_dim or 0, layer.every, states

    return [entry(spec.layer(index)) for index in range(spec.num_layers)]


def scale_lists(spec: KVSpec) -> list[list[float]]:
    """The scales of each layer's keys, then of its values; none at all if no layer has any."""
    layers = [spec.scales_of(index) for index in range(spec.num_layers)] if spec.scales else []
    return [[] if scales is None else [*scales.keys, *scales.values] for scales in layers]


class NativeKVCache:
    """Paged keys and values in native memory (csrc/plan/kv_cache.h); pages are allocated when first written."""

    def __init__(self, spec: KVSpec, num_blocks: int, block_size: int, *states: int) -> None:
        shape = spec.block_shape
        num_slabs = num_blocks * (shape.full + shape.windowed)
        self.spec, self.num_blocks, self.block_size = spec, num_slabs // shape.full, block_size
        with native_errors:
            self.store = _native.KVStore(
                layer_tuples(spec),
                spec.dtype,
                self.num_blocks,
                block_size,
                scale_lists(spec),
                spec.columns,
                num_slabs,
                *states,
            )

    def place_blocks(self, rows: Sequence[Sequence[int]]) -> None:
        with native_errors:
            self.store.place_blocks(np.array(rows, np.int32))

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        _copy(self.store.copy_blocks, copies)

    def copy_states(self, copies: Sequence[tuple[int, int]]) -> None:
        _copy(self.store.copy_states, copies)


def _copy(copy: Callable[[IntArray, IntArray], None], copies: Sequence[tuple[int, int]]) -> None:
    if copies:
        sources, destinations = np.array(copies, np.int32).T.copy()
        with native_errors:
            copy(sources, destinations)


class NativeExecutable:
    """A finished plan bound to a cache. One step at a time; views are overwritten by the next call."""

    def __init__(
        self,
        recording: Recording,
        cache: NativeKVCache,
        limits: Limits,
        adapting: Callable[[], AdapterPacker],
    ) -> None:
        self._plan = plan = recording.plan
        self._recording, self._adapting = recording, adapting
        self._limits = limits
        with native_errors:
            plan.bind(cache.store)
        self._has_head = recording.output is None
        self._hidden: FloatArray
        if recording.output is None:
            self._logits: FloatArray = plan.logits_view()
            self._hidden = plan.hidden_view()
        else:
            self._logits = np.empty((0, 0), np.float32)
            self._hidden = plan.tap_view(recording.output)
        self._best: IntArray | None = plan.best_view()
        self._taps: list[FloatArray] = [plan.tap_view(tap) for tap in recording.taps]
        self._num_tokens = 0

    def run(self, inputs: ModelInput) -> HostLogits:
        try:
            self._plan.run(
                inputs.tokens_T,
                inputs.positions_T,
                inputs.cu_q_B1,
                inputs.kv_len_B,
                inputs.slots_B,
                inputs.block_table_SM,
                inputs.logit_rows_L,
                inputs.greedy,
                inputs.hidden_TD,
                inputs.adapters_B,
                None if inputs.states is None else astuple(inputs.states),
            )
        except NATIVE as error:
            raise engine_error(error) from error
        self._num_tokens = len(inputs.tokens_T)
        return self._rows(min(len(inputs.logit_rows_L), self._limits.max_logit_rows))

    def logits(self, start: int, stop: int) -> HostLogits:
        with native_errors:
            self._plan.head(start, stop)
        return self._rows(stop - start)

    def hidden(self) -> FloatArray:
        return self._hidden[: self._plan.num_logit_rows if self._has_head else self._num_tokens]

    def adapt(self, slot: int, adapter: Adapter | None) -> int:
        changes = None if adapter is None else self._adapting().changes(adapter, self._recording)
        with native_errors:
            return int(self._plan.set_adapter(slot, changes))

    def taps(self) -> tuple[FloatArray, ...]:
        return tuple(tap[: self._num_tokens] for tap in self._taps)

    def _rows(self, count: int) -> HostLogits:
        return HostLogits(self._logits[:count], None if self._best is None else self._best[:count])
