"""`EngineArgs`: the options of an engine under vLLM's names, from Python or from a command line."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Mapping
from dataclasses import fields
from types import MappingProxyType
from typing import Any, ClassVar, TypeVar

from quire.config import SECTIONS, EngineConfig
from quire.flags.arguments import add_foreign, add_options
from quire.flags.foreign import take_foreign

log = logging.getLogger("quire")
A = TypeVar("A", bound="EngineArgs")


def engine_config(
    options: Mapping[str, Any], defaults: Mapping[str, Any] = MappingProxyType({})
) -> EngineConfig:
    """The configuration that options ask for, None being unset; `defaults` replace Quire's.

    Options of vLLM that change nothing here are named in the log. Raises ConfigError for one that is unknown, wrong, or
    would change a result.
    """
    given = {**defaults, **{name: value for name, value in options.items() if value is not None}}
    for notice in take_foreign(given):
        log.warning("%s", notice)
    return EngineConfig.from_options(**given)


class EngineArgs:
    """Options of an engine: every field of `quire.config`, and vLLM's that change nothing here. None is unset.

    A subclass may have other `defaults` than Quire.
    """

    defaults: ClassVar[Mapping[str, Any]] = MappingProxyType({})

    def __init__(self, model: str = "", **options: Any) -> None:
        self.options: dict[str, Any] = {"model": str(model), **options}
        self.create_engine_config()  # wrong options are found at once

    def __getattr__(self, name: str) -> Any:
        options = self.__dict__.get("options", {})
        if name not in options:
            raise AttributeError(f"{type(self).__name__} has no option {name!r}")
        return options[name]

    def create_engine_config(self, **ignored: Any) -> EngineConfig:
        options = {name: v for name, v in self.options.items() if name not in SERVER_OPTIONS}
        return engine_config(options, self.defaults)

    @classmethod
    def add_cli_args(cls, parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        """Add the flags of all options to a parser."""
        for section in SECTIONS.values():
            add_options(parser, section, defaults=cls.defaults)
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
