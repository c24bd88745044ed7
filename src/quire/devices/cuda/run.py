"""Runs an encoded graph over a paged cache on a device, step by step."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from quire.devices.adapters import Adapter
from quire.devices.cuda.adapters import SlotAdapters, StepAdapters
from quire.devices.cuda.arena import Arena
from quire.devices.cuda.cache import CudaKVCache
from quire.devices.cuda.errors import device_errors
from quire.devices.cuda.fuse import fused
from quire.devices.cuda.hidden import CudaRows
from quire.devices.cuda.launch import Launcher
from quire.devices.cuda.record import Recorder, check_operations, encode
from quire.devices.cuda.states import state_step
from quire.devices.cuda.step import CudaStep
from quire.devices.inputs import check_input, check_logit_rows, check_states
from quire.devices.protocol import FloatArray, Graph, Limits, ModelInput
from quire.devices.torch.run import TorchLogits
from quire.errors import EngineError, ResourceError


class CudaExecutable:
    """The launches of a graph, bound to a cache. Values live until the next run."""

    def __init__(
        self, graph: Graph, kv: CudaKVCache, limits: Limits, run: Launcher, last_tokens: Any
    ) -> None:
        self._last_tokens = last_tokens
        check_operations(graph)
        self._graph = own = fused(graph, limits.max_adapters > 0)
        self._kv, self._limits, self._run = kv, limits, run
        self._arena = Arena(own, kv.spec, limits)
        self._memory = torch.empty(self._arena.nbytes, dtype=torch.uint8, device=kv.device)
        recorder = Recorder(run, kv.device, self._arena.act)
        self._calls = encode(own, recorder)
        self._adapters = SlotAdapters(graph, recorder, limits.max_adapters)
        self._step: CudaStep | None = None
        self._table: Any = None  # the block tables of all slots, as steps appended to them

    @device_errors()
    def run(self, inputs: ModelInput) -> TorchLogits:
        check_input(inputs, self._kv, self._limits, self._graph.token_limit)
        check_states(inputs, self._kv.num_states, self._kv.num_open)
        if self._kv.device.type == "cuda":
            torch.cuda.set_device(self._kv.device)  # of this thread, in which Triton launches
        if inputs.appended_C3 is not None and self._table is None:
            self._table = torch.zeros(inputs.block_table_SM.shape, dtype=torch.int32, device=self._kv.device)
        mirror = None if inputs.appended_C3 is None else self._table
        self._step = step = CudaStep(inputs, self._arena, self._memory, self._kv, self._run, mirror)
        step.fill_in(self._last_tokens)
        if inputs.adapters_B is not None:
            step.adapters = StepAdapters(self._adapters, inputs, self._run, step)
        if inputs.states is not None:
            step.states = state_step(inputs, self._kv.device)
        for call in self._calls[: self._graph.body]:
            call(step)
        return self.logits(0, min(len(inputs.logit_rows_L), self._limits.max_logit_rows))

    @device_errors()
    def logits(self, start: int, stop: int) -> TorchLogits:
        step, graph = self._step, self._graph
        check_logit_rows(start, stop, None if step is None else len(step.logit_rows), self._limits)
        assert step is not None
        if start == stop:
            return TorchLogits(torch.empty((0, graph.vocab_size), device=self._kv.device))
        if graph.logits is None:
            raise EngineError("this stage has no head: a step cannot ask it for logits")
        step.narrow(graph.hidden, start, stop)
        if step.adapters is not None:
            step.adapters.narrow(start, stop)
        for call in self._calls[graph.body :]:
            call(step)
        return TorchLogits(step[graph.logits])

    def hidden(self) -> FloatArray:
        assert self._step is not None
        return _numpy(self._step.rows_of(self._graph.hidden))

    @device_errors(ResourceError)
    def adapt(self, slot: int, adapter: Adapter | None) -> int:
        return self._adapters.put(slot, adapter)

    def taps(self) -> tuple[CudaRows, ...]:
        return () if self._step is None else tuple(CudaRows(tensor.clone()) for tensor in self._step.tapped)


def _numpy(tensor: Any) -> FloatArray:
    return np.ascontiguousarray(tensor.float().cpu().numpy())
