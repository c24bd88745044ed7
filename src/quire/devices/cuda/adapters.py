"""Adapters on a device: their tables by slot, and the products, embeddings and norms of a step that they change."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from quire.devices import ops
from quire.devices.adapters import Adapter, Change, check_slots, place_adapter
from quire.devices.cuda.arena import PIECE, ROWS, TOKENS
from quire.devices.cuda.copies import sent
from quire.devices.cuda.encoders.products import ordered
from quire.devices.cuda.kernels import adapted, experts, rows
from quire.devices.cuda.kernels.norm import NormTensors
from quire.devices.cuda.launch import Launcher
from quire.devices.cuda.pack import CudaMatrix, own_matrix
from quire.devices.graph import Graph
from quire.devices.protocol import Array, ModelInput
from quire.errors import EngineError

if TYPE_CHECKING:
    from quire.devices.cuda.record import Recorder
    from quire.devices.cuda.step import CudaStep

Changeable = ops.Linear[Any] | ops.GatedLinear[Any] | ops.Embed[Any]
CHANGEABLE = ops.Linear, ops.GatedLinear, ops.Embed


@dataclass(frozen=True, slots=True)
class Placed:
    """The change of one product by one adapter: down [R, K] (of an embedding [V, R]) and up [O, R], or a new weight."""

    down: Any
    up: Any
    gain: Array | None
    shift: Array | None
    weight: CudaMatrix | None


class SlotAdapters:
    """The adapters in the slots of an executable. Low-rank weights have the type of activations.

    What is launched for all of them stays the same until `version` changes. `rows` is room for the slots of a step's
    tokens, and of its logit rows. If one `replaces` whole weights, steps compute its products where they need them.

    Threads put adapters while steps go on: what a step reads is replaced whole, and before `version` tells of it.
    """

    def __init__(self, graph: Graph, recorder: Recorder, most: int, max_tokens: int) -> None:
        self.version, self.replaces, self._lock = 0, False, Lock()
        self.device, self.act, self.most = recorder.device, recorder.act, most
        room = -(-max_tokens // 4) * 4 if most else 0
        self.rows = torch.full((2, room), -1, dtype=torch.int32, device=self.device)
        self._recorder = recorder
        self.adapters: dict[int, Adapter] = {}
        self._ops: dict[str, Changeable] = {op.path: op for op in graph.ops if isinstance(op, CHANGEABLE)}
        self._norms = {op.path for op in graph.ops if isinstance(op, ops.Normalize)}
        self._placed: dict[str, dict[int, Placed]] = {}
        self.norms: dict[int, dict[str, NormTensors]] = {}
        self._tables: dict[str, adapted.Changes] = {}

    def put(self, slot: int, adapter: Adapter | None) -> int:
        """Put an adapter into a slot, or empty it; returns its bytes. EngineError if no kernel computes a change."""
        for path in () if adapter is None else (*adapter.changes, *adapter.norms):
            if path not in self._ops and path not in self._norms:
                raise EngineError(
                    f"the adapter changes {path}, which no GPU kernel changes: choose --device cpu"
                )
        changes, norms = ({}, {}) if adapter is None else (adapter.changes, adapter.norms)
        made = {path: self._place(self._ops[path], change) for path, change in changes.items()}
        own = {path: self._recorder.norm(norm) for path, norm in norms.items()}
        with self._lock:
            taken, before = place_adapter(self.adapters, slot, adapter, self.most), self.norms.get(slot)
            self.norms = {**self.norms, slot: own}
            self.version += bool(own or before)
            for path in {*made, *(path for path, by_slot in self._placed.items() if slot in by_slot)}:
                self._change(path, slot, made.get(path))
            placed = [one for by_slot in self._placed.values() for one in by_slot.values()]
            self.replaces = any(one.weight is not None for one in placed)
        return taken

    def _change(self, path: str, slot: int, placed: Placed | None) -> None:
        """Replace a slot's change of a product, in the memory that launches have if it fits."""
        by_slot, op, old = {**self._placed.get(path, {})}, self._ops[path], self._tables.get(path)
        before = by_slot.pop(slot, None)
        if placed is not None:
            by_slot[slot] = placed
        table, self._placed[path] = self._table(op, by_slot), by_slot
        whole = any(one is not None and one.weight is not None for one in (before, placed))
        if whole or isinstance(op, ops.Embed) or old is None or not old.take(table):
            self._tables[path] = table
            self.version += 1

    def of(self, path: str) -> tuple[dict[int, Placed], adapted.Changes | None]:
        """Find the changes of the product at a path, by slot and in tables; None if no adapter ever changed it."""
        return self._placed.get(path, {}), self._tables.get(path)

    def _tensor(self, values: Array, dtype: Any = None) -> Any:
        return torch.from_numpy(np.array(values)).to(self.device, dtype or self.act)

    def _place(self, op: Changeable, change: Change) -> Placed:
        down, up, outputs = change.down, None, _outputs(op)
        if down is not None:
            down = np.pad(down, ((0, -len(down) % adapted.RANKS), (0, 0)))
            whole = np.zeros((outputs, len(down)), np.float32)
            for part in change.ups:
                (height, rank), start, first = part.weight.shape, part.start, part.first
                whole[start : start + height, first : first + rank] = part.weight
            up = self._tensor(ordered(op, whole))
            down = self._tensor(np.ascontiguousarray(down.T) if isinstance(op, ops.Embed) else down)
        gain, bias = change.gain, getattr(op, "bias", None) if change.bias is None else change.bias
        shift = None
        if change.shift is not None or change.bias is not None:
            shift = np.zeros(outputs, np.float32) + (0 if bias is None else bias)
            shift = shift + (0 if change.shift is None else change.shift)
        return Placed(
            down, up, None if gain is None else ordered(op, gain), None if shift is None else ordered(op, shift),
            None if change.weight is None else own_matrix(change.weight),
        )  # fmt: skip

    def _table(self, op: Changeable, by_slot: dict[int, Placed]) -> adapted.Changes:
        found = [by_slot.get(slot) for slot in range(self.most)]
        bias = getattr(op, "bias", None)
        plain = np.zeros(_outputs(op), np.float32) if bias is None else ordered(op, bias)

        def stacked(vectors: list[Array | None], other: Array) -> Any:
            """Stack one row for each slot; None if no slot has its own."""
            if all(vector is None for vector in vectors):
                return None
            return self._tensor(np.stack([other if v is None else v for v in vectors]), torch.float32)

        downs, ups = ([None if p is None else getattr(p, side) for p in found] for side in ("down", "up"))
        ranks = [0 if up is None else up.shape[1] for up in ups]
        return adapted.Changes(
            experts.Weights(experts.addresses(downs, self.device), self.act),
            experts.Weights(experts.addresses(ups, self.device), self.act),
            torch.tensor(ranks, dtype=torch.int32, device=self.device), max(ranks),
            stacked([None if p is None else p.gain for p in found], np.ones(_outputs(op), np.float32)),
            stacked([None if p is None else p.shift for p in found], plain),
        )  # fmt: skip


def _outputs(op: Changeable) -> int:
    return op.table.shape[1] if isinstance(op, ops.Embed) else op.weight.shape[0]


class StepAdapters:
    """The adapters of a step's rows. What is `captured` is launched for all adapters, else for those of the step."""

    def __init__(
        self, adapters: SlotAdapters, inputs: ModelInput, run: Launcher, step: CudaStep, captured: bool
    ) -> None:
        check_slots(adapters.adapters, inputs)
        assert inputs.adapters_B is not None
        given = np.repeat(inputs.adapters_B, np.diff(inputs.cu_q_B1))
        self._adapters, self._run, self._step = adapters, run, step
        self._present, self.captured = set(given[given >= 0].tolist()), captured
        slots = np.full((2, len(given)), -1, np.int32)
        slots[0], slots[1, : len(inputs.logit_rows_L)] = given, given[inputs.logit_rows_L]
        adapters.rows.fill_(-1)
        adapters.rows[:, : len(given)] = sent(slots, adapters.device)
        self._slots = {
            TOKENS: adapters.rows[0, : len(step.tokens)],
            ROWS: adapters.rows[1, : len(step.logit_rows)],
        }
        self._sorted: dict[int, adapted.SortedRows] = {}

    def narrow(self, start: int, stop: int, size: int) -> None:
        """Pieces of logit rows are these from now on."""
        self._slots[PIECE], self.captured = self._adapters.rows[1, start : max(stop, size)], size > 0

    def forget(self) -> None:
        """Sort rows anew when they are next needed."""
        self._sorted.clear()

    def _rows(self, kind: int) -> adapted.SortedRows:
        if kind not in self._sorted:
            about = self._adapters.most, self._adapters.act, self._step.empty
            self._sorted[kind] = adapted.sort_rows(self._run, self._slots[kind], *about)
        return self._sorted[kind]

    def _found(self, path: str) -> tuple[dict[int, Placed], adapted.Changes | None]:
        """Return the changes at a path by slot, and in tables; None if there is none to launch for."""
        by_slot, changes = self._adapters.of(path)
        found = by_slot if self.captured else {slot: by_slot[slot] for slot in self._present & by_slot.keys()}
        return found, changes if found or self.captured else None

    def product(
        self, op: Any, out: ops.Value, multiply: Callable[[CudaMatrix, Any], None], ending: tuple[Any, ...]
    ) -> bool:
        """Compute a product that adapters change, if any does: sums by `multiply`, then `ending` as in `finish`."""
        found, changes = self._found(op.path)
        if changes is None:
            return False
        step, x, kind = self._step, self._step[op.x].to(self._adapters.act), self._step.kind(out)
        weight, gated, low = own_matrix(op.weight), isinstance(op, ops.GatedLinear), None
        total = self._sums(found, weight, kind, multiply, op.weight.shape[0], gated)
        if changes.largest:
            low, inner = torch.empty_like(total), step.empty(len(x), changes.largest, dtype=x.dtype)
            adapted.shrink(self._run, x, changes, self._rows(kind), inner)
            adapted.expand(self._run, inner, changes, self._rows(kind), low)
        adapted.finish(self._run, total, low, self._slots[kind], changes, step[out], *ending)
        return True

    def embedding(self, op: ops.Embed[ops.Value], out: ops.Value) -> bool:
        """Embed tokens by a table that adapters change, if any does."""
        found, changes = self._found(op.path)
        if changes is None:
            return False
        step, run, act, slots = self._step, self._run, self._adapters.act, self._slots[TOKENS]
        low = None

        def multiply(table: CudaMatrix, to: Any) -> None:
            rows.embed(run, table.dense(act), step.tokens, to)

        total = self._sums(found, own_matrix(op.table), TOKENS, multiply, op.table.shape[1])
        if changes.largest:
            low, inner = torch.empty_like(total), step.empty(len(slots), changes.largest, dtype=act)
            for slot, placed in found.items():
                if placed.down is not None:
                    own = step.empty(len(slots), placed.down.shape[1], dtype=act)
                    rows.embed(run, placed.down, step.tokens, own)
                    _merge(inner[:, : own.shape[1]], own, slots == slot)
            adapted.expand(run, inner, changes, self._rows(TOKENS), low)
        adapted.finish(run, total, low, slots, changes, step[out], factor=op.scale)
        return True

    def _sums(
        self,
        found: dict[int, Placed],
        weight: CudaMatrix,
        kind: int,
        multiply: Callable[[CudaMatrix, Any], None],
        width: int,
        gated: bool = False,
    ) -> Any:
        """Sums of a product [T, O] float32, by a new weight where an adapter brings one."""
        slots = self._slots[kind]
        total = self._step.empty(len(slots), width, dtype=torch.float32)
        multiply(weight, total)
        for slot, placed in found.items():
            if placed.weight is not None:
                other = torch.empty_like(total)
                multiply(placed.weight, other)
                if gated:  # the new weight has the rows of the gate first
                    other = other.view(len(slots), 2, -1).transpose(1, 2).flatten(1)
                _merge(total, other, slots == slot)
        return total

    def norm(self, path: str, out: ops.Value, normalize: Callable[[Any, NormTensors], None]) -> None:
        """Replace rows of a norm by those of adapters' own norms."""
        for slot in self._adapters.norms if self.captured else self._present:
            own = self._adapters.norms[slot].get(path)
            if own is not None:
                other = torch.empty_like(self._step[out])
                normalize(other, own)
                _merge(self._step[out], other, self._slots[self._step.kind(out)] == slot)


def _merge(rows_of_all: Any, rows_of_some: Any, some: Any) -> None:
    """Replace some rows of a tensor."""
    rows_of_all.copy_(torch.where(some[:, None], rows_of_some, rows_of_all))
