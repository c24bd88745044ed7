"""Runs the engine for the API process: starts it, submits requests, receives deltas, restarts it when it dies.

Owns the engine process and the channel to it. Knows token ids only, no text and no HTTP.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

from quire.client.engine_process import EngineProcess, Spawned, Startup, died, spawn, startup_of
from quire.client.generation import Generation, Live
from quire.client.metrics import Metrics, RequestTimes
from quire.client.signs import SignsOfLife
from quire.config import EngineConfig
from quire.engine.ipc import (
    Abort,
    Command,
    EngineFailed,
    EngineReady,
    Event,
    Launch,
    Loading,
    Order,
    Reply,
    Stop,
    Submit,
    Updates,
    encode,
)
from quire.engine.log import LogFormat, LogLevel
from quire.engine.verbs import Ping, ResetPrefixCache, Result, Sleep, Verb, WakeUp
from quire.engine.wire import framed
from quire.errors import ConfigError, EngineError, ModelError, OverloadedError, QuireError, RequestError
from quire.shares import Pool
from quire.types import Delta, EngineStats, FinishReason, ModelCard, Request

log = logging.getLogger("quire.client")

MAX_FAILED_STARTS = 5
STACK_SECONDS = 0.2  # for a hung engine to print its stacks
_START_ERRORS: dict[str, type[QuireError]] = {"ConfigError": ConfigError, "ModelError": ModelError}


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientOptions:
    """Limits and timeouts of the client, in seconds; None is no limit."""

    maker: str = "quire.client.start"
    max_num_queued_reqs: int | None = None
    max_num_queued_tokens: int | None = None
    health_timeout: float = 30.0
    start_timeout: float = 600.0
    restart_delay: float = 0.2
    log_format: LogFormat = "text"
    log_level: LogLevel = "info"


State = Literal["starting", "ready", "restarting", "stopped"]


class AsyncEngine:
    """An engine in another process. Use from one event loop.

    Errors: OverloadedError if the queue is full or no engine is running; EngineError for requests that were in an
    engine when it died; ConfigError and ModelError from `start`.
    """

    def __init__(self, config: EngineConfig, options: ClientOptions, metrics: Metrics) -> None:
        self.config = config
        self.options = options
        self.metrics = metrics
        self.startup = Startup()
        self.state: State = "starting"
        self.sleeping = False
        self.num_resets = 0  # times that an operator emptied the prefix cache
        self.on_dead: Callable[[], None] | None = None
        self.spawn: Callable[[bool], Awaitable[Spawned]] = spawn
        self._engine: EngineProcess | None = None
        self._failure: str | None = None  # of the last engine, until another one runs
        self._live: dict[str, Live] = {}
        self._calls: dict[int, asyncio.Future[Reply]] = {}
        self._call_ids = itertools.count(1)
        self._queued = Pool(options.max_num_queued_reqs)
        self._queued_tokens = Pool(options.max_num_queued_tokens)
        self._last_event = 0.0
        self._signs: SignsOfLife | None = None
        self._tasks: list[asyncio.Task[None]] = []

    # --- life of the engine ----------------------------------------------------------------------------

    async def start(self) -> ModelCard:
        """Start the engine process and wait until it is ready. Raises the error that keeps it from starting."""
        info = await self._launch()
        self._tasks = [asyncio.create_task(self._supervise()), asyncio.create_task(self._heartbeat())]
        return info

    async def stop(self) -> None:
        """Abort all requests and end the engine process."""
        self.state = "stopped"
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.end_all(EngineError("the server was stopped before this request finished: send it again"))
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.send(Stop())
            await self._reap(engine, grace=2.0)
            self.metrics.ended()
            self.metrics.stats = EngineStats()

    @property
    def pid(self) -> int | None:
        """The id of the engine process, if it runs."""
        return None if self._engine is None else self._engine.process.pid

    @property
    def healthy(self) -> bool:
        """Whether the engine takes requests, and has made progress or replied within `health_timeout`."""
        return self.state == "ready" and time.monotonic() - self._last_event < self.options.health_timeout

    @property
    def condition(self) -> str:
        """Say why the engine is not healthy."""
        if self.state == "ready":
            silent, doing = time.monotonic() - self._last_event, self._doing
            return f"the engine has not answered for {silent:.0f} s, at its {doing}"
        return f"the engine is {self.state}" + ("" if self._failure is None else f" ({self._failure})")

    @property
    def _doing(self) -> str:
        return "start" if self._signs is None else self._signs.doing.cause

    @property
    def sign_of_life(self) -> object:
        """Return a value that differs from before if the engine has gone on; None: there is no engine."""
        return None if self._signs is None or self.state != "ready" else self._signs.seen()

    @property
    def silence(self) -> float:
        """Look at the engine; return the seconds since its last sign of life. An idle engine is asked for one."""
        return 0.0 if self._signs is None else self._signs.silence()

    @property
    def num_live(self) -> int:
        """Number of requests that are queued or running."""
        return len(self._live)

    @property
    def num_queued(self) -> int:
        """Number of requests that wait for their first step."""
        return self._queued.total

    async def _launch(self) -> ModelCard:
        began = time.monotonic()
        spawned = await self.spawn(self.config.parallel.world > 1)
        process, life, loop = spawned.process, spawned.life, asyncio.get_running_loop()
        _, engine = await loop.create_unix_connection(partial(EngineProcess, process), sock=spawned.ours)
        assert process.stdin is not None
        options = self.options
        launch = Launch(
            spawned.channel,
            options.maker,
            self.config,
            log_format=options.log_format,
            log_level=options.log_level,
            page=life.descriptor,
        )
        process.stdin.write(framed(encode(launch)))
        try:
            info = await asyncio.wait_for(self._until_ready(engine, began), options.start_timeout)
        except BaseException as error:
            await self._reap(engine, grace=0.0)
            if isinstance(error, asyncio.TimeoutError):
                raise EngineError(f"the engine did not start within {options.start_timeout:g} s") from error
            raise
        self._engine, self._failure, self._signs = engine, None, life
        engine.listen(partial(self._receive, engine))
        self.sleeping = False
        self._last_event = time.monotonic()
        self.state = "ready"
        return info

    async def _until_ready(self, engine: EngineProcess, began: float) -> ModelCard:
        loading = began
        ended = asyncio.create_task(engine.end())
        try:
            while True:
                found = asyncio.ensure_future(engine.events.get())
                await asyncio.wait({found, ended}, return_when=asyncio.FIRST_COMPLETED)
                if not found.done():
                    found.cancel()
                    self.metrics.killed(engine.killed_by)
                    raise EngineError(f"the engine process ended while starting ({engine.status})")
                event = found.result()
                if isinstance(event, Loading):
                    loading = event.at
                elif isinstance(event, EngineFailed):
                    raise _START_ERRORS.get(event.kind, EngineError)(event.message)
                elif isinstance(event, EngineReady):
                    self.metrics.stats = event.stats
                    self.startup = startup_of(began, loading, event.phases, time.monotonic())
                    return event.info
        finally:
            ended.cancel()

    async def _reap(self, engine: EngineProcess, grace: float) -> None:
        """Wait `grace` seconds for the process to end, then kill it."""
        try:
            await asyncio.wait_for(engine.process.wait(), grace)
        except asyncio.TimeoutError:
            if engine.process.returncode is None:
                engine.process.kill()
            await engine.process.wait()
        engine.close()

    async def _supervise(self) -> None:
        """Watch the engine process; when it dies, fail its requests and start another."""
        while True:
            engine = self._engine
            assert engine is not None
            await engine.end()
            why = engine.failure.message if engine.failure else engine.status
            log.error("the engine process ended (%s): starting another", why)
            self.state, self._engine, self._failure = "restarting", None, why
            engine.close()
            self.end_all(died(why))
            self.metrics.killed(engine.killed_by)
            self.metrics.ended()
            self.metrics.restarts += 1
            if not await self._restart():
                return

    async def _restart(self) -> bool:
        delay = self.options.restart_delay
        for attempt in range(MAX_FAILED_STARTS):
            try:
                await self._launch()
            except (QuireError, OSError) as error:
                log.error("start %d of %d failed: %s", attempt + 1, MAX_FAILED_STARTS, error)
                await asyncio.sleep(delay)
                delay *= 2
            else:
                log.info("the engine is ready again")
                return True
        self.state = "stopped"
        log.critical("the engine does not start: giving up")
        if self.on_dead is not None:
            self.on_dead()
        return False

    async def _heartbeat(self) -> None:
        """Ping the engine: its reply counts as progress. End one that gives no sign of life."""
        interval = min(1.0, self.options.health_timeout / 4)
        asked: asyncio.Future[Reply] | None = None
        while True:
            await asyncio.sleep(interval)
            if self.silence >= self.options.health_timeout and self.state == "ready":
                await self._end_hung()
            elif self.state == "ready" and (asked is None or asked.done()):
                asked = self._ask(Ping())
                asked.add_done_callback(lambda f: f.cancelled() or f.exception())

    async def _end_hung(self) -> None:
        """Log what a hung engine does, and kill it: `_supervise` starts another."""
        engine = self._engine
        if engine is None or engine.process.returncode is not None:
            return
        why = f"it gave no sign of life for {self.options.health_timeout:g} s, at its {self._doing}"
        log.error("the engine hangs: %s", why)
        engine.failure = EngineFailed("EngineError", why)
        engine.process.send_signal(signal.SIGUSR1)  # it prints its stacks
        await asyncio.sleep(STACK_SECONDS)
        if engine.process.returncode is None:
            engine.process.kill()

    # --- requests --------------------------------------------------------------------------------------

    def submit(self, requests: list[Request]) -> Generation:
        """Queue the requests of one call, all or none. Raises OverloadedError if they do not fit."""
        self._admit(requests)
        now = time.monotonic()
        generation = Generation(self, requests, [RequestTimes(request, now) for request in requests])
        going = []
        for request, times in zip(requests, generation.times, strict=True):
            if open_samples := set(request.open_samples):
                going.append(request)
                self._live[request.id] = Live(generation, times, open_samples)
                self._queued.add(request.owner, 1)
                self._queued_tokens.add(request.owner, request.weight)
        if going:
            self._send(Submit.of(going))
        return generation

    async def generate(self, request: Request) -> AsyncIterator[Delta]:
        """Yield the deltas of one request until all its samples have ended. Leaving early aborts it."""
        with self.submit([request]) as generation:
            while deltas := await generation.take():
                for delta in deltas:
                    yield delta

    def end_sample(self, request_id: str, index: int, reason: FinishReason) -> None:
        """Abort one sample and drop its pending deltas. Samples that have ended are ignored."""
        live = self._live.get(request_id)
        if live is None or index not in live.samples:
            return
        self._send(Abort(request_id, index))
        live.generation.sample_ended(request_id, index, discard=True)
        self._sample_over(live, index, reason)

    def forget(self, request_id: str, reason: FinishReason) -> None:
        """Abort the samples of a request that still run, and ignore their further deltas."""
        live = self._live.get(request_id)
        if live is None:
            return
        self._send(Abort(request_id))
        for index in list(live.samples):
            live.generation.sample_ended(request_id, index, discard=False)
            self._sample_over(live, index, reason)

    def abort_visibly(self, request_id: str) -> None:
        """End a request in the engine; its reader still gets what there is, and the reason "abort"."""
        if request_id in self._live:
            self._send(Abort(request_id))

    def live_times(self) -> list[RequestTimes]:
        """List times and counts of each request that is queued or running, oldest first."""
        return [live.times for live in self._live.values()]

    def stop_request(self, request_id: str, owner: str | None = None) -> bool:
        """End a live request (of an owner), and its call, with an error that says so. False if there is none."""
        if (live := self._live.get(request_id)) is None or owner not in (None, live.times.request.owner):
            return False
        live.generation.fail(EngineError("this request was stopped from the page"))
        return True

    async def stats(self, timeout: float = 1.0) -> EngineStats:
        """Fetch statistics, or return the last known ones if the engine does not reply in time."""
        if self.state == "ready":
            try:
                await asyncio.wait_for(self._ask(Ping()), timeout)
            except (asyncio.TimeoutError, EngineError):
                log.debug("the engine is busy or has ended: using its last statistics")
        return self.metrics.stats

    async def do(self, verb: Verb) -> Result:
        """Have the engine obey an operator's verb; returns its answer. EngineError if it cannot.

        From Sleep to WakeUp, requests are refused.
        """
        before = self.sleeping
        self.sleeping = before or isinstance(verb, Sleep)
        try:
            result = (await self._answered(verb)).result
        except BaseException:
            self.sleeping = before
            raise
        if isinstance(verb, Sleep | WakeUp):
            self.sleeping = bool(result)
        self.num_resets += isinstance(verb, ResetPrefixCache | Sleep)
        return result

    def _admit(self, requests: list[Request]) -> None:
        if self.state != "ready" or self.sleeping:
            self.metrics.rejections["engine_down"] += 1
            doing, then = "is starting", "try again in a moment"
            if self.state == "ready":
                doing, then = "sleeps", "POST /wake_up, or call wake_up, first"
            raise OverloadedError(f"the engine {doing}: {then}", retry_after=1)
        owner = next((request.owner for request in requests), "")
        for name, pool, more in (
            ("max-num-queued-reqs", self._queued, len(requests)),
            ("max-num-queued-tokens", self._queued_tokens, sum(request.weight for request in requests)),
        ):
            limit = pool.limit
            if limit is None or pool.has_room(owner, more):
                continue
            if more > limit:
                raise RequestError(
                    f"one call may queue at most {limit} (--{name}), this one asks for {more}", "prompt"
                )
            self.metrics.rejections["queue_full"] += 1
            full = f"the queue is full ({pool.total} of {limit}, --{name}): try again later"
            raise OverloadedError(full, retry_after=1)

    # --- messages from the engine ----------------------------------------------------------------------

    def _receive(self, engine: EngineProcess, event: Event) -> None:
        self._last_event = time.monotonic()
        if isinstance(event, Updates):
            self._stepped(event, self._last_event)
        elif isinstance(event, Reply):
            if event.stats is not None:
                self.metrics.stats = event.stats
            future = self._calls.pop(event.id, None)
            if future is not None and not future.done():
                future.set_result(event)
        elif isinstance(event, EngineFailed):
            engine.failure = event

    def _stepped(self, step: Updates, now: float) -> None:
        """Take the deltas of a step."""
        if step.stats is not None:
            self.metrics.stats = step.stats
        for took in step.steps:
            self.metrics.stepped(took.seconds, took.prompts)
        for mark in step.scheduled:
            live = self._live.get(mark.request_id)
            if live is not None:
                self.metrics.scheduled(live.times, mark.at)
                self._dequeue(live)
        known: list[tuple[RequestTimes, Delta]] = []
        owners: list[Generation] = []
        ended: list[tuple[Live, Delta]] = []
        for delta in step.deltas:
            live = self._live.get(delta.request_id)
            if live is None or delta.index not in live.samples:
                continue  # aborted by us meanwhile
            known.append((live.times, delta))
            owners.append(live.generation)
            if delta.finish_reason is not None:
                ended.append((live, delta))
        self.metrics.step(known, now)
        for generation, (_, delta) in zip(owners, known, strict=True):
            generation.put(delta)
        for live, delta in ended:
            assert delta.finish_reason is not None
            live.generation.sample_ended(delta.request_id, delta.index, discard=False)
            self._sample_over(live, delta.index, delta.finish_reason)

    def _sample_over(self, live: Live, index: int, reason: FinishReason) -> None:
        live.samples.discard(index)
        if live.samples:
            return
        self._dequeue(live)
        del self._live[live.times.request.id]
        self.metrics.end(live.times, reason, time.monotonic())

    def _dequeue(self, live: Live) -> None:
        if live.queued:
            live.queued = False
            request = live.times.request
            self._queued.add(request.owner, -1)
            self._queued_tokens.add(request.owner, -request.weight)

    def end_all(self, error: EngineError) -> None:
        """End every request and call with `error`."""
        for live in list(self._live.values()):
            self._send(Abort(live.times.request.id))
            for index in list(live.samples):
                live.generation.sample_ended(live.times.request.id, index, discard=False)
                self._sample_over(live, index, FinishReason.ERROR)
            live.generation.fail(error)
        calls, self._calls = self._calls, {}
        for future in [future for future in calls.values() if not future.done()]:
            future.set_exception(error)

    # --- the channel -----------------------------------------------------------------------------------

    def _send(self, command: Command) -> None:
        if self._engine is not None:  # else the engine that had the request has ended
            self._engine.send(command)

    def _ask(self, verb: Verb) -> asyncio.Future[Reply]:
        call = Order(next(self._call_ids), verb)
        future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._calls[call.id] = future
        self._send(call)
        return future

    async def _answered(self, verb: Verb) -> Reply:
        if self.state != "ready":
            raise OverloadedError("the engine is starting: try again in a moment", retry_after=1)
        reply = await self._ask(verb)
        if reply.error is not None:
            raise EngineError(reply.error)
        return reply
