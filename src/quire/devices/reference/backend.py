"""The reference backend: numpy on any machine, slow, the oracle of all others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from quire.devices.adapters import Adapter, check_slots, place_adapter
from quire.devices.choices import CPU
from quire.devices.cpu.machine import free_memory, measure_limits
from quire.devices.graph import Evaluator, Graph, widest_activation
from quire.devices.host import HostLogits
from quire.devices.inputs import check_input, check_logit_rows, check_states
from quire.devices.protocol import (
    Arithmetic,
    Array,
    FloatArray,
    KVCache,
    KVSpec,
    Limits,
    MachineLimits,
    Matrix,
    ModelInput,
    WeightType,
)
from quire.devices.reference.cache import ReferenceKVCache
from quire.devices.reference.ops import FORMULAS, ReferenceStep
from quire.devices.reference.sampler import ReferenceSampler
from quire.devices.reference.weights import ReferenceMatrix, own_matrix
from quire.devices.step import StepAdapters
from quire.errors import EngineError
from quire.weights.activations import restored_rounding, stored_rounding
from quire.weights.layouts import AnyLayout
from quire.weights.schemes import multiplies_integers
from quire.weights.tensor import Inputs, QuantTensor


class ReferenceExecutable:
    """Computes the graph's operations one by one, each step anew. Logits live in one buffer, which it overwrites."""

    def __init__(self, graph: Graph, kv: ReferenceKVCache, limits: Limits) -> None:
        self._graph, self._kv, self._limits = graph, kv, limits
        self._logits = np.full((limits.max_logit_rows, graph.vocab_size), np.nan, np.float32)
        self._hidden = np.empty((0, graph.hidden_size), np.float32)
        self._evaluator = Evaluator(graph, FORMULAS)
        self._step: ReferenceStep | None = None
        self._adapters: dict[int, Adapter] = {}

    def run(self, inputs: ModelInput) -> HostLogits:
        check_input(inputs, self._kv, self._limits, self._graph.token_limit)
        check_slots(self._adapters, inputs)
        check_states(inputs, self._kv.num_states, self._kv.num_open)
        self._step = ReferenceStep(inputs, self._kv, StepAdapters(self._adapters, inputs))
        self._hidden = self._evaluator.hidden(self._step)
        return self.logits(0, min(len(inputs.logit_rows_L), self._limits.max_logit_rows))

    def logits(self, start: int, stop: int) -> HostLogits:
        check_logit_rows(start, stop, None if self._step is None else len(self._hidden), self._limits)
        assert self._step is not None
        self._logits.fill(np.nan)
        view = self._logits[: stop - start]
        if stop > start:
            self._step.adapters.narrow(start, stop)
            view[:] = self._evaluator.logits(self._step, self._hidden[start:stop])
        return HostLogits(view)

    def hidden(self) -> FloatArray:
        return self._hidden

    def adapt(self, slot: int, adapter: Adapter | None) -> int:
        return place_adapter(self._adapters, slot, adapter, self._limits.max_adapters)

    def taps(self) -> tuple[FloatArray, ...]:
        return tuple(self._step.tapped) if self._step is not None else ()


class ReferenceBackend:
    """numpy on any machine."""

    caveat = ""

    @property
    def name(self) -> str:
        return "reference (numpy, float64 sums)"

    @property
    def threads(self) -> int:
        return 1

    choices = CPU

    def matrix(self, parts: Sequence[Array | QuantTensor], dtype: WeightType) -> ReferenceMatrix:
        return ReferenceMatrix(parts, dtype)

    head = matrix

    def gated_matrix(
        self, gate: Array | QuantTensor, up: Array | QuantTensor, dtype: WeightType
    ) -> ReferenceMatrix:
        return ReferenceMatrix([gate, up], dtype)

    def takes(self, layout: AnyLayout) -> bool:
        return True

    @property
    def fingerprint(self) -> str:
        return "reference"

    def export(self, matrix: Matrix) -> tuple[dict[str, Any], Array]:
        values = own_matrix(matrix).values.astype(np.float32)
        inputs = own_matrix(matrix).inputs
        given = None if inputs is None else (inputs.order.tolist(), inputs.factors.tolist())
        about = {
            "rows": len(values),
            "layout": "float32",
            "rounding": stored_rounding(own_matrix(matrix).rounding),
            "inputs": given,
        }
        return about, values.reshape(-1).view(np.uint8)

    def restore(self, about: dict[str, Any], data: Array) -> ReferenceMatrix:
        matrix = ReferenceMatrix([data.view(np.float32).reshape(about["rows"], -1)], "float32")
        matrix.rounding = restored_rounding(about["rounding"])
        if about["inputs"] is not None:
            order, factors = about["inputs"]
            matrix.inputs = Inputs(np.array(order, np.int32), np.array(factors, np.float32))
        return matrix

    @property
    def places_blocks(self) -> bool:
        return False

    def kv_cache(
        self, spec: KVSpec, num_blocks: int, block_size: int, num_states: int = 0, num_open: int = 0
    ) -> ReferenceKVCache:
        return ReferenceKVCache(spec, num_blocks, block_size, num_states, num_open)

    def compile(self, graph: Graph, kv: KVCache, limits: Limits) -> ReferenceExecutable:
        if not isinstance(kv, ReferenceKVCache):
            raise EngineError(f"the reference backend got a KV cache of {type(kv).__name__}")
        return ReferenceExecutable(graph, kv, limits)

    def workspace_bytes(self, graph: Graph, kv_spec: KVSpec, limits: Limits) -> int:
        """Logits and four of the widest activation, which is about what numpy holds at once."""
        logits = 4 * limits.max_logit_rows * graph.vocab_size
        return logits + 4 * 4 * limits.max_tokens * widest_activation(graph, kv_spec)

    def outline(self) -> ReferenceBackend:
        return self

    def sampler(self, vocab_size: int) -> ReferenceSampler:
        return ReferenceSampler(vocab_size)

    def arithmetic(self, weight: WeightType) -> Arithmetic:
        return "int8" if multiplies_integers(weight) else "fp32"

    def free_memory(self) -> int:
        return free_memory()

    def measure_limits(self, arithmetic: Arithmetic) -> MachineLimits:
        return measure_limits(self.threads, arithmetic, "auto")
