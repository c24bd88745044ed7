"""Starts a model that is served: its engine process, and the web application whose requests it answers."""

from __future__ import annotations

import asyncio
import importlib
import logging
import time
from functools import partial
from typing import TYPE_CHECKING

from quire.client.client import AsyncEngine, ClientOptions
from quire.client.grammar_check import GrammarChecker
from quire.client.maker import load_maker
from quire.client.metrics import Metrics
from quire.config import EngineConfig
from quire.engine.log import LogLevel
from quire.engine.verbs import Identify
from quire.serve.options import ServerConfig
from quire.serve.service import Service
from quire.types import UNKNOWN_MODEL

if TYPE_CHECKING:
    from fastapi import FastAPI

Served = tuple[Service, "FastAPI"]

log = logging.getLogger("quire.serve")


class Clock:
    """Times of a start by phase. Each phase is measured from the end of the last, so they add up to the total."""

    def __init__(self, began: float) -> None:
        self._last = began
        self.phases: dict[str, float] = {}

    def mark(self, name: str) -> None:
        """Attribute the time since the last mark to `name`."""
        now = time.monotonic()
        self.phases[name] = self.phases.get(name, 0.0) + now - self._last
        self._last = now

    def add(self, phases: dict[str, float], total: float) -> None:
        """Attribute `total` seconds since the last mark to `phases`."""
        for name, seconds in phases.items():
            self.phases[name] = self.phases.get(name, 0.0) + seconds
        self._last += total

    def log(self, what: str) -> None:
        """Log total and phases; the phases as shown add up to the total as shown, to the millisecond."""
        shown = {name: round(seconds, 3) for name, seconds in self.phases.items()}
        parts = ", ".join(f"{name} {seconds:.3f} s" for name, seconds in shown.items())
        log.info("%s in %.3f s: %s", what, sum(shown.values()), parts)


def make_engine(
    engine_config: EngineConfig, config: ServerConfig, maker: str, log_level: LogLevel
) -> AsyncEngine:
    """Make the engine of a model, which `start` starts."""
    options = ClientOptions(
        maker=maker,
        max_num_queued_reqs=config.max_num_queued_reqs,
        max_num_queued_tokens=config.max_num_queued_tokens,
        health_timeout=config.health_timeout,
        log_format=config.log_format,
        log_level=log_level,
    )
    return AsyncEngine(engine_config, options, Metrics("", config.metrics_prefix))


async def start(
    engine: AsyncEngine,
    config: ServerConfig,
    clock: Clock,
    make_app: str = "make_app",
    kept: Served | None = None,
) -> Served:
    """Start an engine, and its application, which `make_app` in quire.serve.app makes; `stop` ends both.

    The application that an earlier start `kept` serves again if no file of the model has changed. Raises ConfigError,
    ModelError or EngineError if the engine does not start.
    """
    make = partial(prepare, engine, config, make_app)
    # This process prepares itself while the engine process loads the model.
    preparing = None if kept else asyncio.create_task(asyncio.to_thread(make))
    try:
        info = await engine.start()
        clock.add(engine.startup.phases, engine.startup.total)
        identity = str(await engine.do(Identify()))
        clock.mark("identity of the weights")
        if kept is None or kept[0].identity != identity:
            kept = await (preparing or asyncio.to_thread(make))
        service, _ = kept
        service.front.info, service.identity = info, identity
        clock.mark("tokenizer and web framework")
        service.metrics.name_model(service.name, engine.config.cache, info.max_model_len)
        service.metrics.fingerprint = service.fingerprint(service.name)
        await service.adapters.load_given()
    except BaseException:
        if preparing is not None:
            await asyncio.gather(preparing, return_exceptions=True)  # its error, if any, has the same cause
        await engine.stop()
        raise
    return kept


async def stop(service: Service) -> None:
    """Abort all requests, and end the processes."""
    await service.grammars.close()
    await service.engine.stop()


def prepare(engine: AsyncEngine, config: ServerConfig, make_app: str = "make_app") -> Served:
    """Prepare everything that does not need the engine. Importing the web framework is slow, so only here."""
    maker, defaults = engine.options.maker, config.template_defaults
    front = load_maker(maker).start_front(engine.config, UNKNOWN_MODEL)
    front.template_defaults, front.content_format = defaults, config.chat_template_content_format
    service = Service(engine, front, config, GrammarChecker(engine.config, maker))
    return service, getattr(importlib.import_module("quire.serve.app"), make_app)(service)
