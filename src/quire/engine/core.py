"""The step loop: the one place that sees both the scheduler and the executor. Knows token ids only."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any, Protocol

from quire.engine.select import Selection
from quire.errors import QuireError
from quire.grammar.compiler import GrammarCompiler
from quire.sched.scheduler import Scheduler
from quire.types import Delta, EngineStats, FinishReason, Request, ScheduledBatch, StepOutput, Usage

IDLE_WAIT = 0.01  # seconds that an idle step waits for a grammar to be compiled


class Executor(Protocol):
    """Computes scheduled batches, in order, in this process or elsewhere."""

    def execute(self, batch: ScheduledBatch) -> StepOutput: ...


class EngineCore:
    """Adds, aborts and steps requests. Every request that is added ends with exactly one finish reason a sample."""

    def __init__(
        self, scheduler: Scheduler, executor: Executor, grammars: GrammarCompiler | None = None
    ) -> None:
        self.scheduler = scheduler
        self.grammars = grammars
        self._executor = executor
        self._ready: list[Delta] = []
        self._compiling: dict[str, tuple[Request, Future[Any]]] = {}
        self._selections: dict[str, Selection] = {}
        self._readers: dict[str, Selection] = {}  # by the id of a request that reads a choice
        # Told of each batch before it is computed.
        self.on_batch: Callable[[ScheduledBatch], None] | None = None

    def add(self, request: Request) -> None:
        """Queue a request. One that can never run is answered with an error Delta by the next step.

        One whose grammar is not compiled yet is queued when it is; others go on meanwhile.
        """
        text = request.grammar
        if request.id in self._compiling or request.id in self._selections:
            message = (
                f"request id {request.id!r} is in use by a request that has not ended; choose another id"
            )
            self._ready += _ends(request, FinishReason.ERROR, message)
        elif request.choices:
            self._selections[request.id] = Selection(request)
            self._read_choices(self._selections[request.id])
        elif text is not None and self.grammars is not None and self.grammars.find(text) is None:
            self._compiling[request.id] = (request, self.grammars.submit(text))
        else:
            self._ready += self.scheduler.add(request)

    def abort(self, request_id: str, index: int | None = None) -> None:
        """End a request, or one sample of it; unknown ids (finished already) are ignored."""
        if request_id in self._compiling:
            request, _ = self._compiling[request_id]
            if index is None or request.sampling.n == 1:
                del self._compiling[request_id]
                self._ready += _ends(request, FinishReason.ABORT, None)
                return
            self._admit(request_id)
        if request_id in self._selections:
            self._ready.append(self._selections[request_id].aborted())
            self._forget(request_id)
        else:
            self._ready += self.scheduler.abort(request_id, index)

    def _read_choices(self, selection: Selection) -> None:
        for reader in selection.next():
            self._readers[reader.id] = selection
            self._ready += self.scheduler.add(reader)

    def _select(self, delta: Delta) -> Delta | None:
        """News of a reader become those of the request that selects; others pass."""
        selection = self._readers.get(delta.request_id)
        if selection is None:
            return delta
        news = selection.push(delta)
        if news is not None:
            self._forget(news.request_id)
        elif delta.finish_reason is not None:
            del self._readers[delta.request_id]
            self._read_choices(selection)
        return news

    def _forget(self, request_id: str) -> None:
        """A selection has ended: so do readers that still run, whose last news nobody hears."""
        selection = self._selections.pop(request_id)
        for reader in [reader for reader, of in self._readers.items() if of is selection]:
            del self._readers[reader]
            self.scheduler.abort(reader)

    @property
    def has_work(self) -> bool:
        return bool(self._ready or self._compiling) or self.scheduler.has_work

    def step(self) -> list[Delta]:
        """Schedule and compute one batch; returns the news of all sequences. Does nothing when idle."""
        if self._compiling:
            self._admit_compiled()
        deltas, self._ready = self._ready, []
        batch = self.scheduler.schedule()
        if batch is not None:
            if self.on_batch is not None:
                self.on_batch(batch)
            deltas += self.scheduler.update(batch, self._executor.execute(batch))
        if self._selections:
            return [news for delta in deltas if (news := self._select(delta)) is not None]
        return deltas

    def _admit_compiled(self) -> None:
        if not (self._ready or self.scheduler.has_work):
            wait([job for _, job in self._compiling.values()], IDLE_WAIT, FIRST_COMPLETED)
        for request_id, (_, job) in list(self._compiling.items()):
            if job.done():
                self._admit(request_id)

    def _admit(self, request_id: str) -> None:
        """Queue a request whose grammar was compiled; waits for it."""
        request, job = self._compiling.pop(request_id)
        error = job.exception()
        if error is None:
            self._ready += self.scheduler.add(request)
        else:
            message = str(error) if isinstance(error, QuireError) else f"{type(error).__name__}: {error}"
            self._ready += _ends(request, FinishReason.ERROR, message)

    def stats(self) -> EngineStats:
        return self.scheduler.stats()

    def reset_prefix_cache(self) -> None:
        """Forget cached prefixes that no running sequence holds."""
        self.scheduler.reset_prefix_cache()


def _ends(request: Request, reason: FinishReason, error: str | None) -> list[Delta]:
    """Every sample of a request that never ran ends so."""
    usage = Usage(len(request.tokens), 0, 0)
    return [
        Delta(request.id, i, [], usage, finish_reason=reason, error=error) for i in range(request.sampling.n)
    ]
