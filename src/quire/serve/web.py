"""The listening socket, and uvicorn with signals that drain it: what every server of HTTP runs on."""

from __future__ import annotations

import asyncio
import errno
import functools
import logging
import signal
import socket
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from quire.errors import ConfigError, ResourceError
from quire.serve.access import AccessLog
from quire.serve.connection import Connection, Room
from quire.serve.stream import Direct
from quire.serve.system_limits import raise_descriptor_limit
from quire.serve.tls import refresh_tls
from quire.serve.web_options import WebConfig

log = logging.getLogger("quire.serve")

BACKLOG = 2048
# Seconds to send the last answers after all requests have ended.
FLUSH_SECONDS = 5
# The same signal again within this many seconds is the same wish: `docker stop` and shells may send it twice.
SAME_SIGNAL_SECONDS = 1.0

Job = Callable[[], Coroutine[Any, Any, None]]


class WebServer(uvicorn.Server):
    """uvicorn with signals that drain it. Subclasses say which requests run and how they end."""

    def __init__(self, app: ASGIApp, config: WebConfig, listener: socket.socket) -> None:
        super().__init__(
            uvicorn.Config(
                AccessLog(Direct(app), not config.disable_uvicorn_access_log),
                http=functools.partial(Connection, room=Room(raise_descriptor_limit())),  # type: ignore[arg-type]
                proxy_headers=False,
                ws="none",
                loop="none",
                lifespan="off",
                log_config=None,
                log_level=config.uvicorn_log_level,
                access_log=not config.disable_uvicorn_access_log,
                server_header=False,
                backlog=BACKLOG,
                ssl_keyfile=config.ssl_keyfile,
                ssl_certfile=config.ssl_certfile,
                ssl_ca_certs=config.ssl_ca_certs,
                ssl_cert_reqs=config.ssl_cert_reqs,
                ssl_ciphers=config.ssl_ciphers or "DEFAULT",
                h11_max_incomplete_event_size=config.h11_max_incomplete_event_size,
                timeout_keep_alive=config.timeout_keep_alive,
                timeout_graceful_shutdown=FLUSH_SECONDS,
            )
        )
        self.listener = listener
        self.background: list[Job] = []  # run for the life of the server
        self._web = config
        self._drain: asyncio.Task[None] | None = None
        self._last_signal = (0, 0.0)  # number and time
        self._failed = False

    @property
    def num_live(self) -> int:
        """Count the requests that run."""
        raise NotImplementedError

    def drain(self) -> None:
        """Refuse new requests from now on."""
        raise NotImplementedError

    def abort(self) -> None:
        """End all requests with an error."""
        raise NotImplementedError

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Replaces uvicorn's: the first signal drains, the second stops at once."""
        loop = asyncio.get_running_loop()
        numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
        for number in numbers:
            loop.add_signal_handler(number, self._on_signal, number)
        try:
            yield
        finally:
            for number in numbers:
                loop.remove_signal_handler(number)

    async def run(self) -> int:  # type: ignore[override]
        """Serve until a signal or `fail`; returns the exit status."""
        tasks = [asyncio.get_running_loop().create_task(job()) for job in self.background]
        if not self.config.loaded:
            self.config.load()
        if self._web.enable_ssl_refresh and self.config.ssl is not None:
            tasks.append(asyncio.get_running_loop().create_task(refresh_tls(self._web, self.config.ssl)))
        await self.serve([self.listener])
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return 1 if self._failed else 0

    def fail(self) -> None:
        """Stop with exit status 1."""
        self._failed = True
        self._end_all()

    def _on_signal(self, number: int) -> None:
        (last, at), now = self._last_signal, time.monotonic()
        self._last_signal = (number, now)
        if number == last and now - at < SAME_SIGNAL_SECONDS:
            return
        if self._drain is None:
            self.drain()
            seconds = self._web.shutdown_timeout
            log.info(
                "%s: no new requests; %d running have %g s to finish (a second signal aborts them)",
                signal.Signals(number).name,
                self.num_live,
                seconds,
            )
            self._drain = asyncio.get_running_loop().create_task(self._finish(seconds))
        else:
            log.warning("%s: stopping now", signal.Signals(number).name)
            self._end_all()
            self.force_exit = True

    async def _finish(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while self.num_live and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        self._end_all()

    def _end_all(self) -> None:
        if self.num_live:
            log.warning("the shutdown aborts %d requests", self.num_live)
        self.abort()
        self.should_exit = True


@contextmanager
def listening(config: WebConfig) -> Iterator[socket.socket]:
    """Bind the socket first, so that a port in use is reported before anything is loaded."""
    listener = _listen(config)
    try:
        yield listener
    finally:
        listener.close()
        if config.uds is not None:
            Path(config.uds).unlink(missing_ok=True)


def _listen(config: WebConfig) -> socket.socket:
    if config.uds is not None:
        return _listen_unix(config.uds)
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError(f"--host {config.host!r} is not an address of this machine: {error}") from error
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
    except OSError as error:
        listener.close()
        at_fault = f"--host {config.host}" if error.errno == errno.EADDRNOTAVAIL else f"--port {config.port}"
        raise ResourceError(f"cannot listen: {error.strerror}; change {at_fault}") from error
    return listener


def _listen_unix(path: str) -> socket.socket:
    """A Unix socket at `path`; replaces one without a listener."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if Path(path).is_socket():
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
                if probe.connect_ex(path) == 0:
                    raise ResourceError(f"--uds {path!r}: another server is listening there")
            Path(path).unlink()
        listener.bind(path)
    except OSError as error:
        listener.close()
        raise ConfigError(f"--uds {path!r} cannot be used: {error.strerror}") from error
    except ConfigError:
        listener.close()
        raise
    return listener


def url_of(config: WebConfig, listener: socket.socket) -> str:
    if config.uds is not None:
        return f"unix:{config.uds}"
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    return f"{'https' if config.ssl_certfile else 'http'}://{shown}:{port}"
