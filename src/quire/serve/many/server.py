"""Runs a server of several models: its options, its socket, its end."""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
import time

from fastapi import FastAPI

from quire.client.client import AsyncEngine
from quire.config import EngineConfig
from quire.engine.plan import make_backend
from quire.errors import ConfigError, EngineError
from quire.serve import banner, records, served
from quire.serve.adapters import check_adapters
from quire.serve.app import add_handlers
from quire.serve.many.app import make_house
from quire.serve.many.entries import Sized, read_entries, sized
from quire.serve.many.house import House, Housed
from quire.serve.many.spare import Spare
from quire.serve.options import ServerConfig
from quire.serve.served import Served
from quire.serve.tls import check_tls
from quire.serve.web import WebServer, listening, url_of

log = logging.getLogger("quire.serve")


async def serve(engine: EngineConfig, config: ServerConfig, maker: str, watched: bool = False) -> int:
    """Serve the models that options list until a signal. ConfigError: an option or a model is at fault."""
    _check(engine, config)
    check_tls(config)
    config.keys()
    free = make_backend(engine.device).free_memory
    budget = int((config.models_memory or 0) * 1e9) or int(engine.cache.gpu_memory_utilization * free())
    level = "warning" if watched else config.log_level
    entries, spare = read_entries(config), Spare()

    def plan() -> list[Sized]:
        return [sized(entry, engine, config, budget) for entry in entries]

    def make(model: Sized) -> AsyncEngine:
        made = served.make_engine(model.engine, model.server, maker, level)
        made.spawn = spare.take
        return made

    async def start(model: Housed) -> Served:
        check_adapters(model.sized.engine, model.sized.server)
        clock = served.Clock(time.monotonic())
        found = await served.start(model.engine, model.sized.server, clock, "make_routes", model.kept)
        add_handlers(found[1])
        return found

    with listening(config) as listener:
        house = House(await asyncio.to_thread(plan), config, budget, make, start)
        url, names = url_of(config, listener), tuple(house.models)
        if config.check:
            print(f"{len(names)} models: ready to serve\n  served as  {', '.join(names)}")
            return 0
        server = _Server(house, make_house(house, config), config, listener)
        server.background.append(house.run)
        if watched:
            print(f"Models        {', '.join(names)}\nAPI           {url}\nCtrl-C stops.", file=sys.stderr)
        with records.recorded(names, url, config.metrics_prefix):
            try:
                return await server.run()
            finally:
                await house.close()
                await spare.close()


def _check(engine: EngineConfig, config: ServerConfig) -> None:
    """Refuse options that mean nothing to several models. ConfigError names one."""
    for wrong, what in (
        (engine.model.model, "the model on the command line"),
        (config.served_model_name, "--served-model-name, and give names in --models"),
        (config.router_api_key, "--router-api-key: quire route is for servers of one model each"),
        (config.data_parallel_size > 1, "--data-parallel-size"),
        (engine.parallel.world > 1, "--tensor-parallel-size and the like"),
    ):
        if wrong:
            raise ConfigError(f"several models are listed (--models and the like): leave out {what}")


class _Server(WebServer):
    """The server of several models."""

    def __init__(self, house: House, app: FastAPI, config: ServerConfig, listener: socket.socket) -> None:
        super().__init__(app, config, listener)
        self._house, self._options = house, config

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        log.info("serving %s at %s", ", ".join(self._house.models), url_of(self._options, self.listener))
        banner.log_reach(log, self._options)

    @property
    def num_live(self) -> int:
        return self._house.num_live

    def drain(self) -> None:
        self._house.drain()

    def abort(self) -> None:
        for model in self._house.loaded:
            model.serving[0].engine.end_all(
                EngineError("the server was stopped before this request finished")
            )
