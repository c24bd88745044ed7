"""Requests with `Request.program`: the interpreter over requests of the engine core, and sessions between calls."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator

from quire.engine.api import Queue
from quire.program.calls import Calls
from quire.program.core import Run
from quire.program.interpreter import Interpreter
from quire.program.lane import StepError
from quire.program.sessions import Sessions
from quire.program.tasks import Tasks, Turn
from quire.program.texts import Encoder, Texts
from quire.steps import EXPIRED, FAILED, Event, gens
from quire.types import Delta, FinishReason, Request, Usage

CHARACTERS_PER_TOKEN = 16  # the longest text of a lane, for each token of the model's length


class Interpreting:
    """Runs programs one call at a time; what they keep between calls is in `sessions`."""

    def __init__(
        self, core: Queue, texts: Texts, turn: Turn, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.texts, self._turn = texts, turn
        self.sessions = Sessions(core, clock)

    def __call__(self, request: Request, run: Run) -> Generator[None, Delta, list[Delta]]:
        """Run one call. Its events go to `run`; the last delta has the counts of all its requests."""
        program, texts = request.program, self.texts
        assert program is not None
        lanes = self.sessions.take(program.session) if program.resume else None
        if program.resume and lanes is None:
            run.report(Event("done", finish_reason=EXPIRED))
            return [_last(request, (0, 0, 0), None)]
        tasks, kept = Tasks(self._turn), False
        encoder = Encoder(texts.cuts)
        requests = dict(zip(map(id, gens(program)), request.gens, strict=True))
        calls = Calls(run, tasks, encoder, texts, requests)
        interpreter = Interpreter(CHARACTERS_PER_TOKEN * texts.max_model_len, lanes)

        async def whole() -> dict[str, list[int]]:
            await interpreter.run(program, tasks, calls, run.report)
            lanes = interpreter.live_lanes() if program.keep else {}
            return {path: await calls.tokens(lane.text) for path, lane in lanes.items() if lane.known}

        try:
            done = tasks.start(whole())
            tasks.run()
            while not done.is_set:
                if tasks.ready:
                    run.go_on()
                elif not run.waits:
                    raise StepError("the steps wait for each other's variables: nothing can go on")
                calls.take((yield))
                tasks.run()
            if program.keep:
                self.sessions.put(program.session, interpreter.live_lanes(), request, done.value)
                kept = True
        except StepError as error:
            run.report(Event("done", finish_reason=FAILED))
            return [_last(request, calls.counts, str(error))]
        finally:
            tasks.close()
            if not kept:
                self.sessions.release(program.session)
        return [_last(request, calls.counts, None)]


def _last(request: Request, counts: tuple[int, int, int], error: str | None) -> Delta:
    reason = FinishReason.STOP if error is None else FinishReason.ERROR
    return Delta(request.id, 0, [], Usage(*counts), finish_reason=reason, error=error)
