"""The module that makes an engine and its front, found by name: tests take a scripted one."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Protocol, cast

from quire.client.requests import Front
from quire.config import EngineConfig
from quire.types import ModelCard

if TYPE_CHECKING:
    from quire.engine.api import Made


class Maker(Protocol):
    """A module that makes the core of an engine and its front; tests replace it by a scripted one."""

    def start_core(self, config: EngineConfig) -> Made: ...
    def start_front(self, config: EngineConfig, info: ModelCard) -> Front: ...


def load_maker(name: str) -> Maker:
    """Import the maker module `name`."""
    return cast(Maker, importlib.import_module(name))
