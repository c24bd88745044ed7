"""The requests of one call while they run: their news wait here for a reader. Knows token ids only."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Protocol

from quire.client.metrics import RequestTimes
from quire.types import Delta, FinishReason, Request


class Ender(Protocol):
    """Who can end what runs: the engine client."""

    def end_sample(self, request_id: str, index: int, reason: FinishReason) -> None: ...
    def forget(self, request_id: str, reason: FinishReason) -> None: ...


class Generation:
    """The requests of one call while they run. News wait here, merged by sample, until they are taken.

    So a reader that is slow or gone costs one Delta a sample, and never holds up another. Close it (or leave
    its `with`) to end what still runs.
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

    def __init__(self, client: Ender, requests: list[Request], times: list[RequestTimes]) -> None:
        self._client = client
        self.requests = requests
        self.times = times
        self._pending: dict[tuple[str, int], Delta] = {}
        self._waiter: asyncio.Future[None] | None = None
        self._error: Exception | None = None
        self._failed = False
        self._whole = False
        self._open = sum(request.sampling.n for request in requests)

    @property
    def finished(self) -> bool:
        """Nothing runs and nothing waits to be taken."""
        return self._open == 0 and not self._pending

    async def take(self, whole: bool = False) -> list[Delta]:
        """What is new, at most one Delta a sample; waits for it. Empty when all samples have ended.

        With `whole` it waits until all have ended, or one has failed. Raises EngineError where the engine died,
        and what `fail` was given.
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
        """The reader wants to wait for more than there is."""
        return self._whole and self._open > 0 and not self._failed

    def end_sample(self, request_id: str, index: int, reason: FinishReason = FinishReason.STOP) -> None:
        """End one sample that needs no more tokens, for example at a stop string."""
        self._client.end_sample(request_id, index, reason)

    def fail(self, error: Exception) -> None:
        """End everything; `take` raises `error` once the news before it are taken."""
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
        """For the client: news of a sample."""
        key = (delta.request_id, delta.index)
        waiting = self._pending.get(key)
        if waiting is None:
            self._pending[key] = delta
        else:
            waiting.join(delta)
        self._failed = self._failed or delta.error is not None
        self._wake()

    def sample_ended(self, request_id: str, index: int, *, discard: bool) -> None:
        """For the client: the sample has ended; `discard` drops what waits of it."""
        self._open -= 1
        if discard:
            self._pending.pop((request_id, index), None)
        self._wake()

    def _wake(self) -> None:
        waiter = self._waiter
        if waiter is None or waiter.done() or (self._incomplete and self._error is None):
            return
        waiter.set_result(None)
