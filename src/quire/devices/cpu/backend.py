"""The CPU backend: packs weights, encodes a graph once as a native plan, and runs a step in one native call.

Knows graphs and `quire._native`; knows no model family and no scheduler.
"""

from __future__ import annotations

import platform
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from quire import _native
from quire.devices.choices import CPU, Choices
from quire.devices.cpu.errors import native_errors
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
from quire.devices.cpu.run import NativeExecutable, NativeKVCache, layer_tuples
from quire.devices.cpu.sampler import NativeSampler
from quire.devices.protocol import (
    Arithmetic,
    Array,
    Graph,
    KVCache,
    KVSpec,
    Limits,
    MachineLimits,
    Matrix,
    WeightType,
)
from quire.errors import EngineError
from quire.lazy import Lazy
from quire.weights.layouts import AnyLayout
from quire.weights.schemes import Quantized, multiplies_integers
from quire.weights.tensor import QuantTensor

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

    caveat = ""

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

    @property
    def places_blocks(self) -> bool:
        return True

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
            plan = _native.Plan(
                self.isa,
                self.pool,
                layer_tuples(kv_spec),
                limits.max_tokens,
                limits.max_seqs,
                limits.max_logit_rows,
                limits.max_adapters,
            )
            return Recording(plan, graph)


class OutlineBackend(NativeBackend):
    """Records plans of models that are not loaded."""

    def _pack(self, parts: Sequence[Array | QuantTensor], format: Any, gated: bool) -> NativeMatrix:
        return outline(parts, format, gated, self.pool)

    def restore(self, about: dict[str, Any], data: Array) -> NativeMatrix:
        return place(about, None, self.pool)
