"""Kernels ahead of time: records what graphs launch on a target that need not be there, and compiles that.

A graph runs over tensors without values, in steps of all sizes at which a choice can change: no list is kept by hand.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
import torch

from quire.devices import ops
from quire.devices.adapters import Adapter, Change, Up
from quire.devices.artifacts import Artifacts
from quire.devices.choices import Choices
from quire.devices.cuda import jit
from quire.devices.cuda.adapters import CHANGEABLE
from quire.devices.cuda.arena import matrices
from quire.devices.cuda.backend import CudaBackend, Planned
from quire.devices.cuda.cubins import CubinLauncher, about_of, cubin
from quire.devices.cuda.hidden import CudaRows
from quire.devices.cuda.kernels import sample
from quire.devices.cuda.kernels.adapted import RANKS
from quire.devices.cuda.launch import Launch, described, specialized
from quire.devices.cuda.target import Target
from quire.devices.graph import Graph, widths
from quire.devices.protocol import Executable, KVCache, KVSpec, Limits, ModelInput, StateInput
from quire.errors import ConfigError
from quire.progress import progress

T = TypeVar("T")
LONG = 8192  # positions of a context: attention splits it where few programs run
DRAFT = 4  # tokens of a sequence that may be taken back


@dataclass(frozen=True, slots=True)
class RecordingLauncher:
    """Keeps the first launch of each kernel as it would be compiled. Tensors are torch's meta tensors."""

    target: Target
    launches: dict[tuple[Any, ...], Launch] = field(default_factory=dict)

    def __call__(self, launch: Launch) -> None:
        if 0 not in launch.grid:
            self.launches.setdefault(specialized(launch), launch)


class TargetBackend(CudaBackend):
    """Packs weights for a target on the CPU, and remembers the graphs that are planned. It runs none."""

    def __init__(self, target: Target, choices: Choices, threads: int | None) -> None:
        self.recorded = RecordingLauncher(target)
        super().__init__(None, choices, threads)

    def _launcher(self, artifacts: Path | None) -> RecordingLauncher:
        return self.recorded

    def free_memory(self) -> int:
        raise ConfigError(
            f"{self._run.target.name} is a target of `quire build`, and no device that runs a model: choose --device"
        )

    def write_artifacts(self, folder: Path, block_size: int) -> None:
        made = Artifacts(folder, about_of(self._run.target), "")
        for key, (code, about) in self.compiled(block_size, cubin):
            made.add(key, code, msgspec.to_builtins(about))
        made.save()

    def list_artifacts(self, block_size: int) -> list[dict[str, Any]]:
        rows = self.compiled(block_size, lambda *given: jit.measured(jit.compile_launch(*given)))
        return [{"launch": key, **msgspec.to_builtins(row)} for key, row in rows]

    def compiled(
        self, block_size: int, compile: Callable[[Launch, Target], T], known: Container[str] = ()
    ) -> Iterator[tuple[str, T]]:
        """Compile every kernel that the planned graphs launch, on all threads, but for those that are `known`."""
        self.record(block_size)
        found = {described(launch): launch for launch in self.recorded.launches.values()}
        launches = {key: launch for key, launch in found.items() if key not in known}
        label = f"compiling for {self._run.target.name}"
        with (
            progress(label, len(launches), "kernels") as told,
            jit.without_lines(),
            ThreadPoolExecutor(self.threads) as threads,
        ):
            compiled = threads.map(lambda launch: compile(launch, self._run.target), launches.values())
            for key, made in zip(launches, compiled, strict=True):
                told(1)
                yield key, made

    def record(self, block_size: int) -> None:
        """List what the planned graphs launch."""
        for graph, spec, limits in self.planned:
            self._record(graph, spec, limits, block_size)

    def _record(self, graph: Graph, spec: KVSpec, limits: Limits, block_size: int) -> None:
        outline, meta = self.outline(), torch.device("meta")
        blocks = -(-(LONG + limits.max_tokens) // block_size)
        states = (limits.max_seqs, DRAFT) if spec.bytes_per_state(0) else ()
        kv = outline.kv_cache(spec, blocks, block_size, *states)
        made = outline.compile(graph, kv, limits)
        for inputs in steps(graph, kv, limits, blocks, bool(states)):
            self._step(made, inputs, limits)
        if limits.max_adapters:
            for adapter in adapters(graph):
                made.adapt(0, adapter)
                for inputs in steps(graph, kv, limits, blocks, bool(states), adapted=True):
                    self._step(made, inputs, limits)
        if graph.logits is None:
            return
        logits = torch.empty(1, graph.vocab_size, dtype=torch.float32, device=meta)
        numbers, reals = (torch.empty(1, 4, dtype=kind, device=meta) for kind in (torch.int64, torch.float64))
        masks = torch.empty(1, -(-graph.vocab_size // 32), dtype=torch.int32, device=meta)
        for given in (None, masks):
            out = torch.empty(1, dtype=torch.int32, device=meta)
            sample.sample(self.recorded, logits, given, numbers, reals, out)

    def _step(self, made: Executable, inputs: ModelInput, limits: Limits) -> None:
        made.run(inputs)
        rest, most = len(inputs.logit_rows_L), limits.max_logit_rows
        if rest > most:
            made.logits(most, min(rest, 2 * most))


def prepare(run: CubinLauncher, planned: Sequence[Planned], block_size: int, choices: Choices) -> None:
    """Compile what planned graphs launch, unless this or another start did."""
    if run.cached is None or run.built is not None:
        return
    about = [
        (widths(graph, spec), [type(op).__name__ for op in graph.ops], spec) for graph, spec, _ in planned
    ]
    shapes = [[(w.shape, w.nbytes) for op in graph.ops for w in matrices(op)] for graph, *_ in planned]
    limits = [limits for *_, limits in planned]
    mark = f"all of {sha256(repr((about, shapes, limits, block_size)).encode()).hexdigest()}"
    if mark in run.cached.files:
        return
    ahead = TargetBackend(run.target, choices, None)
    ahead.planned += planned
    for key, (code, kernel) in ahead.compiled(block_size, cubin, run.cached.files):
        run.keep(key, code, msgspec.to_builtins(kernel))
    run.keep(mark, b"", {})


def sizes(most: int) -> list[int]:
    """List sizes on both sides of all powers of two, which is where choices change."""
    powers = [1 << power for power in range(most.bit_length())]
    return sorted({most} | {size for power in powers for size in (power, power + 1) if size <= most})


def steps(
    graph: Graph, kv: KVCache, limits: Limits, blocks: int, stateful: bool, adapted: bool = False
) -> Iterator[ModelInput]:
    """Yield steps of all sizes: one sequence, or as many as there can be; after short and long contexts."""
    table = np.zeros((limits.max_seqs, blocks), np.int32)
    received = next((op.columns for op in graph.ops if isinstance(op, ops.Receive)), 0)
    for size in sizes(limits.max_tokens):
        for batch in {1, min(size, limits.max_seqs)}:
            for context in (0, LONG):
                counts = np.full(batch, size // batch, np.int32)
                counts[-1] += size - counts.sum()
                cu_q = np.concatenate([[0], counts.cumsum()]).astype(np.int32)
                order = np.arange(batch, dtype=np.int32)
                length = counts + context
                positions = np.arange(size) + np.repeat(length - cu_q[1:], counts)
                every = np.arange(size, dtype=np.int32)
                rows = every if size <= limits.max_logit_rows else cu_q[1:] - 1
                rows = every[:0] if graph.logits is None else rows
                for kept in (counts, counts - counts.clip(max=DRAFT - 1))[: 1 + stateful]:
                    yield ModelInput(
                        0 * every, positions.astype(np.int32), cu_q, length, order, table, rows,
                        hidden_TD=CudaRows(torch.empty(size, received, device="meta")) if received else None,
                        adapters_B=np.zeros(batch, np.int32) if adapted else None,
                        states=StateInput(order, 0 * order, kept, np.zeros((0, 3), np.int32)) if stateful else None,
                    )  # fmt: skip


def adapters(graph: Graph) -> Iterator[Adapter]:
    """Yield adapters that change every product, with and without gains and shifts."""
    for gain, shift in ((False, False), (True, False), (False, True), (True, True)):
        changes = {}
        for op in graph.ops:
            if isinstance(op, CHANGEABLE):
                rows, columns = op.table.shape[::-1] if isinstance(op, ops.Embed) else op.weight.shape
                down, up = np.zeros((RANKS, columns), np.float32), np.zeros((rows, RANKS), np.float32)
                given = (np.ones(rows, np.float32) if there else None for there in (gain, shift))
                changes[op.path] = Change(down, (Up(up, 0, 0),), *given)
        yield Adapter(changes)
