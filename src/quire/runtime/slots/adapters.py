"""Which adapter each sequence has."""

from __future__ import annotations

from collections.abc import Callable

from quire.devices.protocol import IntArray
from quire.runtime.inputs import StepLayout
from quire.runtime.rows import StepRows
from quire.types import NewSeq, StepOutput


class AdapterPart:
    """Writes the adapter's slot of each sequence into `adapters_S` (InputBuilder). Reads no rows.

    `slot_of` is the slot of an adapter that is in memory.
    """

    def __init__(self, adapters_S: IntArray, slot_of: Callable[[str], int]) -> None:
        self._adapters_S, self._slot_of = adapters_S, slot_of

    def set(self, new: NewSeq) -> None:
        adapter = new.request.adapter
        self._adapters_S[new.slot] = -1 if adapter is None else self._slot_of(adapter)

    def clear(self, slot: int) -> None:
        self._adapters_S[slot] = -1

    @property
    def active(self) -> bool:
        return False  # nothing to do beyond `set` and `clear`

    @property
    def greedy(self) -> bool:
        return True

    def rows(self, step: StepLayout) -> list[int]:
        return []

    def take(self, rows: StepRows, first: int, output: StepOutput) -> None:
        pass
