"""The interface of an engine core, for drivers and for hosts that queue requests. Token ids only."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Protocol

from quire.engine.verbs import Result, Verb
from quire.types import Delta, EngineStats, ModelCard, Request, ScheduledBatch

if TYPE_CHECKING:
    from quire.runtime.watch import Watch


class Core(Protocol):
    """Takes requests and steps them: driven by a process or a thread."""

    on_batch: Callable[[ScheduledBatch], None] | None  # called before a batch with new sequences
    watch: Watch
    on_step: Callable[[float, float], None] | None  # called with seconds of a step and of its prompts
    on_idle: Callable[[], bool]  # called while nothing is to be done, until it returns False

    @property
    def has_work(self) -> bool: ...
    def add(self, request: Request) -> None: ...
    def abort(self, request_id: str, index: int | None = None) -> None: ...
    def drop(self, request_id: str, index: int | None = None) -> None: ...
    def do(self, verb: Verb) -> Result | Future[str]: ...
    def step(self) -> list[Delta]: ...
    def stats(self) -> EngineStats: ...


class Queue(Protocol):
    """The part of a core that a host uses: requests of one model call each, and kept prefixes."""

    @property
    def busy(self) -> bool: ...
    def add(self, request: Request) -> None: ...
    def fork(self, request_id: str, index: int, request: Request, output: list[int]) -> None: ...
    def keep(self, key: str, request: Request, tokens: list[int]) -> int: ...
    def let_go(self, key: str) -> None: ...
    def drop(self, request_id: str, index: int | None = None) -> None: ...


class Host(Protocol):
    """Answers composed requests (`Request.is_composed`) by several others, which it queues."""

    @property
    def has_work(self) -> bool:
        """Return whether `advance` or `route` has something to do, even if no request of the core runs."""

    def __len__(self) -> int:
        """Return the number of composed requests that wait or run."""

    def __contains__(self, request_id: str) -> bool: ...

    def add(self, request: Request) -> None:
        """Begin to answer a request."""

    def abort(self, request_id: str) -> None:
        """End a request."""

    def abort_all(self) -> None:
        """End all requests."""

    def drop(self, request_id: str) -> None:
        """End a request without a delta."""

    def advance(self) -> None:
        """Go on before a step with what was computed beside the steps."""

    def route(self, deltas: list[Delta]) -> list[Delta]:
        """Take the deltas of own requests after a step; return all others, and the answers' deltas."""

    def count(self, stats: EngineStats) -> None:
        """Add the host's gauges."""


class Phases(Protocol):
    """The parts of the start-up time: seconds by phase, in order."""

    @property
    def phases(self) -> dict[str, float]: ...


class Made(Protocol):
    """An engine that is ready for its first request."""

    @property
    def core(self) -> Core: ...
    @property
    def info(self) -> ModelCard: ...
    @property
    def report(self) -> Phases: ...
