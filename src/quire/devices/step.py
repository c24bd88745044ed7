"""What a backend brings to the formulas of operations: arrays, their types, and products in its own precision."""

from __future__ import annotations

from typing import Any, Protocol

from quire.devices.adapters import StepAdapters
from quire.devices.protocol import Activation, Array, KVSpec, Matrix, ModelInput


class Step(Protocol):
    """One step on a backend: its input, its adapters, what was tapped, and arithmetic in the backend's own types."""

    inputs: ModelInput
    adapters: StepAdapters
    tapped: list[Any]
    xp: Any
    """xp is numpy or torch."""
    kv_spec: KVSpec

    def wide(self, x: Any) -> Any:
        """Convert to the type of sums and functions: float64 in the oracle."""

    def single(self, x: Any) -> Any:
        """Round to float32."""

    def double(self, x: Any) -> Any:
        """Convert to float64, in which statistics are computed."""

    def own(self, values: Array) -> Any:
        """Take an array of the host, in the type of sums."""

    def host(self, x: Any) -> Array:
        """Give an array back to the host."""

    def row(self, x: Any, i: int) -> Any:
        """Copy a row to memory of its own, as wide, because BLAS chooses by alignment too."""

    def order(self, x: Any) -> Any:
        """Return the stable ascending order of values."""

    def activate(self, kind: Activation, x: Any) -> Any:
        """Apply an element-wise activation to one row."""

    def times(self, weight: Matrix, x: Any, i: int) -> Any:
        """weight @ row i of x, which is rounded as products with this weight round it: wide [O]."""

    def embedded(self, table: Matrix, ids: Any) -> Any:
        """Return rows of a table, as wide, in memory of their own."""

    def states(self, layer: int, state: int) -> tuple[Any, Any]:
        """Return the rows of a state in the cache [rows, ...], and their open rows [rows, open, W]."""

    def store(self, layer: int, t: int, keys_GH: Any, values_GH: Any) -> None:
        """Write keys and values of token `t`, or the entry that ends with it; None: values are views of the keys."""

    def keys(self, layer: int, b: int) -> Any:
        """Return all keys, or entries, of sequence `b` in order, as wide: [rows, G, H]."""
