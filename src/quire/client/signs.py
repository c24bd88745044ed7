"""SignsOfLife: whether an engine goes on, by what its loop begins and, where that may take long, by its CPU time."""

from __future__ import annotations

import os
import time
import weakref
from pathlib import Path

from quire.files import unnamed_file
from quire.runtime.watch import PAGE_BYTES, Doing, Page

LONG = (Doing.FORWARD_PASS, Doing.ORDERS)
"""LONG things may take minutes, as a pass of a large model or the load of its weights does; they use the processor."""
LONGEST_LOOK = 2.0
"""LONGEST_LOOK seconds count between two looks: the process that looks may have been stopped too."""


class SignsOfLife:
    """Looks at the engine process `pid` now and then. `patient`: long things may also wait for other machines.

    The engine writes to the page of the file of `descriptor`.
    """

    def __init__(self, patient: bool) -> None:
        self.descriptor, self.pid = unnamed_file(PAGE_BYTES), 0
        weakref.finalize(self, os.close, self.descriptor)
        self._page, self._patient = Page(self.descriptor), patient
        self._seen: tuple[int, float] | None = None
        self._silence, self._looked = 0.0, time.monotonic()

    @property
    def doing(self) -> Doing:
        return self._page.doing

    def silence(self) -> float:
        """Look again; return the seconds since the last sign of life."""
        now, seen = time.monotonic(), self.seen()
        waited, self._looked = min(now - self._looked, LONGEST_LOOK), now
        self._silence = self._silence + waited if seen == self._seen else 0.0
        self._seen = seen
        return self._silence

    def seen(self) -> tuple[int, float]:
        """Look; what is seen differs from before if the engine has gone on."""
        return self._page.count, self._progress()

    def _progress(self) -> float:
        """Read the CPU time of something long; where it is not known, or says nothing, time itself."""
        if self.doing not in LONG:
            return 0.0
        try:
            fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return time.monotonic()
        return time.monotonic() if self._patient else float(fields[11]) + float(fields[12])
