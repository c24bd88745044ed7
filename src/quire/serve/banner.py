"""Shows a person at a terminal four lines once `quire serve` is ready. Logs serve everybody else."""

from __future__ import annotations

import json
import logging
import sys
from typing import TYPE_CHECKING, Any

from quire.config import EngineConfig
from quire.engine.directory import SHIPPED_MODEL
from quire.lazy import Lazy
from quire.serve.options import ServerConfig
from quire.serve.service import Service
from quire.serve.web_options import WebConfig
from quire.sockets import is_local
from quire.types import EngineStats, ModelCard

TEXT = "Once upon a time"


def example_call(service: Service) -> tuple[str, str]:
    """Choose an endpoint that the served model answers, and write a body for it."""
    info = service.front.info
    fields: dict[str, Any] = {"input": TEXT}
    if info.generates and service.front.template is not None:
        path, fields = "/v1/chat/completions", {"messages": [{"role": "user", "content": "Hello!"}]}
    elif info.generates:
        path, fields = "/v1/completions", {"prompt": TEXT}
    elif info.scores and len(info.labels) < 2:
        path, fields = "/v1/rerank", {"query": TEXT, "documents": ["there was a dog", "the train is late"]}
    elif info.scores:
        path = "/classify"
    else:
        path = "/pooling" if info.pooling == "all" else "/v1/embeddings"
    return path, json.dumps({"model": service.name, **fields})


if TYPE_CHECKING:
    from quire.engine import suggested
else:
    suggested = Lazy("quire.engine.suggested")

ONLY_HERE = "Only this machine can connect; --host 0.0.0.0 is for others."
OPEN_TO_ALL = "Anyone who can connect may use this server: set --api-key"


def wanted(config: ServerConfig) -> bool:
    """Whether a person watches: standard error is a terminal, and no other log was asked for."""
    return sys.stderr.isatty() and config.log_format == "text" and config.log_level == "info"


def reach(config: WebConfig) -> str:
    """Say who can connect, if that is this machine alone or, without a key, anyone."""
    if config.uds is not None:
        return ""
    if is_local(config.host):
        return ONLY_HERE
    return "" if config.api_keys() else OPEN_TO_ALL


def log_reach(log: logging.Logger, config: WebConfig) -> None:
    """Log who can connect; that anyone can is a warning."""
    if who := reach(config):
        log.log(logging.WARNING if who == OPEN_TO_ALL else logging.INFO, who)


def lines(url: str, config: ServerConfig, engine: EngineConfig, info: ModelCard, stats: EngineStats) -> str:
    """Describe the server in four lines, and the shipped model in one more."""
    tokens = stats.num_blocks * engine.cache.block_size
    return (
        f"Model         {', '.join(config.served_model_name or (info.name,))}\n"
        f"Memory        {tokens:,} tokens of KV cache; a request takes up to {info.max_model_len:,}\n"
        f"Page and API  {url}\n"
        f"Ctrl-C stops. {reach(config)}".rstrip()
        + (f"\n{suggested.advice('quire serve')}" if info.name == SHIPPED_MODEL else "")
    )
