"""Graphs as lists of operations: every backend knows every operation, and values live only until their last use."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from quire import _native
from quire.devices import ops, recurrent_ops, relative_ops, sparse_ops, stream_ops
from quire.devices.graph import Evaluator, last_reads, record, widest_activation
from quire.devices.ops import Add, Embed, Linear, Op, Scale, SelectRows, Tap, Value, operands, resolved
from quire.devices.protocol import KVSpec
from quire.devices.reference.backend import FORMULAS as REFERENCE
from quire.devices.reference.backend import ReferenceBackend
from quire.devices.torch.ops import FORMULAS as TORCH
from quire.errors import EngineError

KINDS = {
    kind
    for module in (ops, recurrent_ops, relative_ops, sparse_ops, stream_ops)
    for kind in vars(module).values()
    if isinstance(kind, type) and issubclass(kind, Op) and kind not in (Op, ops.SameWidth)
}
BACKEND = ReferenceBackend()
TABLE = BACKEND.matrix([np.ones((5, 4), np.float32)], "float32")
WIDE = BACKEND.matrix([np.ones((9, 4), np.float32)], "float32")
BACK = BACKEND.matrix([np.ones((4, 9), np.float32)], "float32")


def hidden(g: Any) -> Any:
    x = g(Embed(TABLE))
    wide = g(Linear(x, WIDE))
    y = g(Linear(wide, BACK, residual=x))
    g(Tap(y))
    return g(SelectRows(g(Add(y, y))))


GRAPH = record(hidden, lambda g, h: g(Scale(g(Linear(h, TABLE)), 2.0)), 5, 4)


def test_every_backend_knows_every_operation() -> None:
    assert len(KINDS) > 20
    assert set(REFERENCE) == KINDS
    assert set(TORCH) == KINDS
    assert set(_native.Plan.operations()) == {kind.__name__ for kind in KINDS}


def test_every_operation_says_what_it_computes_and_how_wide_it_is() -> None:
    for kind in KINDS:
        assert kind.__doc__
        assert kind.width is not Op.width


def test_a_graph_is_the_list_of_what_was_recorded() -> None:
    assert [type(op).__name__ for op in GRAPH.ops] == [
        *("Embed", "Linear", "Linear", "Tap", "Add", "SelectRows", "Linear", "Scale")
    ]
    assert (GRAPH.body, GRAPH.hidden, GRAPH.logits) == (6, 5, 7)
    assert operands(GRAPH.ops[2]) == [Value(1), Value(0)]
    assert operands(GRAPH.ops[7]) == [Value(6)]  # 2.0 is no operand, and neither would be an int


def test_operands_are_replaced_and_nothing_else() -> None:
    op = Linear(Value(3), WIDE, activation="silu", residual=Value(4))
    found = resolved(op, {3: "x", 4: "y"}.__getitem__)
    assert isinstance(found, Linear)
    assert (found.x, found.residual, found.weight, found.activation) == ("x", "y", WIDE, "silu")


def test_values_are_dropped_after_their_last_use() -> None:
    assert last_reads(GRAPH) == [[], [], [0, 1], [3], [2], [4], [], [6]]
    kept: list[int] = []

    def formula(step: None, op: Op[Any]) -> str:
        kept.append(len(running))
        return type(op).__name__

    evaluator = Evaluator(GRAPH, dict.fromkeys(KINDS, formula))
    running: dict[Value, str] = {}
    assert evaluator._run(None, running, range(GRAPH.body)) == {GRAPH.hidden: "SelectRows"}
    assert max(kept) == 2
    assert evaluator.logits(None, "some rows") == "Scale"


def test_a_graph_without_a_head_gives_no_logits() -> None:
    stage = Evaluator(record(hidden, None, 5, 4), REFERENCE)
    with pytest.raises(EngineError, match="no head"):
        stage.logits(None, np.zeros((1, 4), np.float32))  # type: ignore[arg-type]


def test_the_widest_activation_is_that_of_the_body() -> None:
    spec = KVSpec(1, 1, 4, "float32")
    assert widest_activation(GRAPH, spec) == 9
    assert widest_activation(replace(GRAPH, body=1), spec) == 4
