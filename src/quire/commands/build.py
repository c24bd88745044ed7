"""`quire build`: a checkpoint packed for this machine and written to a directory that starts at once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from quire.build import build_engine
from quire.cli import Command, Options
from quire.commands.inspect import show
from quire.config import SECTIONS, EngineConfig, option
from quire.devices.registry import on_cpu
from quire.errors import ConfigError
from quire.flags.uses import AHEAD, BUILDING
from quire.model.info import EngineLimits


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildOptions(Options):
    """Options of `quire build`; the limits' names are TensorRT-LLM's."""

    target: str = option(
        "", "Architecture of the GPU to build for, with --device cuda; by default this one's."
    )
    output: str = option(
        "", "Directory to write; one that holds an engine is replaced.", short="-o", writes="directory"
    )
    max_batch_size: int | None = option(None, "Most sequences that the engine runs at once.", low=1)
    max_input_len: int | None = option(None, "Longest prompt, in tokens.", low=1)
    max_seq_len: int | None = option(None, "Longest prompt plus output, in tokens.", low=1)


def run(config: EngineConfig, options: BuildOptions) -> None:
    if not options.output:
        raise ConfigError("name the directory to write: quire build MODEL -o DIR")
    if on_cpu(config.device.device, config.device.backend) and (given := _given_ahead(config)):
        raise ConfigError(
            f"--{given[0].replace('_', '-')} sets what a GPU's kernels are compiled for: give it to the command that "
            "serves, or build with --device cuda"
        )
    limits = EngineLimits(
        max_batch_size=options.max_batch_size,
        max_input_len=options.max_input_len,
        max_seq_len=options.max_seq_len or config.model.max_model_len,
    )
    show(options.output, build_engine(config, Path(options.output), limits, target=options.target))


def _given_ahead(config: EngineConfig) -> list[str]:
    """List the options of AHEAD that are not as they are by default."""
    plain = EngineConfig.from_options(device="cpu")
    pairs = [(getattr(config, section), getattr(plain, section)) for section in SECTIONS]
    return sorted(n for a, b in pairs for n in AHEAD if getattr(a, n, None) != getattr(b, n, None))


COMMAND = Command(run, BuildOptions, arguments=("model",), uses=BUILDING)
