"""The rows of a step's result, computed piece by piece. Knows an executable; knows no slot."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator

from quire.devices.protocol import Executable, FloatArray
from quire.devices.sampling import Logits


class StepRows:
    """Logits and final hidden states of the rows that a step reads: row i is that of ModelInput.logit_rows[i].

    An executable holds `max_rows` rows of logits at a time. `first` are the logits that its run returned, of the first
    rows of `total`.
    """

    def __init__(self, executable: Executable, first: Logits, total: int, max_rows: int) -> None:
        self._executable = executable
        self._piece, self._begin = first, 0
        self._total, self._max_rows = total, max_rows
        self._hidden: FloatArray | None = None

    def logits(self, rows: range | list[int]) -> Iterator[tuple[slice, Logits]]:
        """The logits of `rows` (ascending) in pieces: the part of `rows` that a piece covers, and its logits.

        A piece is valid until the next one is computed.
        """
        start = 0
        while start < len(rows):
            first = rows[start]
            if not self._begin <= first < self._begin + len(self._piece):
                stop = min(first + self._max_rows, self._total)
                self._piece, self._begin = self._executable.logits(first, stop), first
            stop = bisect_left(rows, self._begin + len(self._piece), start)
            yield slice(start, stop), self._some(rows[start:stop])
            start = stop

    def hidden(self, start: int, stop: int) -> FloatArray:
        """Final hidden states [stop - start, D] of rows start..stop-1."""
        if self._hidden is None:
            self._hidden = self._executable.hidden()
        return self._hidden[start:stop]

    def _some(self, rows: range | list[int]) -> Logits:
        first, last = rows[0] - self._begin, rows[-1] - self._begin
        if last - first + 1 > len(rows):
            return self._piece[[row - self._begin for row in rows]]
        return self._piece if last - first + 1 == len(self._piece) else self._piece[first : last + 1]
