"""`quire build`: a checkpoint packed for this machine and written to a directory that starts at once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from quire.build import build_engine
from quire.cli import Command
from quire.commands.inspect import show
from quire.config import EngineConfig, check_options, option
from quire.errors import ConfigError
from quire.flags.uses import BUILDING
from quire.model.info import EngineLimits


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildOptions:
    """Options of `quire build`; the limits' names are TensorRT-LLM's."""

    output: str = option(
        "", "Directory to write; one that holds an engine is replaced.", short="-o", writes="directory"
    )
    max_batch_size: int | None = option(None, "Most sequences that the engine runs at once.", low=1)
    max_input_len: int | None = option(None, "Longest prompt, in tokens.", low=1)
    max_seq_len: int | None = option(None, "Longest prompt plus output, in tokens.", low=1)

    def __post_init__(self) -> None:
        check_options(self)


def run(config: EngineConfig, options: BuildOptions) -> None:
    if not options.output:
        raise ConfigError("name the directory to write: quire build MODEL -o DIR")
    limits = EngineLimits(
        max_batch_size=options.max_batch_size,
        max_input_len=options.max_input_len,
        max_seq_len=options.max_seq_len or config.model.max_model_len,
    )
    show(options.output, build_engine(config, Path(options.output), limits))


COMMAND = Command(run, BuildOptions, arguments=("model",), uses=BUILDING)
