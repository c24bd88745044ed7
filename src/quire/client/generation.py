"""Generation: the running requests of one call, and their deltas until a reader takes them. Knows token ids only."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING

from quire.client.metrics import RequestTimes
from quire.types import Delta, FinishReason, Request

if TYPE_CHECKING:
    from quire.client.client import AsyncEngine


class Generation:
    """The running requests of one call. Deltas are merged per sample until they are taken.

    So a slow reader costs one Delta per sample and never delays another. Closing it, or leaving its `with` block,
    aborts what still runs.
    """

    __slots__ = (
        "_client",
        "_error",
        "_failed",
        "_open",
        "_pending",
        "_waiter",
        "_whole",
        "requests",
        "times",
    )

    def __init__(self, client: AsyncEngine, requests: list[Request], times: list[RequestTimes]) -> None:
        self._client = client
        self.requests = requests
        self.times = times
        self._pending: dict[tuple[str, int], Delta] = {}
        self._waiter: asyncio.Future[None] | None = None
        self._error: Exception | None = None
        self._failed = False
        self._whole = False
        self._open = sum(len(request.open_samples) for request in requests)

    @property
    def finished(self) -> bool:
        """Whether nothing runs and nothing is left to take."""
        return self._open == 0 and not self._pending

    async def take(self, whole: bool = False) -> list[Delta]:
        """Wait for new deltas, at most one per sample. Empty once all samples have ended.

        With `whole`, wait until all have ended or one has failed. Raises EngineError if the engine died, or the
        error given to `fail`.
        """
        self._whole = whole
        while not self._pending or self._incomplete:
            if self._error is not None:
                raise self._error
            if self._open == 0:
                return []
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        pending, self._pending = self._pending, {}
        return list(pending.values())

    @property
    def _incomplete(self) -> bool:
        """Whether the reader waits for the end and it has not come."""
        return self._whole and self._open > 0 and not self._failed

    def end_sample(self, request_id: str, index: int, reason: FinishReason = FinishReason.STOP) -> None:
        """End one sample early, for example at a stop string."""
        self._client.end_sample(request_id, index, reason)

    def fail(self, error: Exception) -> None:
        """End everything; `take` raises `error` after the deltas before it."""
        if self._error is None:
            self._error = error
        self.close()
        self._wake()

    def close(self) -> None:
        for request in self.requests:
            self._client.forget(request.id, FinishReason.ABORT)

    def __enter__(self) -> Generation:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def put(self, delta: Delta) -> None:
        """Add a delta of a sample; called by the client."""
        key = (delta.request_id, delta.index)
        waiting = self._pending.get(key)
        if waiting is None:
            self._pending[key] = delta
        else:
            waiting.join(delta)
        self._failed = self._failed or delta.error is not None
        self._wake()

    def sample_ended(self, request_id: str, index: int, *, discard: bool) -> None:
        """Record that a sample has ended; called by the client. `discard` drops its pending deltas."""
        self._open -= 1
        if discard:
            self._pending.pop((request_id, index), None)
        self._wake()

    def _wake(self) -> None:
        waiter = self._waiter
        if waiter is None or waiter.done() or (self._incomplete and self._error is None):
            return
        waiter.set_result(None)


@dataclass(slots=True, eq=False)
class Live:
    """One request in the engine: its generation, its times, and the samples that still run."""

    generation: Generation
    times: RequestTimes
    samples: set[int]
    queued: bool = True
