"""Runs an encoded graph over a paged cache on a device, step by step."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

import numpy as np
import torch

from quire.devices.adapters import Adapter
from quire.devices.cuda import parts
from quire.devices.cuda.adapters import SlotAdapters, StepAdapters
from quire.devices.cuda.admit import Admission, admit, launch_ends
from quire.devices.cuda.arena import CLOSED_STATES, Arena
from quire.devices.cuda.cache import CudaKVCache
from quire.devices.cuda.errors import device_errors
from quire.devices.cuda.fuse import fused
from quire.devices.cuda.graphs import Graphs
from quire.devices.cuda.hidden import CudaRows
from quire.devices.cuda.launch import Launcher
from quire.devices.cuda.record import Recorder, check_operations, encode, needs_host
from quire.devices.cuda.selfcheck import BLOCKS, Checks, check, described, fingerprint
from quire.devices.cuda.step import CudaStep
from quire.devices.graph import widths
from quire.devices.inputs import check_input, check_logit_rows, check_states
from quire.devices.ops import AllGather, AllReduce
from quire.devices.protocol import Graph, IntArray, Limits, ModelInput, StateInput
from quire.devices.torch.run import TorchLogits
from quire.errors import DeviceMemoryError, EngineError, ResourceError

log = logging.getLogger("quire.devices")


class CudaExecutable:
    """The launches of a graph, bound to a cache. Values live until the next run."""

    def __init__(
        self,
        graph: Graph,
        kv: CudaKVCache,
        limits: Limits,
        run: Launcher,
        last_tokens: Any,
        checks: Checks | None,
        admission: Admission | None = None,
    ) -> None:
        check_operations(graph)
        self._last_tokens = last_tokens
        self._peers = next((op.peers for op in graph.ops if isinstance(op, (AllReduce, AllGather))), None)
        self._graph = own = fused(graph, limits.max_adapters > 0)
        self._graphs = Graphs([size for size in limits.graphs if size <= limits.max_tokens], run, kv.device)
        self._kv, self._limits, self._run = kv, limits, self._graphs.run
        self._arena = Arena(own, kv.spec, limits)
        self._memory = torch.empty(self._arena.nbytes, dtype=torch.uint8, device=kv.device)
        self._closed = torch.empty(CLOSED_STATES if limits.graphs else 0, dtype=torch.uint8, device=kv.device)
        recorder = Recorder(self._run, kv.device, self._arena.act)
        self._calls = encode(own, recorder)
        wrong = [] if checks is None or kv.num_blocks < BLOCKS * 3 else self._wrong(checks)
        if wrong:
            self._calls = encode(own, recorder, wrong)
        if kv.device.type == "meta":
            launch_ends(own, recorder, self._arena)
        if admission is not None:
            self._on_device()
            about = own, self._calls, recorder, self._arena, kv.spec, limits, wrong
            self._calls = admit(admission, *about)
        self._plain = {self._calls[index] for index in wrong}
        self._body, self._head = self._calls[: own.body], self._calls[own.body :]
        self._adapters = SlotAdapters(graph, recorder, limits.max_adapters, limits.max_tokens)
        self._step: CudaStep | None = None
        self._padded: dict[int, CudaStep] = {}
        self._table: Any = None  # the block tables of all slots, as steps appended to them

    def _wrong(self, checks: Checks) -> list[int]:
        """Find operations whose kernels fail on this device, by index. What was not checked before is checked now."""
        graph, run, kv = self._graph, self._run, self._kv
        self._on_device()
        sizes, device = widths(graph, kv.spec), fingerprint(kv.device, run.target.name)
        checks.hold(device, "copies of blocks", partial(parts.check_copies, kv), "choose --device cpu")
        if self._limits.max_adapters:
            check_adapters = partial(parts.check_adapters, run, self._arena.act, kv.device)
            checks.hold(device, f"adapters of {self._arena.act}", check_adapters, "leave --enable-lora out")
        names = [described(op, index, sizes) for index, op in enumerate(graph.ops)]
        known = {name: verdict for name, verdict in checks.of(device).items() if name in names}
        if new := set(names) - known.keys() - {""}:
            wanted = [name if name in new else "" for name in names]
            found = check(graph, self._calls, self._own_step, wanted, self._limits)
            checks.add(device, found)
            known |= found
        wrong = checks.judge(known)
        return [index for index, name in enumerate(names) if name in wrong]

    def _on_device(self) -> None:
        """Let this thread launch on the cache's device."""
        if self._kv.device.type == "cuda":
            torch.cuda.set_device(self._kv.device)

    def _own_step(self, inputs: ModelInput) -> CudaStep:
        step = CudaStep(self._arena, self._memory, self._closed, self._kv, self._run)
        step.fill(inputs, None)
        return step

    @device_errors()
    def run(self, inputs: ModelInput) -> TorchLogits:
        check_input(inputs, self._kv, self._limits, self._graph.token_limit)
        check_states(inputs, self._kv.num_states, self._kv.num_open)
        self._on_device()
        self._step = step = self._filled(inputs)
        step.fill_in(self._last_tokens, self._peers)
        given = inputs.adapters_B is not None
        size = step.size if step is self._padded.get(step.size) else 0
        step.adapters = StepAdapters(self._adapters, inputs, self._run, step, size > 0) if given else None
        if given:
            self._graphs.forget_all_but(self._adapters.version)
        self._run_step("body", size, step)
        return self.logits(0, min(len(inputs.logit_rows_L), self._limits.max_logit_rows))

    def prepare(self, block_table_SM: IntArray) -> bool:
        """Capture the graphs of the largest size that has none."""
        sizes = [size for size in self._graphs.sizes if size not in self._padded]
        if sizes:
            before = self._step  # whose results nobody may have read
            try:
                self._capture(sizes[-1], block_table_SM)
            except DeviceMemoryError as error:
                log.warning("steps are launched kernel by kernel: %s", error)
                self._graphs.sizes = []
            self._step = before
        return bool(sizes)

    @device_errors()
    def _capture(self, size: int, block_table_SM: IntArray) -> None:
        """Capture the graphs of a size by a step of padding alone."""
        none, rows = np.zeros(0, np.int32), np.zeros((0, 3), np.int32)
        states = StateInput(none, none, none, rows) if self._kv.num_states else None
        bounds = np.zeros(1, np.int32)
        inputs = ModelInput(
            none, none, bounds, none, none, block_table_SM, none, appended_C3=rows, states=states
        )
        self._on_device()
        self._step = step = self._filled(inputs, size)
        step.adapters = None
        self._run_step("body", size, step)
        if self._graph.logits is not None and size <= self._limits.max_logit_rows:
            step.narrow(self._graph.hidden, 0, 0, size)
            self._run_step("head", size, step)

    def _run_step(self, part: str, size: int, step: CudaStep) -> None:
        """Launch a part of the operations, as graphs of a size; steps with adapters, and without, have their own."""
        version = None if step.adapters is None else self._adapters.version
        key = (part, size, version) if size else None
        calls = self._body if part == "body" else self._head
        self._graphs.run_step(key, calls, step, lambda call: call in self._plain or needs_host(call, step))

    def _filled(self, inputs: ModelInput, size: int = 0) -> CudaStep:
        """A step of a graph's size, which is kept if its kernels can be captured; a large one, of its own size.

        All ranks choose the same size, whether they capture it or not: their parts of sums have as many rows.
        """
        size, shape = size or self._graphs.size_of(len(inputs.tokens_T)), inputs.block_table_SM.shape
        if inputs.states is not None and len(inputs.states.marks_M3) > size:
            size = 0
        if self._table is None and (size or inputs.appended_C3 is not None):
            self._table = torch.zeros(shape, dtype=torch.int32, device=self._kv.device)
        whole = inputs.appended_C3 is None and (not size or shape != self._table.shape)
        mirror = None if whole else self._table
        about = self._arena, self._memory, self._closed, self._kv, self._run
        if size and mirror is not None and (inputs.adapters_B is None or not self._adapters.replaces):
            step = self._padded.get(size) or CudaStep(*about, size)
            self._padded[size] = step
            if step.fill(inputs, mirror):
                return step
        step = CudaStep(*about, size)
        step.fill(inputs, mirror)
        return step

    @device_errors()
    def logits(self, start: int, stop: int) -> TorchLogits:
        step, graph = self._step, self._graph
        rows = None if step is None else len(step.inputs.logit_rows_L)
        check_logit_rows(start, stop, rows, self._limits)
        assert step is not None
        if start == stop:
            return TorchLogits(torch.empty((0, graph.vocab_size), device=self._kv.device))
        if graph.logits is None:
            raise EngineError("this stage has no head: a step cannot ask it for logits")
        size = self._graphs.size_of(stop)
        replaces = step.adapters is not None and self._adapters.replaces
        if replaces or size > self._limits.max_logit_rows or start:
            size = 0
        step.narrow(graph.hidden, start, stop, size)
        if step.adapters is not None:
            step.adapters.narrow(start, stop, size)
        self._run_step("head", size, step)
        return TorchLogits(step[graph.logits][: stop - start])

    def hidden(self) -> CudaRows:
        step, hidden = self._step, self._graph.hidden
        assert step is not None
        return CudaRows(step.given(step.rows_of(hidden), hidden))

    @device_errors(ResourceError)
    def adapt(self, slot: int, adapter: Adapter | None) -> int:
        return self._adapters.put(slot, adapter)

    def taps(self) -> tuple[CudaRows, ...]:
        step = self._step
        found = {} if step is None else step.tapped
        return tuple(CudaRows(step.given(tensor, value).clone()) for value, tensor in found.items() if step)
