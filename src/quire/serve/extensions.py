"""Applies operators' additions to the server: middleware, their own logging, and paths that are not logged."""

from __future__ import annotations

import inspect
import json
import logging
import logging.config
from pathlib import Path
from typing import Any, cast

from fastapi import FastAPI
from starlette.middleware.base import BaseHTTPMiddleware

from quire.errors import ConfigError
from quire.logits_processor import load_object
from quire.serve.options import ServerConfig
from quire.serve.web_options import WebConfig


def add_middleware(app: FastAPI, config: ServerConfig) -> None:
    """Put the configured middleware around all endpoints, behind the check of keys. Raises ConfigError."""
    for name in config.middleware:
        found: Any = load_object(name, "--middleware")
        if inspect.isclass(found):
            app.add_middleware(cast(Any, found))
        elif inspect.iscoroutinefunction(found):
            app.add_middleware(BaseHTTPMiddleware, dispatch=found)
        else:
            raise ConfigError(
                f"--middleware {name!r} must be an ASGI class or an async function (request, call_next)"
            )


def configure_logging(config: WebConfig) -> None:
    """Apply --log-config-file and --disable-access-log-for-endpoints. Raises ConfigError."""
    if config.log_config_file is not None:
        try:
            logging.config.dictConfig(json.loads(Path(config.log_config_file).read_text("utf-8")))
        except (OSError, ValueError, TypeError, AttributeError, ImportError) as error:
            raise ConfigError(
                f"--log-config-file {config.log_config_file!r} cannot be used: {error}"
            ) from error
    paths = [
        path.strip() for path in (config.disable_access_log_for_endpoints or "").split(",") if path.strip()
    ]
    if paths:
        logging.getLogger("uvicorn.access").addFilter(PathFilter(frozenset(paths)))


class PathFilter(logging.Filter):
    """Drops uvicorn's access lines of some paths."""

    def __init__(self, paths: frozenset[str]) -> None:
        super().__init__()
        self._paths = paths

    def filter(self, record: logging.LogRecord) -> bool:
        args = record.args
        path = str(args[2]) if isinstance(args, tuple) and len(args) > 2 else ""
        return path.partition("?")[0] not in self._paths
