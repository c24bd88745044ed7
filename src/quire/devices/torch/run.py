"""Runs a graph over torch tensors, and keeps its logits on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from quire.devices.adapters import Adapter, check_slots, place_adapter
from quire.devices.cpu.sampler import NativeSampler
from quire.devices.formulas import Formulas
from quire.devices.graph import Evaluator
from quire.devices.host import HostLogits
from quire.devices.inputs import check_input, check_logit_rows, check_states
from quire.devices.protocol import FloatArray, Graph, IntArray, Limits, ModelInput
from quire.devices.sampling import Logits
from quire.devices.step import StepAdapters
from quire.devices.torch.cache import TorchKVCache, TorchStep
from quire.errors import EngineError


def _numpy(tensor: Any) -> FloatArray:
    values: FloatArray = tensor.cpu().numpy()
    return np.ascontiguousarray(values)


@dataclass(frozen=True, slots=True)
class TorchLogits:
    """`Logits` on the device: a float32 tensor [L, V]."""

    tensor: Any

    def __len__(self) -> int:
        return int(self.tensor.shape[0])

    def __getitem__(self, rows: slice | Sequence[int]) -> TorchLogits:
        return TorchLogits(self.tensor[rows])

    def replaced(self, rows: Sequence[int], values: FloatArray) -> TorchLogits:
        tensor = self.tensor.clone()
        tensor[list(rows)] = torch.from_numpy(np.ascontiguousarray(values)).to(tensor.device)
        return TorchLogits(tensor)

    def largest(self, width: int) -> IntArray:
        ids: IntArray = self.tensor[:, :width].argmax(1).cpu().numpy()
        return ids

    def widened(self, columns: IntArray, ids: IntArray, width: int) -> TorchLogits:
        wide = self.tensor.new_full((len(self), width), -torch.inf)
        own, theirs = (torch.from_numpy(each).to(wide.device) for each in (columns, ids))
        wide[:, theirs] = self.tensor[:, own]
        return TorchLogits(wide)

    def numpy(self) -> FloatArray:
        return _numpy(self.tensor)


class TorchExecutable:
    """Computes the graph's operations one by one, each step anew, row by row or all rows `at_once`."""

    def __init__(
        self,
        graph: Graph,
        kv: TorchKVCache,
        limits: Limits,
        threads: int,
        formulas: Formulas,
        at_once: bool = False,
    ) -> None:
        self._graph, self._kv, self._limits, self._at_once = graph, kv, limits, at_once
        self._evaluator = Evaluator(graph, formulas)
        self._step: TorchStep | None = None
        self._hidden: Any = None
        self._adapters: dict[int, Adapter] = {}
        torch.set_num_threads(threads)

    @torch.inference_mode()
    def run(self, inputs: ModelInput) -> TorchLogits:
        check_input(inputs, self._kv, self._limits, self._graph.token_limit)
        check_slots(self._adapters, inputs)
        check_states(inputs, self._kv.num_states, self._kv.num_open)
        self._step = TorchStep(inputs, self._kv, StepAdapters(self._adapters, inputs), self._at_once)
        self._hidden = self._evaluator.hidden(self._step)
        return self.logits(0, min(len(inputs.logit_rows_L), self._limits.max_logit_rows))

    @torch.inference_mode()
    def logits(self, start: int, stop: int) -> TorchLogits:
        check_logit_rows(start, stop, None if self._step is None else len(self._hidden), self._limits)
        assert self._step is not None
        if start == stop:
            return TorchLogits(self._hidden.new_empty((0, self._graph.vocab_size), dtype=torch.float32))
        self._step.adapters.narrow(start, stop)
        return TorchLogits(self._evaluator.logits(self._step, self._hidden[start:stop]).float())

    def hidden(self) -> FloatArray:
        return _numpy(self._hidden.float())

    def adapt(self, slot: int, adapter: Adapter | None) -> int:
        return place_adapter(self._adapters, slot, adapter, self._limits.max_adapters)

    def taps(self) -> tuple[FloatArray, ...]:
        return () if self._step is None else tuple(_numpy(tap.float()) for tap in self._step.tapped)


class TorchSampler(NativeSampler):
    """Copies logits to the host and samples there."""

    def _copied(self, logits: Logits) -> HostLogits:
        if not isinstance(logits, TorchLogits):
            raise EngineError(f"the torch sampler got logits of {type(logits).__name__}")
        return HostLogits(logits.numpy())
