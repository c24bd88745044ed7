"""What programs see: an engine core, and their own requests on it. Token ids only."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Protocol

from quire.types import Delta, EngineStats, Request, ScheduledBatch


class Core(Protocol):
    """An engine core: driven by an engine's process, and used by programs."""

    on_batch: Callable[[ScheduledBatch], None] | None  # called before a batch with new sequences
    on_step: Callable[[float, float], None] | None  # called with seconds of a step and of its prompts

    @property
    def has_work(self) -> bool: ...
    def add(self, request: Request) -> None: ...
    def fork(self, request_id: str, index: int, request: Request, output: list[int]) -> None: ...
    def abort(self, request_id: str, index: int | None = None) -> None: ...
    def drop(self, request_id: str, index: int | None = None) -> None: ...
    def step(self) -> list[Delta]: ...
    def stats(self) -> EngineStats: ...
    def reset_prefix_cache(self, reset_running: bool = False) -> bool: ...
    @property
    def is_sleeping(self) -> bool: ...
    def sleep(self, level: int = 1, mode: str = "abort") -> None: ...
    def wake_up(self, tags: Sequence[str] | None = None) -> None: ...
    def start_profile(self, prefix: str | None = None, delay: int = 0, most: int = 0) -> None: ...
    def stop_profile(self) -> str | None: ...


class Run:
    """The requests of one program. It receives their deltas; when it ends, the rest are dropped."""

    def __init__(self, request: Request, core: Core) -> None:
        self.request = request
        self.live: set[str] = set()
        self.num_cached = 0  # prompt tokens of the first request found in the prefix cache
        self._core = core
        self._first = True

    def add(self, request: Request) -> None:
        """Queue a request of one sample (n = 1)."""
        self.live.add(request.id)
        self._core.add(request)

    def fork(self, request_id: str, request: Request, output: list[int]) -> None:
        """Queue `request` as a continuation of a live one of this program; both share its KV."""
        self.live.add(request.id)
        self._core.fork(request_id, 0, request, output)

    def drop(self, request_id: str) -> None:
        """End a request and drop its remaining deltas."""
        self.live.discard(request_id)
        self._core.drop(request_id)

    def took(self, delta: Delta) -> None:
        """Account for a delta that is about to go to the program."""
        if self._first:
            self._first, self.num_cached = False, delta.usage.num_cached
        if delta.finish_reason is not None:
            self.live.discard(delta.request_id)


Program = Callable[[Request, Run], Generator[None, Delta, list[Delta]]]
"""Gets its request and a `Run`, yields to receive the next delta, and returns the deltas that end its samples."""
