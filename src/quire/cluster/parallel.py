"""`quire serve --data-parallel-size N`: N servers on this machine as replicas of one router, which starts them."""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
from dataclasses import fields, replace

from quire.cluster.options import RouteConfig
from quire.cluster.route import route
from quire.config import EngineConfig
from quire.devices.registry import usable_threads
from quire.errors import ConfigError
from quire.serve import server
from quire.serve.options import ServerConfig
from quire.serve.web_options import WebConfig

log = logging.getLogger("quire.route")
LOOK_SECONDS = 0.5


def serve(engine: EngineConfig, config: ServerConfig) -> int:
    """Start the servers, and route to them until a signal; returns the exit status.

    They listen on socket files in a directory of this user's, and know a key that is drawn here and passed by pipe.
    """
    count = config.data_parallel_size
    if config.allow_runtime_lora:
        raise ConfigError(
            "--data-parallel-size: adapters come with --lora-modules, without --allow-runtime-lora"
        )
    if config.check:
        return server.serve(_share(engine, 0, count), replace(config, data_parallel_size=1))
    with tempfile.TemporaryDirectory(prefix="quire-") as folder:
        key, places = secrets.token_hex(32), [f"{folder}/{rank}" for rank in range(count)]
        web = {f.name: getattr(config, f.name) for f in fields(WebConfig)}
        own = RouteConfig(**web, replica=tuple(f"unix:{place}" for place in places), router_api_key=(key,))
        alone = {name: getattr(WebConfig(), name) for name in web if name.startswith("ssl_")}
        child = replace(
            config, data_parallel_size=1, router_api_key=(key,), api_key=(), admin_api_key=(), **alone
        )
        child = replace(child, enable_ssl_refresh=False, disable_uvicorn_access_log=True)

        def start(rank: int) -> subprocess.Popen[bytes]:
            # The terminal's signals are for the router, which ends its streams first.
            command = [sys.executable, "-m", "quire.cluster.parallel"]
            process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
            assert process.stdin is not None
            process.stdin.write(pickle.dumps((_share(engine, rank, count), replace(child, uds=places[rank]))))
            process.stdin.flush()
            return process

        running = [start(rank) for rank in range(count)]

        async def heal() -> None:
            while True:
                await asyncio.sleep(LOOK_SECONDS)
                for rank, process in enumerate(running):
                    if process.poll() is not None:
                        log.warning("server %d ended (%s): starting another", rank, process.returncode)
                        running[rank] = start(rank)

        try:
            return route(own, heal)
        finally:
            for process in running:
                process.terminate()
            for process in running:
                process.wait()


def _share(engine: EngineConfig, rank: int, count: int) -> EngineConfig:
    """The options of one of `count` engines: its share of threads and memory, its own GPU."""
    device = engine.device.of_rank(rank, count, usable_threads())
    cache, share = engine.cache, max(0.01, engine.cache.gpu_memory_utilization / count)
    if not device.device.startswith("cuda"):
        cache = replace(cache, gpu_memory_utilization=share)
    return replace(engine, device=device, cache=cache)


def _main() -> int:
    """Serve as the options say that the parent writes, until it says so, or has ended."""
    engine, config = pickle.load(sys.stdin.buffer)

    def watch() -> None:
        os.read(sys.stdin.fileno(), 1)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()
    return server.serve(engine, config)


if __name__ == "__main__":
    sys.exit(_main())
