"""Runs programs over an engine core behind the core's own interface; other requests pass through."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Sequence
from typing import Generic, TypeVar

from quire.program.beam import beam_search
from quire.program.core import Core, Program, Run
from quire.program.select import select
from quire.types import Delta, EngineStats, FinishReason, Request, ScheduledBatch, Usage, ends

log = logging.getLogger("quire.engine")

C = TypeVar("C", bound=Core)


def program_of(request: Request) -> Program | None:
    """The program that answers `request`; None if the core answers it directly."""
    if request.sampling.beam is not None:
        return beam_search
    return select if request.choices else None


class Programs(Generic[C]):
    """A core whose requests may be programs. A program that raises ends only its own request, with an error."""

    def __init__(self, core: C) -> None:
        self.core = core
        self._runs: dict[str, tuple[Run, Generator[None, Delta, list[Delta]]]] = {}
        self._ready: list[Delta] = []  # the next step returns them

    @property
    def on_batch(self) -> Callable[[ScheduledBatch], None] | None:
        return self.core.on_batch

    @on_batch.setter
    def on_batch(self, watch: Callable[[ScheduledBatch], None] | None) -> None:
        self.core.on_batch = watch

    @property
    def on_step(self) -> Callable[[float, float], None] | None:
        return self.core.on_step

    @on_step.setter
    def on_step(self, watch: Callable[[float, float], None] | None) -> None:
        self.core.on_step = watch

    @property
    def has_work(self) -> bool:
        return bool(self._ready) or self.core.has_work

    def add(self, request: Request) -> None:
        """Queue a request, or start the program that answers it."""
        program = program_of(request)
        if request.id in self._runs:
            message = (
                f"request id {request.id!r} is in use by a request that has not ended; choose another id"
            )
            self._ready += ends(request, FinishReason.ERROR, message)
        elif program is None:
            self.core.add(request)
        else:
            run = Run(request, self.core)
            steps = program(request, run)
            self._runs[request.id] = run, steps
            self._resume(run, lambda: next(steps))

    def fork(self, request_id: str, index: int, request: Request, output: list[int]) -> None:
        self.core.fork(request_id, index, request, output)

    def abort(self, request_id: str, index: int | None = None) -> None:
        """End a request, or one sample of it; a program ends with all its requests."""
        if request_id in self._runs:
            run, steps = self._runs[request_id]
            steps.close()
            self._end(run, _last(run, FinishReason.ABORT, None))
        else:
            self.core.abort(request_id, index)

    def drop(self, request_id: str, index: int | None = None) -> None:
        """End a request without a delta."""
        if request_id in self._runs:
            run, steps = self._runs.pop(request_id)
            steps.close()
            self._drop_all(run)
        else:
            self.core.drop(request_id, index)

    def step(self) -> list[Delta]:
        """Step the core and pass programs' deltas to them; returns all others."""
        deltas = self.core.step()
        if self._runs:
            # A program may drop requests whose deltas are in this step too: skip those.
            owners = {request_id: run for run, _ in self._runs.values() for request_id in run.live}
            passed = []
            for delta in deltas:
                owner = owners.get(delta.request_id)
                if owner is None:
                    passed.append(delta)
                elif delta.request_id in owner.live:
                    self._push(owner, delta)
            deltas = passed
        if self._ready:
            deltas = self._ready + deltas
            self._ready = []
        return deltas

    def _push(self, run: Run, delta: Delta) -> None:
        _, steps = self._runs[run.request.id]
        run.took(delta)
        self._resume(run, lambda: steps.send(delta))

    def _resume(self, run: Run, go_on: Callable[[], None]) -> None:
        try:
            go_on()
        except StopIteration as end:
            self._end(run, end.value)
        except Exception as error:
            log.exception("the program of request %s failed", run.request.id)
            self._end(run, _last(run, FinishReason.ERROR, f"{type(error).__name__}: {error}"))

    def _end(self, run: Run, last: list[Delta]) -> None:
        del self._runs[run.request.id]
        self._drop_all(run)
        self._ready += last

    def _drop_all(self, run: Run) -> None:
        for request_id in list(run.live):
            run.drop(request_id)

    def stats(self) -> EngineStats:
        return self.core.stats()

    def reset_prefix_cache(self, reset_running: bool = False) -> bool:
        return self.core.reset_prefix_cache(reset_running)

    @property
    def is_sleeping(self) -> bool:
        return self.core.is_sleeping

    def sleep(self, level: int = 1, mode: str = "abort") -> None:
        """As the core does; programs end under "abort" and are finished first otherwise."""
        for request_id in list(self._runs) if mode == "abort" else ():
            self.abort(request_id)
        while self._runs and mode != "abort":
            self._ready = self.step()
        self.core.sleep(level, mode)

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        self.core.wake_up(tags)

    def start_profile(self, prefix: str | None = None, delay: int = 0, most: int = 0) -> None:
        self.core.start_profile(prefix, delay, most)

    def stop_profile(self) -> str | None:
        return self.core.stop_profile()


def _last(run: Run, reason: FinishReason, error: str | None) -> list[Delta]:
    usage = Usage(len(run.request.tokens), run.num_cached, 0)
    samples = range(run.request.sampling.n)
    return [Delta(run.request.id, index, [], usage, finish_reason=reason, error=error) for index in samples]
