"""Runs a graph over numpy arrays."""

from __future__ import annotations

import numpy as np

from quire.devices.adapters import Adapter, check_slots, place_adapter
from quire.devices.graph import Evaluator, Graph
from quire.devices.host import HostLogits
from quire.devices.inputs import check_input, check_logit_rows, check_states
from quire.devices.protocol import FloatArray, Limits, ModelInput
from quire.devices.reference.cache import ReferenceKVCache
from quire.devices.reference.ops import FORMULAS, ReferenceStep
from quire.devices.step import StepAdapters


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
