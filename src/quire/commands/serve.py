"""`quire serve`: the server, until it is told to stop."""

from __future__ import annotations

from quire.cli import Command
from quire.config import EngineConfig
from quire.serve.options import ServerConfig, read_config
from quire.serve.server import serve


def run(config: EngineConfig, options: ServerConfig) -> None:
    status = serve(config, options)
    if status:
        raise SystemExit(status)


COMMAND = Command(run, ServerConfig, arguments=("model",), read_config=read_config)
