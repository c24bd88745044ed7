"""Runs the server: start-up and its log, the listening socket, signals, draining."""

from __future__ import annotations

import logging
import os
import shlex
import socket
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import uvloop

from quire.config import EngineConfig
from quire.engine import garbage
from quire.engine.directory import SHIPPED_MODEL
from quire.engine.log import set_up_logging
from quire.errors import ConfigError
from quire.lazy import Lazy
from quire.serve import banner, served
from quire.serve.adapters import check_adapters
from quire.serve.banner import example_call
from quire.serve.errors import StoppedError
from quire.serve.extensions import configure_logging
from quire.serve.options import ServerConfig, for_serving
from quire.serve.served import Clock
from quire.serve.service import Service
from quire.serve.system_limits import check_limits
from quire.serve.tls import check_tls
from quire.serve.web import WebServer, listening, url_of

if TYPE_CHECKING:
    from fastapi import FastAPI

    from quire import meter
    from quire.engine import suggested
    from quire.ranks import node
    from quire.serve import records
    from quire.serve.many import server as several
else:
    several = Lazy("quire.serve.many.server")
    node = Lazy("quire.ranks.node")
    records = Lazy("quire.serve.records")
    suggested = Lazy("quire.engine.suggested")
    meter = Lazy("quire.meter")

log = logging.getLogger("quire.serve")

MAKER = "quire.client.start"
# Threads that work on large bodies give way to the event loop after SWITCH_SECONDS.
SWITCH_SECONDS = 0.001


def serve(
    engine_config: EngineConfig, config: ServerConfig, maker: str = MAKER, files: tuple[Path, ...] = ()
) -> int:
    """Serve until a signal; returns the exit status, 1 if the engine died for good.

    `maker` names the module that makes the engine. The log names the `files` that the options came from. A machine
    other than the first only runs its ranks.
    SIGTERM, SIGINT or SIGHUP: new requests are refused and running ones have `shutdown_timeout` seconds to finish; a
    second signal aborts them. Raises ConfigError and ModelError if the server cannot start.
    """
    if engine_config.parallel.node_rank:
        if config.check:
            raise ConfigError("--check starts the server, which is on machine 0: leave out --node-rank")
        set_up_logging(config.log_format, config.log_level)
        return node.run_node(engine_config)
    check_limits()
    sys.setswitchinterval(SWITCH_SECONDS)
    garbage.collect_rarely()
    engine_config = for_serving(engine_config)
    serving = several.serve if config.many else _serve
    if not banner.wanted(config):
        set_up_logging(config.log_format, config.log_level)
        configure_logging(config)
        for file in files:
            log.info("options of %s", file)
        return uvloop.run(serving(engine_config, config, maker))
    set_up_logging(config.log_format, "warning")
    configure_logging(config)
    try:
        return uvloop.run(serving(engine_config, config, maker, watched=True))
    finally:
        print(meter.CLEAR * meter.draws(), end="", file=sys.stderr)  # what the engine process drew


def _summary(service: Service, engine_config: EngineConfig) -> str:
    """Describe a server that is ready to listen."""
    stats, info, size = service.engine.metrics.stats, service.front.info, engine_config.cache.block_size
    tokens = stats.num_blocks * size
    return (
        f"{info.name}: ready to serve\n"
        f"  longest request   {info.max_model_len} tokens\n"
        f"  KV cache          {stats.num_blocks} blocks of {size}, {tokens} tokens\n"
        f"  longest requests  {tokens / info.max_model_len:.1f} at once\n"
        f"  served as         {', '.join(service.names)}"
    )


async def _serve(engine_config: EngineConfig, config: ServerConfig, maker: str, watched: bool = False) -> int:
    """Start, and listen unless the start is a check. If a person watches, the banner is printed then."""
    clock = Clock(time.monotonic() - _process_age())
    check_tls(config)
    check_adapters(engine_config, config)
    config.keys()
    service: Service | None = None
    try:
        with listening(config) as listener:
            clock.mark("imports and options")
            level = config.log_level if not watched else "warning"
            engine = served.make_engine(engine_config, config, maker, level)
            service, app = await served.start(engine, config, clock)
            if watched and not config.check:
                info, stats = service.front.info, service.metrics.stats
                shown = banner.lines(url_of(config, listener), config, engine_config, info, stats)
                print(shown, file=sys.stderr)
            server = _Server(service, app, listener, clock)
            if config.check:
                server.config.load()
                _ = service.front.template
                print(_summary(service, engine_config))
                return 0
            with records.recorded(service.names, url_of(config, listener), config.metrics_prefix):
                return await server.run()
    finally:
        if service is not None:
            await served.stop(service)


def _process_age() -> float:
    """Seconds since this process was started; 0 if the system does not tell (only Linux does)."""
    started = records.process_start(os.getpid())
    if started is None:
        return 0.0
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started / os.sysconf("SC_CLK_TCK")


class _Server(WebServer):
    """The server of one model: its requests run in the engine."""

    def __init__(self, service: Service, app: FastAPI, listener: socket.socket, clock: Clock) -> None:
        super().__init__(app, service.config, listener)
        self.background = service.background
        self._service = service
        self._clock = clock
        service.engine.on_dead = self.fail

    @property
    def num_live(self) -> int:
        return self._service.engine.num_live

    def drain(self) -> None:
        self._service.drain()

    def abort(self) -> None:
        self._service.engine.end_all(
            StoppedError("the server was stopped before this request finished: send it again")
        )

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._clock.mark("listening")
        self._clock.log("ready")
        config = self._service.config
        url = url_of(config, self.listener)
        log.info("serving %s at %s", self._service.name, url)
        if config.uds is None:
            log.info("the page is at %s/", url)
        banner.log_reach(log, config)
        log.info("try: %s", _curl(self._service, self.listener))
        if self._service.front.info.name == SHIPPED_MODEL:
            log.info("%s", suggested.advice("quire serve"))


def _curl(service: Service, listener: socket.socket) -> str:
    """Write a command that tries the server."""
    config = service.config
    url = url_of(config, listener)
    where = f"--unix-socket {config.uds} http://localhost" if config.uds is not None else url
    key = " -H 'Authorization: Bearer KEY'" if config.api_keys() else ""
    path, body = example_call(service)
    return f"curl {where}{path}{key} -H 'Content-Type: application/json' -d {shlex.quote(body)}"
