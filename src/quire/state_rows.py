"""Rows of recurrent state, on which scheduler and devices agree. Knows numbers only."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec


class StateRows(msgspec.Struct, frozen=True):
    """The device's rows for the recurrent state of sequences: of these, at most `num_running` run at a time.

    The others are for snapshots; without others none are taken. A row has `num_open` open rows: see `StateUse`.
    Snapshots are taken in each block, or on a grid of `grid` tokens and every `stride` tokens of prompts.
    A row takes `nbytes`.
    """

    num_rows: int
    num_running: int
    num_open: int = 1
    in_each_block: bool = False
    grid: int = 64
    stride: int = 1024
    nbytes: int = 0

    def common(self, others: Sequence[StateRows]) -> StateRows:
        """Choose the rows for which all ranks have room: a row is the same sequence's in all."""
        running = min(rows.num_running for rows in others)
        snapshots = min(rows.num_snapshots for rows in others)
        each = all(rows.in_each_block for rows in others)
        return msgspec.structs.replace(
            self, num_rows=running + snapshots, num_running=running, in_each_block=each
        )

    def described(self) -> str:
        """Say for the log what the rows are for."""
        none = (
            ""
            if self.num_snapshots
            else ": no prefix is reused (--state-cache-fraction, --enable-prefix-caching)"
        )
        return (
            f"{self.nbytes} bytes a sequence, {self.num_running} sequences run at once; "
            f"{self.num_snapshots} snapshots fit{none}"
        )

    @property
    def num_snapshots(self) -> int:
        return self.num_rows - self.num_running


class StateUse(msgspec.Struct, frozen=True, array_like=True):
    """What a step does with the state row of a sequence.

    It replays the first `open` open rows, whose tokens turned out to stay, then takes in the first `kept` tokens of the
    step; the others become open rows. The state after `count` tokens of the step is also written to another `row`, for
    each of `marks` (count, row).
    """

    row: int
    open: int
    kept: int
    marks: tuple[tuple[int, int], ...] = ()
