"""The models of a server, each in an engine process of its own: loads and unloads them as `residents` decides."""

from __future__ import annotations

import asyncio
import gc
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from fastapi.dependencies import models as dependencies

from quire.client.client import AsyncEngine
from quire.errors import QuireError
from quire.serve.adapters import CONFIG, NAME, read_modules
from quire.serve.errors import ErrorInfo, HttpError, invalid, not_found, unavailable
from quire.serve.many.entries import Sized
from quire.serve.many.residents import Resident, Residents
from quire.serve.options import ServerConfig
from quire.serve.served import Served, stop

log = logging.getLogger("quire.serve")

RETRY = 5.0  # seconds until a model that failed to load is tried again
RETRY_AFTER = 5  # seconds that a request is told to wait that found no room
KEPT = 8  # models that are not loaded, whose tokenizers and applications are kept for their next turn


@dataclass(slots=True)
class Housed:
    """A listed model, what serves it while it is loaded, and why it was not loaded the last time.

    What served it is `kept` for the next time.
    """

    sized: Sized
    engine: AsyncEngine
    served: Served | None = None
    kept: Served | None = None
    waiters: list[asyncio.Future[None]] = field(default_factory=list)
    cause: str | None = None
    retry: float = 0.0
    tasks: list[asyncio.Task[None]] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.sized.entry.name

    def has_adapter(self, name: str) -> bool:
        """Whether the model has an adapter of this name, or would load it for a request."""
        if self.served is not None and self.served[0].adapters.loaded.find(name) is not None:
            return True
        config = self.sized.server
        folder = None if config.lora_dir is None else Path(config.lora_dir).expanduser()
        given = any(name == module.name for module in read_modules(config.lora_modules))
        return given or (
            folder is not None and bool(NAME.fullmatch(name)) and (folder / name / CONFIG).is_file()
        )

    @property
    def serving(self) -> Served:
        """The service and the application of a loaded model."""
        assert self.served is not None
        return self.served

    def end_waiters(self, error: Exception) -> None:
        """End the requests that wait."""
        for waiter in self.waiters:
            if not waiter.done():
                waiter.set_exception(error)
        self.waiters.clear()


class House:
    """All models of a server. For one event loop; `run` does the work."""

    def __init__(
        self,
        models: list[Sized],
        config: ServerConfig,
        budget: int,
        make: Callable[[Sized], AsyncEngine],
        start: Callable[[Housed], Awaitable[Served]],
    ) -> None:
        self.models = {model.entry.name: Housed(model, make(model)) for model in models}
        self._named = {
            name: model for model in self.models.values() for name in (model.name, *model.sized.entry.aliases)
        }
        self.residents = Residents(
            [Resident(m.entry.name, m.size, m.entry.pin, m.entry.weight) for m in models],
            budget,
            most=config.models_max or None,
            quantum=config.models_turn,
            idle=config.models_idle,
        )
        self.draining, self.created = False, int(time.time())
        self._config, self._start = config, start
        self.changed = asyncio.Event()
        self._jobs: set[asyncio.Task[None]] = set()
        self._kept: list[Housed] = []  # the last one unloaded is last

    @property
    def loaded(self) -> list[Housed]:
        """All models that are loaded, in the order of the list."""
        return [model for model in self.models.values() if model.served is not None]

    @property
    def num_live(self) -> int:
        """Count the requests that run or wait."""
        return sum(model.running + model.waiting for model in self.residents.models.values())

    def find(self, name: Any) -> Housed:
        """Find the model that has this name, or an adapter of this name. HttpError 400 or 404: there is none."""
        known = ", ".join(self.models)
        if name is None:
            raise invalid(f"model is required: this server has {known}", "model", "invalid_value")
        if isinstance(name, str):
            if named := self._named.get(name):
                return named
            for model in self.models.values():
                if model.has_adapter(name):
                    return model
        said = f"The model `{name!s:.100}` does not exist; this server has {known}."
        raise not_found(said, "model", "model_not_found")

    async def enter(self, model: Housed) -> Served:
        """Wait until the model serves a request, which ends with `exit`. HttpError: it does not within the bound."""
        now, limit = time.monotonic(), self._config.max_num_queued_reqs
        if self.draining:
            raise shutting_down()
        if model.served is None and now < model.retry:
            raise failed(model.name)
        if limit is not None and len(model.waiters) >= limit:
            raise unavailable(f"too many requests wait for the model {model.name}", RETRY_AFTER)
        if not self.residents.ask(model.name, now):
            await self._wait(model)
        return model.serving

    async def _wait(self, model: Housed) -> None:
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        model.waiters.append(waiter)
        self.changed.set()
        seconds = self._config.models_wait
        try:
            await asyncio.wait_for(waiter, seconds)
        except BaseException as error:
            if waiter in model.waiters:
                model.waiters.remove(waiter)
                self.residents.leave(model.name)
                self.changed.set()
            elif not waiter.cancelled() and waiter.exception() is None:  # it was let run at the same time
                self.exit(model)
            if isinstance(error, asyncio.TimeoutError):
                late = f"the model {model.name} found no room within {seconds:g} s (--models-wait)"
                raise unavailable(late, RETRY_AFTER) from None
            raise

    def exit(self, model: Housed) -> None:
        """End a request that `enter` let run."""
        self.residents.done(model.name, time.monotonic())
        self.changed.set()

    async def load(self, model: Housed) -> None:
        """Load a model as a request would."""
        await self.enter(model)
        self.exit(model)

    async def run(self) -> None:
        """Carry out what is decided, until cancelled."""
        for model in self.models.values():
            if model.sized.entry.start or model.sized.entry.pin:
                self._spawn(self.load(model))
        while True:
            self.changed.clear()
            now = time.monotonic()
            while (action := self.residents.next(now)) is not None:
                model = self.models[action.name]
                if action.verb == "open":
                    self._open(model)
                else:
                    self._spawn(self._load(model) if action.verb == "load" else self._unload(model))
            due = self.residents.due(now)
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self.changed.wait(), None if due is None else due - now)

    def drain(self) -> None:
        """Take no more requests; those that wait get an error."""
        self.draining = True
        for model in self.models.values():
            for _ in model.waiters:
                self.residents.leave(model.name)
            model.end_waiters(shutting_down())
        for model in self.loaded:
            model.serving[0].drain()

    async def close(self) -> None:
        """Unload everything."""
        self.drain()
        for job in self._jobs:
            job.cancel()
        await asyncio.gather(*self._jobs, return_exceptions=True)
        await asyncio.gather(*(self._stop(model) for model in self.loaded))

    def _spawn(self, job: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(job)
        self._jobs.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, job: asyncio.Task[None]) -> None:
        self._jobs.discard(job)
        if not job.cancelled() and not isinstance(error := job.exception(), HttpError | None):
            log.error("unexpected error", exc_info=error)

    async def _load(self, model: Housed) -> None:
        began = time.monotonic()
        try:
            served = await self._start(model)
        except Exception as error:
            unexpected = None if isinstance(error, QuireError | OSError) else error
            log.error("the model %s cannot be loaded: %s", model.name, error, exc_info=unexpected)
            model.cause, model.retry = str(error), time.monotonic() + RETRY
            self.residents.failed(model.name)
            model.end_waiters(failed(model.name))
        else:
            model.served, model.cause = served, None
            model.engine.on_dead = partial(self._lost, model)
            model.tasks = [asyncio.get_running_loop().create_task(job()) for job in served[0].background]
            log.info("loaded %s in %.3f s", model.name, time.monotonic() - began)
            self.residents.loaded(model.name, time.monotonic())
            self._open(model)
        self.changed.set()

    def _open(self, model: Housed) -> None:
        """Let the requests run that wait."""
        for waiter in model.waiters:
            if waiter.done():  # cancelled
                self.exit(model)
            else:
                waiter.set_result(None)
        model.waiters.clear()

    async def _unload(self, model: Housed) -> None:
        await self._stop(model)
        log.info("unloaded %s", model.name)
        self.residents.unloaded(model.name)
        self.changed.set()

    async def _stop(self, model: Housed) -> None:
        model.kept, model.served = model.serving, None
        while model.tasks:
            model.tasks.pop().cancel()
        await stop(model.kept[0])
        self._kept = [*(one for one in self._kept if one is not model), model]
        if len(self._kept) > KEPT:
            self._kept.pop(0).kept = None
            for remembered in vars(dependencies).values():  # FastAPI remembers handlers, which hold it all
                getattr(remembered, "cache_clear", bool)()
            gc.collect()  # an application is full of cycles

    def _lost(self, model: Housed) -> None:
        """Forget a model whose engine does not start again."""
        model.cause, model.retry = "its engine does not start again", time.monotonic() + RETRY
        self.residents.died(model.name)
        self._spawn(self._unload(model))


def shutting_down() -> HttpError:
    return unavailable("the server is shutting down: send this request to another")


def failed(name: str) -> HttpError:
    """Make the error of requests to a model that cannot be loaded."""
    message = f"the model {name} cannot be loaded: an operator finds the cause in /v1/models and in the log"
    info = ErrorInfo(message, "engine_error", "model", "model_not_loaded")
    return HttpError(500, info, {"Retry-After": str(RETRY_AFTER)})
