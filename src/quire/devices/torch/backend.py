"""The torch backend: plain torch on any device, row by row in float32 or all rows at once, in any float type.

Needs torch, so it is imported on demand alone (devices/registry.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from quire import _native
from quire.devices.choices import CPU, Choices
from quire.devices.cpu.machine import measure_limits, usable_threads
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
from quire.devices.torch.batched import activation_type, formulas_in
from quire.devices.torch.cache import TorchKVCache
from quire.devices.torch.memory import device_memory
from quire.devices.torch.ops import FORMULAS
from quire.devices.torch.run import TorchExecutable, TorchSampler
from quire.devices.torch.weights import DTYPES, TorchMatrix, own_matrix
from quire.errors import ConfigError, EngineError
from quire.weights.activations import restored_rounding, stored_rounding
from quire.weights.layouts import AnyLayout
from quire.weights.schemes import multiplies_integers
from quire.weights.tensor import QuantTensor


class TorchBackend:
    """Plain torch. `threads` None: one per core that the process may use.

    In float32, each row alone: the bits of a request depend on it alone. Or `at_once`: much faster, without that.
    """

    places_blocks = False

    def __init__(
        self, threads: int | None = None, device: str = "cpu", choices: Choices = CPU, at_once: bool = False
    ) -> None:
        self.threads = usable_threads() if threads is None else threads
        self._device, self._at_once = torch.device(device), at_once
        # On the CPU by the thread.
        self.choices = choices.with_threads(self.threads) if choices.shared_memory else choices

    @property
    def name(self) -> str:
        way = "" if self._at_once else ", row by row"
        return f"torch {self._device}, {self.threads} thread{'' if self.threads == 1 else 's'}{way}"

    @property
    def caveat(self) -> str:
        if not self._at_once:
            return ""
        return (
            "runs in plain torch: the last bits of its logits may depend on the other requests in a step "
            "(--batch-invariant computes each row alone, in float32 and slowly)"
        )

    @property
    def fingerprint(self) -> str:
        return "torch floats" if self._at_once else "torch float32"

    def outline(self) -> TorchBackend:
        made = TorchBackend(self.threads, "meta", at_once=self._at_once)
        made.choices = self.choices
        return made

    def matrix(self, parts: Sequence[Array | QuantTensor], dtype: WeightType) -> TorchMatrix:
        return TorchMatrix.pack(parts, dtype, self._device, self._at_once)

    head = matrix

    def gated_matrix(
        self, gate: Array | QuantTensor, up: Array | QuantTensor, dtype: WeightType
    ) -> TorchMatrix:
        return self.matrix([gate, up], dtype)

    def takes(self, layout: AnyLayout) -> bool:
        return not layout.inputs

    def export(self, matrix: Matrix) -> tuple[dict[str, Any], Array]:
        own = own_matrix(matrix)
        layout = str(own.values.dtype).removeprefix("torch.")
        about = {"rows": own.shape[0], "layout": layout, "rounding": stored_rounding(own.rounding)}
        return about, own.values.reshape(-1).view(torch.uint8).cpu().numpy()

    def restore(self, about: dict[str, Any], data: Array) -> TorchMatrix:
        values = torch.tensor(data).view(DTYPES[about["layout"]]).reshape(about["rows"], -1)
        return TorchMatrix(values.to(self._device), restored_rounding(about["rounding"]))

    def kv_cache(
        self, spec: KVSpec, num_blocks: int, block_size: int, num_states: int = 0, num_open: int = 0
    ) -> TorchKVCache:
        return TorchKVCache(spec, num_blocks, block_size, self._device, num_states, num_open)

    def compile(self, graph: Graph, kv: KVCache, limits: Limits) -> TorchExecutable:
        formulas = formulas_in(activation_type(graph)) if self._at_once else FORMULAS
        return TorchExecutable(graph, own_cache(kv), limits, self.threads, formulas, self._at_once)

    def sampler(self, vocab_size: int) -> TorchSampler:
        return TorchSampler(vocab_size, _native.ThreadPool(self.threads))

    def workspace_bytes(self, graph: Graph, kv_spec: KVSpec, limits: Limits) -> int:
        """Count logits and four of the widest activation, which is about what torch holds at once."""
        logits = 4 * limits.max_logit_rows * graph.vocab_size
        if self._device.type == "mps" and kv_spec.dtype.startswith("fp8"):
            raise ConfigError("--device mps has no FP8: choose --kv-cache-dtype bfloat16")
        return logits + 4 * 4 * limits.max_tokens * widest_activation(graph, kv_spec)

    def free_memory(self) -> int:
        return device_memory(self._device)

    def arithmetic(self, weight: WeightType) -> Arithmetic:
        return "int8" if multiplies_integers(weight) else "fp32"

    def measure_limits(self, arithmetic: Arithmetic) -> MachineLimits:
        return measure_limits(self.threads, arithmetic, "auto")


def own_cache(kv: KVCache) -> TorchKVCache:
    if not isinstance(kv, TorchKVCache):
        raise EngineError(f"the torch backend got a KV cache of {type(kv).__name__}")
    return kv
