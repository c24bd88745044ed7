"""Measured times of a step by its rows, and of drafting by its passes; older times fade."""

from __future__ import annotations

from bisect import bisect_left

NEW_SHARE = 0.2
EXACT_UP_TO = 16


class StepCosts:
    """Seconds of a step by rows. Numbers of rows between measured ones are interpolated.

    Beyond the largest, the last slope goes on; with one measurement there is none, so that more rows get tried.
    """

    def __init__(self) -> None:
        self._rows: list[int] = []
        self._seconds: list[float] = []

    def record(self, rows: int, seconds: float) -> None:
        rows = _bucket(rows)
        at = bisect_left(self._rows, rows)
        if at < len(self._rows) and self._rows[at] == rows:
            old = self._seconds[at]
            # One step that was held up by something else says little.
            self._seconds[at] = old + NEW_SHARE * (min(seconds, 2.0 * old) - old)
        else:
            self._rows.insert(at, rows)
            self._seconds.insert(at, seconds)

    def seconds(self, rows: int) -> float:
        known, times = self._rows, self._seconds
        if not known:
            return 1.0
        at = bisect_left(known, rows)
        if at < len(known) and known[at] == rows:
            return max(times[at], times[at - 1] if at else 0.0)
        if at == 0:
            return times[0]
        if at == len(known):
            if at == 1:
                return times[0]
            slope = (times[-1] - times[-2]) / (known[-1] - known[-2])
            return times[-1] + max(0.0, slope) * (rows - known[-1])
        share = (rows - known[at - 1]) / (known[at] - known[at - 1])
        return times[at - 1] + share * max(0.0, times[at] - times[at - 1])

    @property
    def most_rows(self) -> int:
        """Return the most rows ever measured."""
        return self._rows[-1] if self._rows else 0


class DraftCosts:
    """Seconds of drafting: `first` for the first token of all sequences together, `next` for each one after it.

    The very first draft is not counted: it finds the drafter's weights and cache cold.
    """

    def __init__(self) -> None:
        self.first = 0.0
        self.next = 0.0
        self._cold = True

    def record(self, depth: int, seconds: float) -> None:
        """Record the seconds of drafts of up to `depth` tokens."""
        if depth <= 0:
            return
        if self._cold:
            self._cold = False
            return
        share = NEW_SHARE if self.first else 1.0
        each = seconds / depth
        self.first += share * (each - self.first)
        self.next += share * (each - self.next)

    def doubt(self) -> None:
        """Halve the measured times: nothing is drafted, so nothing corrects a time that was too long."""
        self.first /= 2
        self.next /= 2

    def seconds(self, depth: int) -> float:
        return 0.0 if depth <= 0 else self.first + (depth - 1) * self.next


def _bucket(rows: int) -> int:
    """Round rows down to an eighth of their power of two, so that steps of about one size are averaged."""
    if rows <= EXACT_UP_TO:
        return rows
    unit = 1 << (rows.bit_length() - 4)
    return rows // unit * unit
