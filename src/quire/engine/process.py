"""The engine process: owns the core, reads commands, steps, sends updates. Knows token ids, no text, no HTTP.

It is started as `python -m quire.engine.process`, with modules to import ahead, and a Launch frame on standard input,
which then stays open: when it closes, the API process has gone, and this one exits too.
"""

from __future__ import annotations

import faulthandler
import importlib
import logging
import signal
import sys
import threading
import time
from collections import deque
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from quire.engine import garbage, ipc
from quire.engine.log import set_up_logging
from quire.engine.verbs import WakeUp
from quire.engine.wire import Channel, ChannelClosedError, leave_with_parent, read_frame
from quire.errors import EngineError, QuireError, message_of
from quire.runtime.watch import COMMANDS, IDLE, ORDERS, SENDING, STEP, Watch, shared_page
from quire.types import Delta, Request, ScheduledBatch, failures

if TYPE_CHECKING:
    from quire.engine.api import Core, Made

log = logging.getLogger("quire.engine")

LAST_SECONDS = 2.0  # for the last frame of an engine that failed
JOB_POLL = 5  # milliseconds between looks at work beside the steps, while nothing else happens


def _load_maker(name: str) -> Any:
    """Import the module that starts a core: see `quire.client.maker`; tests use a scripted one."""
    return importlib.import_module(name)


def _read_launch(fd: int) -> ipc.Launch:
    frame = read_frame(fd)
    if frame is None and sys.argv[1:]:
        sys.exit()  # nobody needed this process
    if frame is None:
        raise EngineError("standard input ended before the launch frame: the server must start this process")
    return ipc.decode_launch(frame)


class EngineLoop:
    """Read commands, step, send updates, until a Stop arrives."""

    def __init__(
        self, core: Core, channel: Channel, stats_interval: float, page: memoryview | None = None
    ) -> None:
        self._core = core
        self._channel = channel
        self._stats_interval = stats_interval
        self._stats_due = 0.0
        self._calls: deque[ipc.Order] = deque()
        self._jobs: list[tuple[ipc.Order, Future[str]]] = []  # beside the steps; answered once they are done
        self._refused: list[Delta] = []
        self._scheduled: list[ipc.Scheduled] = []
        self._steps: list[ipc.StepTime] = []
        self._running = True
        self._watch = core.watch = Watch(page)
        core.on_batch = self._saw_batch
        core.on_step = self._saw_step

    def run(self) -> None:
        while self._running:
            self._drain()
            if self._calls:
                self._watch.enter(ORDERS)
                self._answer(self._calls.popleft())
            if self._jobs:
                self._answer_jobs()
            self._step()

    def _saw_batch(self, batch: ScheduledBatch) -> None:
        now = time.monotonic()
        self._scheduled += [ipc.Scheduled(new.request.id, new.index, now) for new in batch.new]

    def _saw_step(self, seconds: float, prompts: float) -> None:
        self._steps.append(ipc.StepTime(seconds, prompts))

    def _drain(self) -> None:
        """Read all waiting commands; block for one if there is nothing else to do."""
        if not (self._core.has_work or self._calls or self._refused):
            self._watch.enter(IDLE)
            self._channel.wait(0 if self._core.on_idle() else JOB_POLL if self._jobs else None)
        self._watch.enter(COMMANDS)
        for frame in self._channel.receive():
            if self._running:
                self._obey(ipc.decode_command(frame))

    def _obey(self, command: ipc.Command) -> None:
        if isinstance(command, ipc.Submit):
            for request in command.whole:
                self._add(request)
        elif isinstance(command, ipc.Abort):
            self._core.abort(command.request_id, command.index)
        elif isinstance(command, ipc.Order):
            self._calls.append(command)
        elif isinstance(command, ipc.Stop):
            self._running = False

    def _add(self, request: Request) -> None:
        """Queue a request. If even that fails, only this request ends."""
        try:
            self._core.add(request)
        except Exception as error:
            log.exception("request %s cannot be queued", request.id)
            self._refused += failures(request, error)

    def _answer(self, call: ipc.Order) -> None:
        try:
            result = self._core.do(call.verb)
        except Exception as error:
            if not isinstance(error, QuireError):
                log.exception("%s failed", type(call.verb).__name__)
            self._send(ipc.Reply(call.id, error=message_of(error)))
            return
        if isinstance(call.verb, WakeUp):
            garbage.keep()
        if isinstance(result, Future):
            self._jobs.append((call, result))
        else:
            self._send(ipc.Reply(call.id, stats=self._core.stats(), result=result))

    def _answer_jobs(self) -> None:
        """Answer the calls whose work beside the steps is done."""
        for call, job in [pair for pair in self._jobs if pair[1].done()]:
            self._jobs.remove((call, job))
            error = job.exception()
            if error is None:
                self._send(ipc.Reply(call.id, result=job.result()))
                continue
            if not isinstance(error, QuireError):
                log.error("%s failed", type(call.verb).__name__, exc_info=error)
            self._send(ipc.Reply(call.id, error=message_of(error)))

    def _step(self) -> None:
        if not (self._core.has_work or self._refused):
            return
        deltas, self._refused = self._refused, []
        self._watch.enter(STEP)
        deltas += self._core.step()
        self._watch.enter(SENDING)
        scheduled, self._scheduled = self._scheduled, []
        steps, self._steps = self._steps, []
        stats, now = None, time.monotonic()
        if now >= self._stats_due or not self._core.has_work:
            stats, self._stats_due = self._core.stats(), now + self._stats_interval
        if deltas or scheduled or stats is not None:
            self._send(ipc.Updates(deltas, scheduled, stats, steps))
        else:
            self._steps = steps  # they go with the next message

    def _send(self, event: ipc.Event) -> None:
        self._channel.send(ipc.encode(event))


def _serve(launch: ipc.Launch, channel: Channel) -> None:
    maker = _load_maker(launch.maker)
    channel.send(ipc.encode(ipc.Loading(time.monotonic())))
    started: Made = maker.start_core(launch.config)
    garbage.keep()
    garbage.collect_rarely()
    page = None if launch.page is None else shared_page(launch.page)
    loop = EngineLoop(started.core, channel, launch.stats_interval, page)
    channel.send(ipc.encode(ipc.EngineReady(started.info, started.report.phases, started.core.stats())))
    loop.run()


def _failure(error: Exception) -> ipc.EngineFailed:
    """Describe the error as the client reports it."""
    if isinstance(error, MemoryError):
        return ipc.EngineFailed(
            "MemoryError", f"out of memory: {error or 'an allocation failed'}; see `quire plan`"
        )
    return ipc.EngineFailed(type(error).__name__, str(error) or type(error).__name__)


def main() -> int:
    """Run the process; return 0 after a Stop, 1 if the engine failed (an EngineFailed frame gives the reason)."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the API process decides when this one ends
    if ahead := sys.argv[1:]:
        for name in ahead:
            importlib.import_module(name)
        garbage.keep()
    stdin = sys.stdin.fileno()
    launch = _read_launch(stdin)
    set_up_logging(launch.log_format, launch.log_level)
    faulthandler.register(signal.SIGUSR1)  # the API process asks a hung engine for its stacks
    threading.Thread(target=leave_with_parent, args=(stdin,), daemon=True).start()
    channel = Channel(launch.channel)
    try:
        _serve(launch, channel)
    except ChannelClosedError:
        return 1  # nobody is left to tell
    except Exception as error:
        if not isinstance(error, QuireError | MemoryError):
            log.exception("the engine failed")
        channel.send(ipc.encode(_failure(error)))
        channel.close(LAST_SECONDS)
        return 1
    channel.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
