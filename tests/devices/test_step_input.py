"""Checks of a step's input, for backends over arrays."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from quire.devices.inputs import check_input
from quire.devices.protocol import Limits, ModelInput
from quire.errors import EngineError


def test_a_step_that_breaks_a_promise_names_the_sequence() -> None:
    """Of several sequences, the first one whose positions or blocks are wrong."""

    def row(*values: int) -> Any:
        return np.array(values, np.int32)

    class Cache:
        block_size, num_blocks = 4, 9

    tokens, positions, lengths = row(1, 2, 3, 4, 5, 6), [3, 4, 0, 1, 2, 8], row(5, 3, 9)
    table = np.array([[0, 1, 8], [2, -1, -1], [3, 4, 5]], np.int32)

    def check(positions: list[int] = positions, lengths: Any = lengths, table: Any = table) -> None:
        step = ModelInput(tokens, row(*positions), row(0, 2, 5, 6), lengths, row(2, 1, 0), table, row(5))
        check_input(step, Cache(), Limits(8, 4, 4), 10)  # type: ignore[arg-type]

    check()
    for wrong, says in (
        ({"positions": [3, 4, 0, 2, 1, 8]}, "positions of sequence 1 must"),
        ({"positions": [2, 3, 0, 1, 2, 9]}, "positions of sequence 0 must"),
        (
            {"positions": [3, 4, 0, 1, 2, 12], "lengths": row(5, 3, 13)},
            "table of sequence 2 does not cover its 13",
        ),
        ({"table": np.where(table == 4, 9, table)}, "table of sequence 0 does not cover its 5"),
        ({"table": np.where(table == 2, -1, table)}, "table of sequence 1 does not cover its 3"),
    ):
        with pytest.raises(EngineError, match=says):
            check(**wrong)


def test_of_a_table_that_the_device_keeps_only_changes_are_checked() -> None:
    def row(*values: int) -> Any:
        return np.array(values, np.int32)

    class Cache:
        block_size, num_blocks = 4, 9

    def check(*appended: int, length: int = 5) -> None:
        table = np.full((2, 3), 77, np.int32)
        step = ModelInput(row(1), row(length - 1), row(0, 1), row(length), row(1), table, row(0))
        changes = row(*appended).reshape(-1, 3)
        check_input(
            msgspec.structs.replace(step, appended_C3=changes),
            Cache(),  # type: ignore[arg-type]
            Limits(8, 4, 4),
            10,
        )

    check()
    check(1, 2, 8, 0, 0, 0)
    for wrong, says in (
        ([1, 2, 9], "block of an appended block is outside 0..8"),
        ([1, -1, 3], "column of an appended block is outside 0..2"),
        ([1, 1, 8, 2, 0, 0], "slot of an appended block is outside 0..1"),
    ):
        with pytest.raises(EngineError, match=says):
            check(*wrong)
    with pytest.raises(EngineError, match="table of sequence 0 does not cover its 13"):
        check(length=13)
