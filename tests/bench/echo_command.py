"""A command that keeps the configuration it was given."""

from __future__ import annotations

from dataclasses import dataclass

from quire.cli import Command
from quire.config import EngineConfig

given: list[EngineConfig] = []


@dataclass(frozen=True, slots=True)
class NoOptions:
    pass


def run(config: EngineConfig, _: NoOptions) -> None:
    given.append(config)


COMMAND = Command(run, NoOptions)
