"""`quire serve`: the server, until it is told to stop."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from quire.cli import Command
from quire.config import EngineConfig
from quire.lazy import Lazy
from quire.serve.options import ServerConfig

if TYPE_CHECKING:
    from quire.cluster import parallel
    from quire.serve import server
else:
    parallel, server = Lazy("quire.cluster.parallel"), Lazy("quire.serve.server")


def run(config: EngineConfig, options: ServerConfig, files: tuple[Path, ...]) -> None:
    if options.data_parallel_size > 1 and not options.many:
        status = parallel.serve(config, options)
    else:
        status = server.serve(config, options, files=files)
    if status:
        raise SystemExit(status)


COMMAND = Command(run, ServerConfig, arguments=("model",), told_files=True)
