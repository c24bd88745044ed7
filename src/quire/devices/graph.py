"""A forward pass as data: the list of its operations, recorded once. Knows no backend and no model family."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

import msgspec

from quire.devices.kv import KVSpec
from quire.devices.ops import Op, Value, operands, resolved
from quire.errors import EngineError

A = TypeVar("A")  # a backend's arrays
S = TypeVar("S")  # what a backend knows of a step


class Recorder:
    """Records operations: `y = g(Linear(x, weight))` appends one and returns the value that it will have."""

    def __init__(self) -> None:
        self.ops: list[Op[Value]] = []

    def __call__(self, op: Op[Value]) -> Value:
        self.ops.append(op)
        return Value(len(self.ops) - 1)


class Graph(msgspec.Struct, frozen=True):
    """A model, or a stage of one: ops[:body] compute `hidden` [L, D], and the others of it `logits` [L, V].

    A stage is a range of layers for one pipeline rank. All but the last have no `logits`, and their `hidden` is [T, D]
    for the next one to receive. `layers` are the model's layers in this graph; layer i uses layer i - layers.start of
    the KV cache. `taps` are the layers whose output is tapped, in order: the input of drafters. `num_token_ids` is the
    input vocabulary, if it is not the output's (0: it is).
    """

    ops: tuple[Op[Value], ...]
    body: int
    hidden: Value
    logits: Value | None
    vocab_size: int
    hidden_size: int
    layers: range = range(0)
    taps: tuple[int, ...] = ()
    num_token_ids: int = 0

    @property
    def token_limit(self) -> int:
        """All token ids of a step are lower."""
        return self.num_token_ids or self.vocab_size


def record(
    hidden: Callable[[Recorder], Value],
    head: Callable[[Recorder, Value], Value] | None,
    vocab_size: int,
    hidden_size: int,
    layers: range = range(0),
    taps: tuple[int, ...] = (),
    num_token_ids: int = 0,
) -> Graph:
    """Record `hidden`, then `head` of its result."""
    g = Recorder()
    result = hidden(g)
    body = len(g.ops)
    logits = None if head is None else head(g, result)
    return Graph(tuple(g.ops), body, result, logits, vocab_size, hidden_size, layers, taps, num_token_ids)


def widths(graph: Graph, kv_spec: KVSpec) -> list[int]:
    """Return the width of each operation's result."""
    found: list[int] = []
    for op in graph.ops:
        found.append(resolved(op, found.__getitem__).width(kv_spec))
    return found


def widest_activation(graph: Graph, kv_spec: KVSpec) -> int:
    """Return the largest number of elements per token that an operation before the head holds."""
    body = list(zip(graph.ops, widths(graph, kv_spec), strict=True))[: graph.body]
    return max((max(width, op.inner_width) for op, width in body), default=0)


def last_reads(graph: Graph) -> list[list[Value]]:
    """Return the values that are not read after each operation. `hidden` and `logits` are always kept."""
    seen = {graph.hidden, graph.logits}
    found: list[list[Value]] = []
    for index in range(len(graph.ops) - 1, -1, -1):
        last = {Value(index), *operands(graph.ops[index])} - seen
        seen |= last
        found.append(sorted(last))
    return found[::-1]


class Evaluator(Generic[S, A]):
    """Computes a graph's operations one by one, each by the formula for its type. Drops values after their last use."""

    def __init__(self, graph: Graph, formulas: Mapping[type[Op[Any]], Callable[[S, Any], A]]) -> None:
        self._graph, self._formulas, self._dropped = graph, formulas, last_reads(graph)
        if lacking := {type(op).__name__ for op in graph.ops if type(op) not in formulas}:
            raise EngineError(f"the backend has no operation {', '.join(sorted(lacking))}")

    def hidden(self, step: S) -> A:
        """Return the final hidden states of the step."""
        return self._run(step, {}, range(self._graph.body))[self._graph.hidden]

    def logits(self, step: S, hidden: A) -> A:
        """Return the logits of some rows of the hidden states."""
        if self._graph.logits is None:
            raise EngineError("this stage has no head: a step cannot ask it for logits")
        values = {self._graph.hidden: hidden}
        return self._run(step, values, range(self._graph.body, len(self._graph.ops)))[self._graph.logits]

    def _run(self, step: S, values: dict[Value, A], indices: range) -> dict[Value, A]:
        for index in indices:
            op = resolved(self._graph.ops[index], values.__getitem__)
            values[Value(index)] = self._formulas[type(op)](step, op)
            for value in self._dropped[index]:
                del values[value]
        return values
