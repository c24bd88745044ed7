"""Requests that run while their caller goes on: to wait for, to await, or to iterate over, on any event loop."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from concurrent.futures import Future
from typing import Any

from quire.client.outputs import RequestOutput
from quire.errors import QuireError

Updates = Callable[[], Iterator[RequestOutput]]


class PendingOutput:
    """The output of a request whose `updates` are read in a thread of its own.

    `result()` waits for the whole output, `await` does so on an event loop. Iterating, with `for` or `async for`,
    gives the output each time it grows. `abort` ends the request; its output is then what there is.
    """

    def __init__(self, updates: Updates) -> None:
        self._future: Future[RequestOutput] = Future()
        self._queue: queue.SimpleQueue[RequestOutput | None] = queue.SimpleQueue()
        self._aborted = threading.Event()
        threading.Thread(target=self._run, args=(updates,), daemon=True).start()

    def _run(self, updates: Updates) -> None:
        last: RequestOutput | None = None
        try:
            for output in updates():
                last = output
                self._queue.put(last)
                if self._aborted.is_set():
                    break
            if last is None:
                raise QuireError("the request ended without an output")
            self._future.set_result(last)
        except BaseException as error:
            self._future.set_exception(error)
        finally:
            self._queue.put(None)

    def result(self, timeout: float | None = None) -> RequestOutput:
        """Wait for the whole output. TimeoutError after `timeout` seconds; RequestError or QuireError if it failed."""
        return self._future.result(timeout)

    async def aresult(self) -> RequestOutput:
        """The same for event loops."""
        return await asyncio.wrap_future(self._future)

    def __await__(self) -> Generator[Any, None, RequestOutput]:
        return self.aresult().__await__()

    def __iter__(self) -> Iterator[RequestOutput]:
        while (output := self._queue.get()) is not None:
            yield output
        self._future.result()  # raises what ended the request

    async def __aiter__(self) -> AsyncIterator[RequestOutput]:
        while (output := await asyncio.to_thread(self._queue.get)) is not None:
            yield output
        self._future.result()

    def abort(self) -> None:
        self._aborted.set()

    @property
    def finished(self) -> bool:
        return self._future.done()
