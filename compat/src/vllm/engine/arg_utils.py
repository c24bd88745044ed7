"""Options of an engine, from Python or from a command line, with vLLM's share of memory."""

from __future__ import annotations

import argparse
from dataclasses import fields
from typing import Any, TypeVar

from quire.config import SECTIONS, EngineConfig
from quire.flags.arguments import add_foreign, add_options
from quire.flags.table import engine_flags
from quire.llm.options import engine_config
from vllm.config.model import ModelConfig

DEFAULTS = {"gpu_memory_utilization": 0.9}
# Arguments of vLLM's servers that scripts hand on.
SERVER_OPTIONS = ("enable_log_requests", "disable_log_requests", "log_level")
A = TypeVar("A", bound="EngineArgs")


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
        options = {name: v for name, v in self.options.items() if name not in SERVER_OPTIONS}
        return engine_config(options, DEFAULTS)

    def create_model_config(self) -> ModelConfig:
        config = self.create_engine_config()
        return ModelConfig.of(config, config.model.max_model_len or 0)

    @classmethod
    def add_cli_args(cls, parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        """Add the flags of all options to a parser."""
        for section in SECTIONS.values():
            add_options(parser, section, defaults=DEFAULTS)
        add_options(parser, EngineConfig, only=("seed",))
        add_foreign(parser, engine_flags())
        return parser

    @classmethod
    def from_cli_args(cls: type[A], args: argparse.Namespace) -> A:
        """Take the options that a parser with `add_cli_args` has read, and leave its other arguments alone."""
        names = {f.name for section in SECTIONS.values() for f in fields(section)} | {"seed"}
        return cls(**{name: value for name, value in vars(args).items() if name in names})


class AsyncEngineArgs(EngineArgs):
    """Options of an `AsyncLLM`."""


__all__ = ["DEFAULTS", "AsyncEngineArgs", "EngineArgs"]
