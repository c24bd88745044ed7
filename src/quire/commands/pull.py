"""`quire pull`: fetches a model of the hub, once it is known to be supported and to have room."""

from __future__ import annotations

from dataclasses import dataclass

from quire.cli import Command
from quire.config import EngineConfig
from quire.engine.directory import model_directory
from quire.errors import ConfigError
from quire.flags.uses import FILES


@dataclass(frozen=True, slots=True, kw_only=True)
class PullOptions:
    """`quire pull` has no options of its own."""


def run(config: EngineConfig, _: PullOptions) -> None:
    """Print the place of the model when it is there."""
    if not config.model.model:
        raise ConfigError("name the model: quire pull owner/name, or owner/name:Q4_K_M for a GGUF file")
    print(model_directory(config.model))


COMMAND = Command(run, PullOptions, arguments=("model",), uses=FILES)
