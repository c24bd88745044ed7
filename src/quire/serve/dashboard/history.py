"""Keep the engine's last 24 hours in rings of rows. Knows no HTTP and no engine, only readings.

A row covers one interval: the output rate over it, medians of the latencies observed in it, and the queue at its end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# Seconds that a ring covers, and seconds per row: 300, 240 and 288 rows.
SPANS = ((300, 1.0), (3600, 15.0), (86400, 300.0))
TICK = 1.0


def quantile(bounds: Sequence[float], counts: Sequence[int], share: float) -> float | None:
    """Find the value below which `share` of the observations lie; None without any.

    `counts` has one entry more than `bounds`, for values above the last, which count as the last bound. Buckets are
    taken as evenly filled.
    """
    total = sum(counts)
    if not total:
        return None
    rank, below = share * total, 0
    for i, count in enumerate(counts[: len(bounds)]):
        if count and below + count >= rank:
            low = bounds[i - 1] if i else 0.0
            return low + (bounds[i] - low) * (rank - below) / count
        below += count
    return bounds[-1]


@dataclass(frozen=True, slots=True)
class Reading:
    """Counters and histograms at one moment. `time` is wall-clock seconds, so that rows survive a reload."""

    time: float
    generation_tokens: int
    num_running: int
    num_waiting: int
    restarts: int
    histograms: Mapping[str, tuple[Sequence[float], Sequence[int]]]  # name -> bounds, counts


def row(before: Reading, now: Reading) -> dict[str, Any]:
    """Make the row of the interval between two readings."""
    seconds = max(now.time - before.time, 1e-6)
    found: dict[str, Any] = {
        "time": now.time,
        "rate": max(0, now.generation_tokens - before.generation_tokens) / seconds,
        "running": now.num_running,
        "waiting": now.num_waiting,
        "restarts": now.restarts,
    }
    for name, (bounds, counts) in now.histograms.items():
        fresh = [new - old for new, old in zip(counts, before.histograms[name][1], strict=True)]
        found[f"{name}_p50"] = quantile(bounds, fresh, 0.5)
    return found


@dataclass(slots=True)
class Ring:
    """Rows of one resolution; `base` is the reading at the end of the last row."""

    interval: float
    rows: deque[dict[str, Any]]
    base: Reading | None = None


class History:
    """Rings that `tick` fills; it must be called about once a second."""

    def __init__(self, read: Callable[[], Reading]) -> None:
        self._read = read
        self._rings = {span: Ring(each, deque(maxlen=int(span / each))) for span, each in SPANS}

    def tick(self) -> None:
        """Take a reading; close the rows whose interval is over."""
        now = self._read()
        for ring in self._rings.values():
            if ring.base is None or now.time < ring.base.time:
                ring.base = now
            elif now.time - ring.base.time >= ring.interval * 0.95:
                ring.rows.append(row(ring.base, now))
                ring.base = now

    def rings(self) -> dict[str, list[dict[str, Any]]]:
        """Give all rows by the seconds that their ring covers, oldest first."""
        return {str(span): list(ring.rows) for span, ring in self._rings.items()}

    def latest(self) -> dict[str, dict[str, Any]]:
        """Give the newest row of each ring that has one."""
        return {str(span): ring.rows[-1] for span, ring in self._rings.items() if ring.rows}
