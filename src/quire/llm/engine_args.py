"""`EngineArgs`: the options of an engine under vLLM's names, from Python or from a command line."""

from __future__ import annotations

import argparse
import logging
from dataclasses import fields
from typing import Any, TypeVar

from quire.config import SECTIONS, EngineConfig
from quire.flags.arguments import add_foreign, add_options
from quire.flags.foreign import take_foreign

log = logging.getLogger("quire")
A = TypeVar("A", bound="EngineArgs")


def engine_config(options: dict[str, Any]) -> EngineConfig:
    """The configuration that options ask for. Options of vLLM that change nothing here are named in the log.

    Raises ConfigError for one that is unknown, wrong, or would change a result.
    """
    given = {name: value for name, value in options.items() if value is not None}
    for notice in take_foreign(given):
        log.warning("%s", notice)
    return EngineConfig.from_options(**given)


class EngineArgs:
    """Options of an engine: every field of `quire.config`, and vLLM's that change nothing here. None is unset."""

    def __init__(self, model: str = "", **options: Any) -> None:
        self.options: dict[str, Any] = {"model": str(model), **options}
        self.create_engine_config()  # wrong options are found at once

    def __getattr__(self, name: str) -> Any:
        options = self.__dict__.get("options", {})
        if name not in options:
            raise AttributeError(f"{type(self).__name__} has no option {name!r}")
        return options[name]

    def create_engine_config(self, **ignored: Any) -> EngineConfig:
        return engine_config({name: v for name, v in self.options.items() if name not in SERVER_OPTIONS})

    @classmethod
    def add_cli_args(cls, parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        """Add the flags of all options to a parser."""
        for section in SECTIONS.values():
            add_options(parser, section)
        add_options(parser, EngineConfig, only=("seed",))
        add_foreign(parser)
        return parser

    @classmethod
    def from_cli_args(cls: type[A], args: argparse.Namespace) -> A:
        """The options that a parser with `add_cli_args` has read. Its other arguments are left alone."""
        names = {f.name for section in SECTIONS.values() for f in fields(section)} | {"seed"}
        return cls(**{name: value for name, value in vars(args).items() if name in names})


SERVER_OPTIONS = ("enable_log_requests", "disable_log_requests", "log_level")


class AsyncEngineArgs(EngineArgs):
    """The same for `AsyncLLM`."""
