"""The backend of GPUs: Triton kernels over tensors of a device, or interpreted over tensors of the CPU.

Needs torch and triton, so it is imported on demand alone (devices/selection.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from copy import copy
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from quire import _native
from quire.devices.choices import Choices
from quire.devices.cpu.machine import measure_limits, usable_threads
from quire.devices.cpu.sampler import NativeSampler
from quire.devices.cuda import parts, peers, selfcheck
from quire.devices.cuda.admit import Admission
from quire.devices.cuda.arena import CLOSED_STATES, Arena
from quire.devices.cuda.cache import CudaKVCache, own_cache
from quire.devices.cuda.encoders import exchanges
from quire.devices.cuda.errors import device_errors
from quire.devices.cuda.fuse import fused
from quire.devices.cuda.launch import Launcher
from quire.devices.cuda.loading import Ring
from quire.devices.cuda.pack import CudaMatrix, own_matrix, packs
from quire.devices.cuda.record import check_operations
from quire.devices.cuda.run import CudaExecutable
from quire.devices.cuda.sampler import CudaSampler
from quire.devices.cuda.selfcheck import Checks
from quire.devices.cuda.stored import export, restore
from quire.devices.cuda.target import target_of
from quire.devices.graph import Graph
from quire.devices.ops import AllReduce
from quire.devices.protocol import (
    Arithmetic,
    Array,
    KVCache,
    KVSpec,
    Limits,
    MachineLimits,
    Matrix,
    WeightType,
)
from quire.devices.torch.memory import device_memory
from quire.errors import ConfigError, ResourceError
from quire.lazy import Lazy
from quire.weights.layouts import AnyLayout
from quire.weights.tensor import QuantTensor

if TYPE_CHECKING:
    from quire.devices.cuda import aot, cubins, jit
else:
    cubins, jit = Lazy("quire.devices.cuda.cubins"), Lazy("quire.devices.cuda.jit")
    aot = Lazy("quire.devices.cuda.aot")

LAYOUT = 1  # of packed weights; older engine directories are refused
MOST_SLOTS = 1 << 16
GRAPH, CUT = 4 << 20, 64 << 10  # bytes that a GPU takes for a graph and for each cut in it, about

Planned = tuple[Graph, KVSpec, Limits]


class CudaBackend:
    """Kernels of this folder on `device`; None: interpreted on the CPU. `threads` sample tokens on the host.

    `artifacts` are kernels compiled ahead. What executables launch is checked by `checks`, or not at all, and other
    kernels compute what `admission` lets them.
    """

    places_blocks = False

    def __init__(
        self, device: str | None, choices: Choices, threads: int | None = None, artifacts: Path | None = None,
        checks: Checks | None = None, admission: Admission | None = None,
    ) -> None:  # fmt: skip
        self.choices, self.checks, self.admission = choices, checks, admission
        self.threads = usable_threads() if threads is None else threads
        self._device, self._gpu = torch.device(device or "cpu"), device
        self._ring = Ring(self._device)
        # Of each slot, which the sampler writes and the next step reads.
        self._last_tokens = torch.zeros(MOST_SLOTS, dtype=torch.int32, device=self._device)
        self._run: Launcher = self._launcher(artifacts)
        self.planned: list[Planned] = []
        self._compiling: Future[None] | None = None

    def _launcher(self, artifacts: Path | None) -> Launcher:
        if self._gpu is None:
            return jit.InterpretedLauncher()
        return cubins.gpu_launcher(target_of(*torch.cuda.get_device_capability(self._gpu)), artifacts)

    @property
    def name(self) -> str:
        if self._gpu is None:
            return "a GPU's kernels, interpreted on the CPU"
        return f"{self._gpu} {torch.cuda.get_device_name(self._gpu)}, kernels for {self._run.target.name}"

    def _compile_ahead(self) -> None:
        """Compile what was planned while weights are loaded; blocks of another size have few kernels of their own."""
        run, waits = self._run, self._gpu is not None and self._device.type != "meta"
        if waits and self._compiling is None and isinstance(run, cubins.CubinLauncher):
            pool, size = ThreadPoolExecutor(1, "kernels"), self.choices.block_size
            self._compiling = pool.submit(aot.prepare, run, [*self.planned], size, self.choices)
            pool.shutdown(wait=False)

    @property
    def caveat(self) -> str:
        if self._gpu is None:
            return "is computed by an interpreter, thousands of times as slow as by --device cpu: for tests"
        return (
            "runs on kernels that no GPU has been seen to run yet (`quire docs gpu` says how to check yours)"
        )

    @property
    def fingerprint(self) -> str:
        return f"gpu layout {LAYOUT}"

    def outline(self) -> CudaBackend:
        made, meta = copy(self), torch.device("meta")
        made._device, made._ring, made._last_tokens = meta, Ring(meta), self._last_tokens.to(meta)
        return made

    @device_errors(ResourceError)
    def matrix(self, parts: Sequence[Array | QuantTensor], dtype: WeightType) -> CudaMatrix:
        self._compile_ahead()
        return CudaMatrix.pack(parts, dtype, self._ring, threads=self.threads, packs=self.takes)

    head = matrix

    @device_errors(ResourceError)
    def gated_matrix(
        self, gate: Array | QuantTensor, up: Array | QuantTensor, dtype: WeightType
    ) -> CudaMatrix:
        return CudaMatrix.pack([gate, up], dtype, self._ring, True, self.threads, self.takes)

    def takes(self, layout: AnyLayout) -> bool:
        return packs(layout, self._run.target.e4m3)

    def export(self, matrix: Matrix) -> tuple[dict[str, Any], Array]:
        return export(own_matrix(matrix))

    @device_errors(ResourceError)
    def restore(self, about: dict[str, Any], data: Array) -> CudaMatrix:
        self._compile_ahead()
        return restore(about, data, self._ring, self._run.target.e4m3)

    @device_errors(ResourceError)
    def kv_cache(
        self, spec: KVSpec, num_blocks: int, block_size: int, num_states: int = 0, num_open: int = 0
    ) -> CudaKVCache:
        return CudaKVCache(spec, num_blocks, block_size, self._device, num_states, num_open)

    @device_errors(ResourceError)
    def compile(self, graph: Graph, kv: KVCache, limits: Limits) -> CudaExecutable:
        self._ring.give_back()
        if self._gpu is not None and isinstance(self._run, cubins.CubinLauncher):
            if self._compiling is not None:
                self._compiling.result()
            aot.prepare(self._run, self.planned, kv.block_size, self.choices)
        about = self._run, self._last_tokens, self.checks, self.admission
        return CudaExecutable(graph, own_cache(kv), limits, *about)

    def sampler(self, vocab_size: int) -> CudaSampler:
        about = vocab_size, _native.ThreadPool(self.threads)
        made = CudaSampler(*about, self._run, self._last_tokens)
        if self.checks is not None:
            other = CudaSampler(*about, self._run, self._last_tokens), NativeSampler(*about), self._device
            device = selfcheck.fingerprint(self._device, self._run.target.name)
            check_sampler = partial(parts.check_sampler, *other)
            made.plain = not self.checks.hold(device, f"sampling of {vocab_size} tokens", check_sampler)
        return made

    def check(self, graph: Graph, kv: KVCache, limits: Limits) -> dict[str, tuple[bool, bool]]:
        self.checks, self.admission = (asked := selfcheck.Asked()), None
        self.compile(graph, kv, limits)
        self.sampler(graph.vocab_size)
        found = asked.of(selfcheck.fingerprint(self._device, self._run.target.name))
        return {name: (verdict.accurate, verdict.exact) for name, verdict in found.items()}

    def workspace_bytes(self, graph: Graph, kv_spec: KVSpec, limits: Limits) -> int:
        """Count the arena, and room for mixtures, states and graphs. ConfigError for what no kernel computes."""
        self.planned.append((graph, kv_spec, limits))
        check_operations(graph)
        if kv_spec.dtype == "fp8_e4m3" and not self._run.target.e4m3:
            raise ConfigError(
                f"{self._run.target.name} does not convert fp8_e4m3: choose --kv-cache-dtype fp8_e5m2, int8 or auto"
            )
        own = fused(graph, limits.max_adapters > 0)
        arena = Arena(own, kv_spec, limits)
        if self._run.target.family == "interpreter":
            return arena.nbytes + arena.beside
        # The body of a step and its head, with adapters and without, and what they need beside the arena.
        parts = 2 * GRAPH + CUT * sum(type(op) in exchanges.ENCODERS for op in graph.ops)
        captured = len(limits.graphs) * parts * (2 if limits.max_adapters else 1)
        captured += arena.beside * min(max(limits.graphs, default=0), limits.max_tokens) // limits.max_tokens
        scratch = kv_spec.token_bytes(self.choices.block_size) * self.choices.block_size
        sums = 0
        if self.admission is not None:
            key = self.admission.key(torch.device(self._gpu or "cpu"), self._run.target.name)
            sums = self.admission.room(own, arena, kv_spec, limits, key)
        sums += peers.ROOM if any(isinstance(op, AllReduce) for op in graph.ops) else 0
        return arena.nbytes + arena.beside + CLOSED_STATES + captured + scratch + sums

    def free_memory(self) -> int:
        return device_memory(self._device)

    def arithmetic(self, weight: WeightType) -> Arithmetic:
        return "fp32" if weight == "float32" else "bf16"

    def measure_limits(self, arithmetic: Arithmetic) -> MachineLimits:
        if self._gpu is None:
            return measure_limits(self.threads, arithmetic, "auto")
        dtype = torch.float32 if arithmetic == "fp32" else torch.bfloat16
        gpu: Any = torch.cuda
        a = torch.randn(4096, 4096, device=self._gpu, dtype=dtype)
        source = torch.empty(1 << 29, dtype=torch.uint8, device=self._gpu)
        copied, times = torch.empty_like(source), list[float]()
        works: list[Callable[[], Any]] = [lambda: copied.copy_(source), lambda: a @ a]
        for work in works:
            work()
            begin, end = (gpu.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(10):
                work()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) / 1e4)
        read, peak = 2 * source.nbytes / times[0] / 1e9, 2 * 4096**3 / times[1] / 1e9
        return MachineLimits(read, peak, "fp32" if arithmetic == "fp32" else "bf16", self.threads)
