"""Encodes a graph as a native plan (csrc/plan/plan.h), operation by operation (csrc/bind/record_bind.cpp)."""

from __future__ import annotations

from typing import Any

from quire.devices.graph import Graph
from quire.devices.ops import Embed, GatedLinear, Linear, Normalize, Op, RunExperts, Tap, Value, resolved
from quire.errors import EngineError

NO_LOGITS = -1


class Recording:
    """A plan, and where each matrix and norm acts in it, by path: (buffer of the op, place of the weight in it)."""

    def __init__(self, plan: Any, graph: Graph) -> None:
        """EngineError if the head does not give `vocab_size` logits."""
        self.plan = plan
        self.taps: list[int] = []
        self.products: dict[str, list[tuple[int, int]]] = {}
        self.embeddings: dict[str, list[tuple[int, int]]] = {}
        self.norms: dict[str, list[tuple[int, int]]] = {}
        self.output: int | None = None  # the result of a graph without a head
        buffers: dict[Value, int] = {}
        for index, recorded in enumerate(graph.ops):
            if index == graph.body:
                buffers[graph.hidden] = plan.begin_head(buffers[graph.hidden])
            op = resolved(recorded, buffers.__getitem__)
            buffers[Value(index)] = buffer = plan.record(op)
            self._note(op, buffer)
        if graph.logits is None:
            self.output = buffers[graph.hidden]
            plan.tap(self.output)
            plan.finish(NO_LOGITS)
            return
        logits = buffers[graph.logits]
        if plan.width(logits) != graph.vocab_size:
            raise EngineError(
                f"the head gives {plan.width(logits)} logits, the graph says {graph.vocab_size}"
            )
        plan.finish(logits)

    def _note(self, op: Op[int], buffer: int) -> None:
        if isinstance(op, Tap):
            self.taps.append(buffer)
        elif isinstance(op, Embed):
            self._place(self.embeddings, op.path, buffer)
        elif isinstance(op, Normalize):
            self._place(self.norms, op.path, buffer)
        elif isinstance(op, (Linear, GatedLinear)):
            self._place(self.products, op.path, buffer)
        elif isinstance(op, RunExperts):
            for i, expert in enumerate(op.experts):
                if expert is not None:
                    self._place(self.products, f"{expert.path}.gate_up", buffer, 2 * i)
                    self._place(self.products, f"{expert.path}.down", buffer, 2 * i + 1)

    def _place(
        self, places: dict[str, list[tuple[int, int]]], path: str, buffer: int, index: int = 0
    ) -> None:
        places.setdefault(path, []).append((buffer, index))
