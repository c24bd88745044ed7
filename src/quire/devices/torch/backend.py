"""The torch backend: plain torch in float32 on any device, and other libraries' models over a paged cache.

Needs torch, so it is imported on demand alone (devices/registry.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from quire import _native
from quire.devices.choices import CPU, Choices
from quire.devices.cpu.machine import free_memory, measure_limits, usable_threads
from quire.devices.graph import Graph, widest_activation
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
from quire.devices.torch.cache import TorchKVCache
from quire.devices.torch.ops import FORMULAS
from quire.devices.torch.run import TorchExecutable, TorchSampler
from quire.devices.torch.weights import TorchMatrix, own_matrix
from quire.errors import EngineError
from quire.weights.activations import restored_rounding, stored_rounding
from quire.weights.layouts import AnyLayout
from quire.weights.schemes import multiplies_integers
from quire.weights.tensor import QuantTensor


class TorchBackend:
    """Plain torch, in float32. `threads` None: one per core that the process may use."""

    caveat = ""

    def __init__(self, threads: int | None = None, device: str = "cpu") -> None:
        self._threads = usable_threads() if threads is None else threads
        self._device = torch.device(device)

    @property
    def name(self) -> str:
        return f"torch {self._device}, {self._threads} thread{'' if self._threads == 1 else 's'}"

    @property
    def threads(self) -> int:
        return self._threads

    @property
    def choices(self) -> Choices:
        return CPU.with_threads(self.threads)

    @property
    def fingerprint(self) -> str:
        return "torch float32"

    def outline(self) -> TorchBackend:
        return TorchBackend(self._threads, "meta")

    def matrix(self, parts: Sequence[Array | QuantTensor], dtype: WeightType) -> TorchMatrix:
        return TorchMatrix.pack(parts, dtype, self._device)

    head = matrix

    def gated_matrix(
        self, gate: Array | QuantTensor, up: Array | QuantTensor, dtype: WeightType
    ) -> TorchMatrix:
        return TorchMatrix.pack([gate, up], dtype, self._device)

    def takes(self, layout: AnyLayout) -> bool:
        return not layout.inputs

    def export(self, matrix: Matrix) -> tuple[dict[str, Any], Array]:
        own = own_matrix(matrix)
        about = {"rows": own.shape[0], "layout": "float32", "rounding": stored_rounding(own.rounding)}
        return about, own.dequantize().reshape(-1).view(np.uint8)

    def restore(self, about: dict[str, Any], data: Array) -> TorchMatrix:
        values = torch.tensor(data.view(np.float32).reshape(about["rows"], -1), device=self._device)
        return TorchMatrix(values, restored_rounding(about["rounding"]))

    @property
    def places_blocks(self) -> bool:
        return False

    def kv_cache(
        self, spec: KVSpec, num_blocks: int, block_size: int, num_states: int = 0, num_open: int = 0
    ) -> TorchKVCache:
        return TorchKVCache(spec, num_blocks, block_size, self._device, num_states, num_open)

    def compile(self, graph: Graph, kv: KVCache, limits: Limits) -> TorchExecutable:
        return TorchExecutable(graph, own_cache(kv), limits, self._threads, FORMULAS)

    def sampler(self, vocab_size: int) -> TorchSampler:
        return TorchSampler(vocab_size, _native.ThreadPool(self._threads))

    def workspace_bytes(self, graph: Graph, kv_spec: KVSpec, limits: Limits) -> int:
        """Logits and four of the widest activation, which is about what torch holds at once."""
        logits = 4 * limits.max_logit_rows * graph.vocab_size
        return logits + 4 * 4 * limits.max_tokens * widest_activation(graph, kv_spec)

    def free_memory(self) -> int:
        return free_memory()

    def arithmetic(self, weight: WeightType) -> Arithmetic:
        return "int8" if multiplies_integers(weight) else "fp32"

    def measure_limits(self, arithmetic: Arithmetic) -> MachineLimits:
        return measure_limits(self._threads, arithmetic, "auto")


def own_cache(kv: KVCache) -> TorchKVCache:
    if not isinstance(kv, TorchKVCache):
        raise EngineError(f"the torch backend got a KV cache of {type(kv).__name__}")
    return kv
