"""The rows of a step's result, computed piece by piece. Knows an executable; knows no slot."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from typing import Any

import numpy as np

from quire.devices.protocol import Executable, FloatArray
from quire.devices.sampling import Logits


class StepRows:
    """Logits and final hidden states of the rows that a step reads: row i belongs to ModelInput.logit_rows[i].

    An executable holds `max_rows` rows of logits at a time. `first` are the logits that its run returned, for the
    first of `total` rows.
    """

    def __init__(self, executable: Executable, first: Logits, total: int, max_rows: int) -> None:
        self._executable = executable
        self._piece, self._begin, self._end = first, 0, len(first)
        self._total, self._max_rows = total, max_rows
        self._hidden: FloatArray | None = None

    def logits(self, rows: range | list[int]) -> Iterator[tuple[slice, Logits]]:
        """Yield the logits of `rows` (ascending) in pieces: the part of `rows` that a piece covers, and its logits.

        A piece is valid until the next one is computed.
        """
        start, count = 0, len(rows)
        while start < count:
            first = rows[start]
            if not self._begin <= first < self._end:
                self._begin, self._end = first, min(first + self._max_rows, self._total)
                self._piece = self._executable.logits(self._begin, self._end)
            stop = count if rows[-1] < self._end else bisect_left(rows, self._end, start)
            yield slice(start, stop), self._some(rows, start, stop)
            start = stop

    def taps(self) -> tuple[Any, ...]:
        """The tapped hidden states [T, D] of all tokens of the step; see Executable.taps."""
        return self._executable.taps()

    def hidden(self, start: int, stop: int) -> FloatArray:
        """Return the final hidden states [stop - start, D] of rows start..stop-1."""
        if self._hidden is None:
            self._hidden = np.asarray(self._executable.hidden())
        return self._hidden[start:stop]

    def _some(self, rows: range | list[int], start: int, stop: int) -> Logits:
        """Pick the logits of rows[start:stop] from the current piece, which covers them all."""
        begin, end = rows[start], rows[stop - 1] + 1
        if stop - start < end - begin:
            return self._piece[[row - self._begin for row in rows[start:stop]]]
        whole = begin == self._begin and end == self._end
        return self._piece if whole else self._piece[begin - self._begin : end - self._begin]
