"""Requests that run while their caller goes on: to wait for, to await, or to iterate over, on any event loop."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from quire.client.outputs import OutputStream, RequestOutput
from quire.engine.local import LocalCall, News
from quire.errors import EngineError, QuireError
from quire.lazy import Lazy
from quire.llm.running import push, raise_error

if TYPE_CHECKING:
    import asyncio
else:
    asyncio = Lazy("asyncio")

Submit = Callable[[Sequence[OutputStream], News], LocalCall]


class PendingOutput:
    """The output of a request that is running.

    `result()` waits for the whole output, `await` does so on an event loop. Iterating, with `for` or `async for`,
    gives the output each time it has grown. `abort` ends the request; its output is then what there is.
    """

    def __init__(self, stream: OutputStream, call: LocalCall) -> None:
        self._stream, self._call = stream, call
        self._future: Future[RequestOutput] = Future()
        self._future.set_running_or_notify_cancel()  # so cancelling an `await` does not cancel the request
        self._updates: SimpleQueue[RequestOutput | None] = SimpleQueue()

    def result(self, timeout: float | None = None) -> RequestOutput:
        """Wait for the whole output. TimeoutError after `timeout` seconds; QuireError if the request failed."""
        return self._future.result(timeout)

    async def aresult(self) -> RequestOutput:
        """Await the whole output on an event loop."""
        return await asyncio.wrap_future(self._future)

    def __await__(self) -> Generator[Any, None, RequestOutput]:
        return self.aresult().__await__()

    def __iter__(self) -> Iterator[RequestOutput]:
        while (output := self._updates.get()) is not None:
            yield output
        self._future.result()  # raises what ended the request

    async def __aiter__(self) -> AsyncIterator[RequestOutput]:
        while (output := await asyncio.to_thread(self._updates.get)) is not None:
            yield output
        self._future.result()

    def abort(self) -> None:
        for index in range(self._stream.request.sampling.n):
            self._call.abort(self._stream.request.id, index)

    @property
    def finished(self) -> bool:
        return self._future.done()

    def grow(self) -> bool:
        """Report what has come, for the thread that reads the deltas. True: the request has ended."""
        try:
            raise_error(self._stream)
        except QuireError as error:
            self.fail(error)
            return True
        output = self._stream.snapshot()
        self._updates.put(output)
        if self._stream.finished:
            self._future.set_result(output)
            self._updates.put(None)
        return self._stream.finished

    def fail(self, error: BaseException) -> None:
        self._future.set_exception(error)
        self._updates.put(None)


class PendingOutputs:
    """The pending outputs of an engine. One thread reads the deltas of all, from the first one until `close`."""

    def __init__(self) -> None:
        self._news: SimpleQueue[Any] = SimpleQueue()
        self._open: dict[str, tuple[PendingOutput, OutputStream, LocalCall]] = {}
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def add(self, stream: OutputStream, submit: Submit) -> PendingOutput:
        """Submit a request; its deltas go to the queue that is passed to `submit`."""
        with self._lock:  # deltas wait until their request is known
            call = submit([stream], self._news)
            pending = PendingOutput(stream, call)
            self._open[stream.request.id] = pending, stream, call
            if self._thread is None:
                self._thread = threading.Thread(target=self._read, name="quire-pending", daemon=True)
                self._thread.start()
        return pending

    def close(self) -> None:
        self._news.put(None)

    def _read(self) -> None:
        while (deltas := self._news.get()) is not None:
            if isinstance(deltas, BaseException):
                self._fail(deltas)
                continue
            grown: dict[str, PendingOutput] = {}
            with self._lock:
                for delta in deltas:
                    if delta.request_id in self._open:
                        grown[delta.request_id], stream, call = self._open[delta.request_id]
                        push(call, stream, delta)
            for name, pending in grown.items():
                if pending.grow():
                    self._open.pop(name, None)

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            pending, self._open = list(self._open.values()), {}
        for one, _, _ in pending:
            one.fail(EngineError(f"the engine failed: {error}"))
