"""What a backend brings to the formulas of operations: arrays, their types, products in its own precision, adapters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from quire.devices.adapters import Adapter, Change
from quire.devices.operands import Norm
from quire.devices.protocol import Activation, Array, KVSpec, Matrix, ModelInput


class StepAdapters:
    """The adapters of a step, for backends that look changes up row by row.

    `slots` has a slot for each row that operations work on: the step's tokens, then its logit rows.
    """

    def __init__(self, adapters: Mapping[int, Adapter], inputs: ModelInput | None) -> None:
        self._adapters = adapters
        given = None if inputs is None else inputs.adapters_B
        self.active = given is not None and bool((given >= 0).any())
        self.slots: list[int] = []
        if inputs is not None and given is not None:
            self.slots = np.repeat(given, np.diff(inputs.cu_q_B1)).tolist()
        self._logit_rows: list[int] = []

    def select_rows(self, rows: Sequence[int]) -> None:
        """Make rows these of the tokens from now on."""
        if self.active:
            self._logit_rows = [self.slots[row] for row in rows]
            self.slots = self._logit_rows

    def narrow(self, start: int, stop: int) -> None:
        """Make rows these logit rows from now on."""
        self.slots = self._logit_rows[start:stop]

    def changes(self, path: str, rows: Sequence[int]) -> Iterator[tuple[Change, list[int]]]:
        """Find how products with the matrix at a path change, or embeddings: each with the indices of its `rows`."""
        for adapter, own in self._used(rows):
            if path in adapter.changes:
                yield adapter.changes[path], own

    def norms(self, path: str, rows: Sequence[int]) -> Iterator[tuple[Norm, list[int]]]:
        """Find the norms that replace the base's at a path, each with the indices of its `rows`."""
        for adapter, own in self._used(rows):
            if path in adapter.norms:
                yield adapter.norms[path], own

    def _used(self, rows: Sequence[int]) -> Iterator[tuple[Adapter, list[int]]]:
        slots = [self.slots[row] for row in rows] if self.active else []
        for slot in sorted({*slots} - {-1}):
            yield self._adapters[slot], [i for i, own in enumerate(slots) if own == slot]


class Step(Protocol):
    """One step on a backend: its input, its adapters, what was tapped, and arithmetic in the backend's own types."""

    inputs: ModelInput
    adapters: StepAdapters
    tapped: list[Any]
    xp: Any
    """xp is numpy or torch."""
    at_once: bool
    """at_once: functions take all rows in one call, which promises no bits; otherwise each row alone."""
    kv_spec: KVSpec

    def wide(self, x: Any) -> Any:
        """Convert to the type of sums and functions: float64 in the oracle."""

    def single(self, x: Any) -> Any:
        """Round to float32."""

    def double(self, x: Any) -> Any:
        """Convert to float64, in which statistics are computed."""

    def own(self, values: Array) -> Any:
        """Take an array of the host, in the type of sums."""

    def constant(self, values: Array) -> Any:
        """Take an array that belongs to the graph, as `own`."""

    def host(self, x: Any) -> Array:
        """Give an array back to the host."""

    def row(self, x: Any, i: int) -> Any:
        """Copy a row to memory of its own, as wide, because BLAS chooses by alignment too."""

    def order(self, x: Any) -> Any:
        """Return the stable ascending order along the last axis."""

    def taken(self, x: Any, places: Any) -> Any:
        """Return the values at some places along the last axis."""

    def add_rows(self, total: Any, rows: Array, values: Any) -> None:
        """Add values [n, W] to rows of `total`, in place; a row may come twice."""

    def activate(self, kind: Activation, x: Any) -> Any:
        """Apply an element-wise activation."""

    def times(self, weight: Matrix, x: Any) -> Any:
        """x @ weight.T, each row alone unless `at_once`, with x rounded as the weight's products do: wide [rows, O]."""

    def embedded(self, table: Matrix, ids: Any) -> Any:
        """Return rows of a table, as wide, in memory of their own."""

    def states(self, layer: int, state: int) -> tuple[Any, Any]:
        """Return the rows of a state in the cache [rows, ...], and their open rows [rows, open, W]."""

    def store(self, layer: int, tokens: Sequence[int], keys: Any, values: Any) -> None:
        """Write keys and values [n, G, H] of tokens, or the entries that end there. None: values are views of keys."""

    def keys(self, layer: int, b: int) -> Any:
        """Return all keys, or entries, of sequence `b` in order, as wide: [rows, G, H]."""
