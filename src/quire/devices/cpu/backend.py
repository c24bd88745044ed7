"""The CPU backend: packs weights, encodes a graph once as a native plan, and runs a step in one native call.

Knows graphs and `quire._native`; knows no model family and no scheduler.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec.structs import astuple

from quire import _native
from quire.devices.choices import CPU, Choices
from quire.devices.cpu.errors import NATIVE, engine_error, native_errors
from quire.devices.cpu.machine import free_memory, measure_limits, usable_threads
from quire.devices.cpu.pack import (
    NativeMatrix,
    describe,
    format_of,
    multiplies_pairs,
    outline,
    pack,
    packed_of,
    place,
)
from quire.devices.cpu.record import Recording
from quire.devices.cpu.sampler import NativeSampler
from quire.devices.host import HostLogits
from quire.devices.protocol import (
    Arithmetic,
    Array,
    FloatArray,
    Graph,
    IntArray,
    KVCache,
    KVLayer,
    KVSpec,
    Limits,
    MachineLimits,
    Matrix,
    ModelInput,
    WeightType,
)
from quire.errors import EngineError
from quire.lazy import Lazy
from quire.weights.layouts import AnyLayout
from quire.weights.schemes import Quantized, multiplies_integers
from quire.weights.tensor import QuantTensor

if TYPE_CHECKING:
    from quire.devices.adapters import Adapter
    from quire.devices.cpu.adapters import AdapterPacker


LayerTuple = tuple[int, int, int, int, list[tuple[int, int]]]


def layer_tuples(spec: KVSpec) -> list[LayerTuple]:
    """Return (kv heads, head_dim, value_dim or 0, every, sizes of states and their open rows) of each layer."""

    def entry(layer: KVLayer) -> LayerTuple:
        states = [(prod(state.shape), state.row) for state in layer.states]
        return layer.num_kv_heads, layer.head_dim, layer.value_dim or 0, layer.every, states

    return [entry(spec.layer(index)) for index in range(spec.num_layers)]


def scale_lists(spec: KVSpec) -> list[list[float]]:
    """Return the scales of each layer's keys, then of its values; none at all if no layer has any."""
    return [[] if scales is None else [*scales.keys, *scales.values] for scales in spec.scales]


class NativeKVCache:
    """Paged keys and values in native memory (csrc/plan/kv_cache.h); pages are allocated when first written."""

    def __init__(self, spec: KVSpec, num_blocks: int, block_size: int, *states: int) -> None:
        shape = spec.block_shape
        num_slabs = num_blocks * (shape.full + shape.windowed)
        self.spec, self.num_blocks, self.block_size = spec, num_slabs // shape.full, block_size
        with native_errors:
            sizes = self.num_blocks, block_size, scale_lists(spec), spec.columns, num_slabs
            self.store = _native.KVStore(layer_tuples(spec), spec.dtype, *sizes, *states)

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
        self._recording, self._adapting, self._limits = recording, adapting, limits
        with native_errors:
            plan.bind(cache.store)
        self._has_head = recording.output is None
        self._logits: FloatArray = plan.logits_view() if self._has_head else np.empty((0, 0), np.float32)
        self._hidden: FloatArray = plan.hidden_view() if self._has_head else plan.tap_view(recording.output)
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


if TYPE_CHECKING:
    from quire.devices.cpu import adapters
else:
    adapters = Lazy("quire.devices.cpu.adapters")


class NativeBackend:
    """C++ kernels on the CPU. `threads` None: one per core that the process may use. `isa`: instruction set.

    `compact` keeps bfloat16 weights in 12 bits without loss (csrc/linear/compact.h); by default if the instruction set
    can expand them fast. `screened` keeps an int8 copy behind a float32 or bfloat16 head, which greedy steps read to
    find candidates for the largest logit (csrc/linear/screened_argmax.h). Neither changes a bit of any result.
    """

    caveat, places_blocks = "", True

    def __init__(
        self,
        threads: int | None = None,
        isa: str = "auto",
        compact: bool | None = None,
        screened: bool = True,
    ) -> None:
        if threads is not None and threads < 1:
            raise EngineError(f"threads must be at least 1, got {threads}")
        with native_errors:
            self.isa: str = _native.resolve_isa(isa)
        self.compact = self.isa.startswith("avx") if compact is None else compact
        self.screened = screened
        self.pool = _native.ThreadPool(usable_threads() if threads is None else threads)

    @property
    def threads(self) -> int:
        return int(self.pool.threads)

    @property
    def choices(self) -> Choices:
        return CPU.with_threads(self.threads)

    @property
    def name(self) -> str:
        return f"native {self.isa}, {self.threads} thread{'' if self.threads == 1 else 's'}"

    def matrix(self, parts: Sequence[Array | QuantTensor], dtype: WeightType) -> NativeMatrix:
        return self._pack(parts, format_of(dtype, self.compact, screened=False), gated=False)

    def head(self, parts: Sequence[Array | QuantTensor], dtype: WeightType) -> NativeMatrix:
        return self._pack(parts, format_of(dtype, self.compact, self.screened), gated=False)

    def gated_matrix(
        self, gate: Array | QuantTensor, up: Array | QuantTensor, dtype: WeightType
    ) -> NativeMatrix:
        return self._pack((gate, up), format_of(dtype, self.compact, screened=False), gated=True)

    def takes(self, layout: AnyLayout) -> bool:
        return layout.name in _native.layouts()

    @property
    def fingerprint(self) -> str:
        return f"{platform.machine()} {self.isa}"

    def export(self, matrix: Matrix) -> tuple[dict[str, Any], Array]:
        packed = packed_of(matrix)
        return describe(packed), packed.bytes()

    def restore(self, about: dict[str, Any], data: Array) -> NativeMatrix:
        return place(about, data, self.pool)

    def kv_cache(
        self, spec: KVSpec, num_blocks: int, block_size: int, num_states: int = 0, num_open: int = 0
    ) -> NativeKVCache:
        return NativeKVCache(spec, num_blocks, block_size, num_states, num_open)

    def compile(self, graph: Graph, kv: KVCache, limits: Limits) -> NativeExecutable:
        if not isinstance(kv, NativeKVCache):
            raise EngineError(f"the native backend got a KV cache of {type(kv).__name__}")
        recording = self._record(graph, kv.spec, limits)
        return NativeExecutable(recording, kv, limits, lambda: adapters.AdapterPacker(self.isa, self.pool))

    def workspace_bytes(self, graph: Graph, kv_spec: KVSpec, limits: Limits) -> int:
        return int(self._record(graph, kv_spec, limits).plan.workspace_bytes)

    def sampler(self, vocab_size: int) -> NativeSampler:
        return NativeSampler(vocab_size, self.pool, self.isa)

    def free_memory(self) -> int:
        return free_memory()

    def arithmetic(self, weight: WeightType) -> Arithmetic:
        if isinstance(weight, Quantized):
            if multiplies_integers(weight):
                return "int8"
            pairs = weight.activations == "float" and multiplies_pairs(weight.layout)
        else:
            pairs = weight == "bfloat16"
        return "bf16" if pairs and self.isa.endswith("_bf16") else "fp32"

    def measure_limits(self, arithmetic: Arithmetic) -> MachineLimits:
        return measure_limits(self.threads, arithmetic, self.isa)

    def _pack(self, parts: Sequence[Array | QuantTensor], format: Any, gated: bool) -> NativeMatrix:
        return pack(parts, format, gated, self.isa, self.pool)

    def outline(self) -> OutlineBackend:
        return OutlineBackend(self.threads, self.isa, self.compact, self.screened)

    def _record(self, graph: Graph, kv_spec: KVSpec, limits: Limits) -> Recording:
        with native_errors:
            most = limits.max_tokens, limits.max_seqs, limits.max_logit_rows, limits.max_adapters
            return Recording(_native.Plan(self.isa, self.pool, layer_tuples(kv_spec), *most), graph)


class OutlineBackend(NativeBackend):
    """Records plans of models that are not loaded."""

    def _pack(self, parts: Sequence[Array | QuantTensor], format: Any, gated: bool) -> NativeMatrix:
        return outline(parts, format, gated, self.pool)

    def restore(self, about: dict[str, Any], data: Array) -> NativeMatrix:
        return place(about, None, self.pool)
