"""The engine itself, with steps so slow that each token has an event of its own."""

from __future__ import annotations

import time

from quire.client import start
from quire.client.requests import Front
from quire.config import EngineConfig
from quire.engine.start import Started
from quire.types import Delta, ModelCard

SECONDS = 0.005


def start_core(config: EngineConfig) -> Started:
    started = start.start_core(config)
    step = started.core.step

    def slowly() -> list[Delta]:
        time.sleep(SECONDS)
        return step()

    started.core.step = slowly  # type: ignore[method-assign]
    return started


def start_front(config: EngineConfig, info: ModelCard) -> Front:
    return start.start_front(config, info)
