"""Traces steps in Chrome's format, for https://ui.perfetto.dev: what each step computed and how long it took."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import msgspec

from quire.engine.core import EngineCore
from quire.engine.verbs import StartProfile, StopProfile
from quire.errors import EngineError
from quire.types import ScheduledBatch

MAX_EVENTS = 1_000_000


class StepTrace:
    """Collects steps from the `delay`-th on, at most `most` of them (0: MAX_EVENTS)."""

    def __init__(self, directory: Path, prefix: str | None, delay: int = 0, most: int = 0) -> None:
        if prefix is not None and not prefix.replace("-", "").replace("_", "").isalnum():
            raise EngineError(
                f"start_profile: profile_prefix must be letters, digits, - and _, got {prefix!r}"
            )
        self._path = directory / f"{prefix or 'quire'}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.json"
        self._delay, self._most = delay, most or MAX_EVENTS
        self._events: list[dict[str, Any]] = []
        directory.mkdir(parents=True, exist_ok=True)

    def record(self, began: float, ended: float, batch: ScheduledBatch) -> None:
        """Record a step that took from `began` to `ended` (seconds of time.perf_counter)."""
        self._delay -= 1
        if self._delay >= 0 or len(self._events) >= self._most:
            return
        event = {
            "name": f"step {batch.step}",
            "ph": "X",
            "ts": began * 1e6,
            "dur": (ended - began) * 1e6,
            "pid": os.getpid(),
            "tid": 1,
            "args": {
                "tokens": batch.num_tokens,
                "sequences": len(batch.seqs),
                "new": len(batch.new),
                "drafted": sum(len(seq.draft) for seq in batch.seqs),
            },
        }
        self._events.append(event)

    def write(self) -> Path:
        """Write the file. EngineError if it cannot be written."""
        try:
            self._path.write_bytes(msgspec.json.encode({"traceEvents": self._events}))
        except OSError as error:
            raise EngineError(f"the trace {self._path} cannot be written: {error}") from error
        return self._path


class Tracer:
    """Obeys StartProfile and StopProfile."""

    def __init__(self, core: EngineCore, directory: Path) -> None:
        self._core, self._directory = core, directory
        self._trace: StepTrace | None = None
        core.handlers |= {StartProfile: self.start, StopProfile: self.stop}

    def start(self, verb: StartProfile) -> None:
        """Trace steps from now on. EngineError for a prefix that is no part of a file's name."""
        self._trace = StepTrace(self._directory, verb.prefix, verb.delay, verb.most)
        self._core.on_computed = self._trace.record

    def stop(self, verb: StopProfile) -> str | None:
        """Write the trace and return its path."""
        trace, self._trace, self._core.on_computed = self._trace, None, None
        return None if trace is None else str(trace.write())
