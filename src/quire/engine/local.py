"""An engine core on its own thread, for callers on any thread of this process. Knows token ids only.

Steps never run on a caller's thread. So an interrupt (Ctrl-C) or an exception there ends that call and leaves the
engine whole, and calls from several threads share one batch.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, TypeVar

from quire.engine.verbs import Result, Verb
from quire.errors import EngineError
from quire.types import Delta, Request, ScheduledBatch

if TYPE_CHECKING:
    from quire.engine.api import Core

T = TypeVar("T")
News = SimpleQueue[list[Delta] | BaseException]


class LocalCall:
    """The requests of one caller while they run. Leaving its `with` aborts what still runs.

    Their deltas go to the queue `news`, which calls may share.
    """

    def __init__(self, engine: LocalEngine, requests: Sequence[Request], news: News | None = None) -> None:
        self._engine = engine
        self._ids = [request.id for request in requests]
        # Used by the engine thread.
        self._open = {request.id: len(request.open_samples) for request in requests}
        self._left = sum(self._open.values())  # used by the caller
        self._deltas: News = SimpleQueue() if news is None else news

    def put(self, deltas: list[Delta]) -> list[str]:
        """Hand over the deltas of a step, on the engine thread; returns the requests that have ended."""
        ended = []
        for delta in deltas:
            if delta.finish_reason is not None:
                self._open[delta.request_id] -= 1
                if not self._open[delta.request_id]:
                    ended.append(delta.request_id)
        self._deltas.put(deltas)
        return ended

    def fail(self, error: BaseException) -> None:
        """Fail the call, on the engine thread: the engine has failed or was shut down."""
        self._deltas.put(error)

    def __iter__(self) -> Iterator[list[Delta]]:
        """Yield deltas as they arrive, until every sample has ended. Raises EngineError if the engine fails."""
        while self._left:
            deltas = self._deltas.get()
            if isinstance(deltas, BaseException):
                kind = type(deltas) if isinstance(deltas, EngineError) else EngineError
                raise kind(f"the engine failed: {deltas}") from deltas
            self._left -= sum(delta.finish_reason is not None for delta in deltas)
            yield deltas

    def abort(self, request_id: str, index: int) -> None:
        """End one sample; its last delta still arrives."""
        self._engine.post(lambda core: core.abort(request_id, index))

    def __enter__(self) -> LocalCall:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._left:
            self._engine.forget(self._ids)


class Observer(Protocol):
    """Is told what happens to requests, on the engine thread."""

    def scheduled(self, batch: ScheduledBatch) -> None: ...
    def stepped(self, deltas: list[Delta]) -> None: ...
    def dropped(self, request_id: str) -> None: ...


Work = Callable[["Core"], object]
Fail = Callable[[BaseException], object]


class LocalEngine:
    """Runs `core` on a daemon thread until `close`. All methods may be called from any thread."""

    def __init__(self, core: Core, observer: Observer | None = None) -> None:
        self._core = core
        self._observer = observer
        if observer is not None:
            core.on_batch = observer.scheduled
        self._jobs: deque[tuple[Work, Fail | None]] = deque()
        self._wake = threading.Condition()
        self._calls: dict[str, LocalCall] = {}  # by request id; only the engine thread uses it
        self._closed = False
        self._process = os.getpid()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="quire-engine", daemon=True)
        self._thread.start()

    def submit(self, requests: Sequence[Request], news: News | None = None) -> LocalCall:
        """Queue the requests of one call, whose deltas go to `news` if it is given."""
        call = LocalCall(self, requests, news)

        def start(core: Core) -> None:
            for request in requests:
                self._calls[request.id] = call
                core.add(request)

        self.post(start, call.fail)
        return call

    def post(self, job: Work, fail: Fail | None = None) -> None:
        """Run `job` between steps, or `fail` if the engine ends before. Raises EngineError if it has ended already."""
        if self._process != os.getpid():
            raise EngineError(
                "this engine runs in another process: a forked child cannot use its parent's LLM; make one in the "
                "child, or start the child by multiprocessing's spawn"
            )
        with self._wake:
            if self._closed:
                raise EngineError("the engine was shut down: make a new LLM")
            if self._error is not None:
                raise EngineError(f"the engine failed: {self._error}") from self._error
            self._jobs.append((job, fail))
            self._wake.notify()

    def ask(self, job: Callable[[Core], T]) -> T:
        """Run `job` between steps and return its result."""
        result: Future[T] = Future()

        def work(core: Core) -> None:
            try:
                result.set_result(job(core))
            except Exception as error:
                result.set_exception(error)

        self.post(work, result.set_exception)
        return result.result()

    def do(self, verb: Verb) -> Result:
        """Have the engine obey an operator's verb; returns its answer."""
        result = self.ask(lambda core: core.do(verb))
        return result.result() if isinstance(result, Future) else result

    def forget(self, request_ids: Sequence[str]) -> None:
        """Abort requests and drop their remaining deltas."""

        def work(core: Core) -> None:
            for request_id in request_ids:
                if self._calls.pop(request_id, None) is not None:
                    core.drop(request_id)
                    if self._observer is not None:
                        self._observer.dropped(request_id)

        if self._process != os.getpid():
            return
        with self._wake:
            if request_ids and not self._closed and self._error is None:
                self._jobs.append((work, None))
                self._wake.notify()

    def close(self) -> None:
        """Stop after the current step; running calls end with an EngineError."""
        if self._process != os.getpid():
            return  # a forked child has no thread to stop
        with self._wake:
            self._closed = True
            self._wake.notify()
        if self._thread is not threading.current_thread():
            self._thread.join()

    # --- the engine thread

    def _run(self) -> None:
        error: BaseException = EngineError("the engine was shut down")
        try:
            while self._next_jobs():
                self._route(self._core.step())
        except BaseException as failure:
            error = failure
        with self._wake:
            self._error = error
        while self._jobs:
            _, fail = self._jobs.popleft()
            if fail is not None:
                fail(error)
        for call in set(self._calls.values()):
            call.fail(error)
        self._calls.clear()

    def _next_jobs(self) -> bool:
        """Wait for work and run the posted jobs. False: stop the engine."""
        core = self._core
        if not core.has_work:
            with self._wake:
                while not self._jobs and not self._closed:
                    self._wake.wait()
        if self._closed:
            return False
        while self._jobs:
            job, _ = self._jobs.popleft()
            job(core)
        return True

    def _route(self, deltas: list[Delta]) -> None:
        """Hand each call its deltas; drop the deltas of calls that left."""
        if not deltas:
            return
        if self._observer is not None:
            self._observer.stepped(deltas)
        shares: dict[LocalCall, list[Delta]] = {}
        for delta in deltas:
            call = self._calls.get(delta.request_id)
            if call is not None:
                shares.setdefault(call, []).append(delta)
        for call, share in shares.items():
            for request_id in call.put(share):
                del self._calls[request_id]
