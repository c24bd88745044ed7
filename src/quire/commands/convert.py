"""`quire convert`: a checkpoint divided among ranks, for builds on any machine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from quire.cli import Command, Options
from quire.config import EngineConfig, option
from quire.convert import convert_checkpoint
from quire.errors import ConfigError
from quire.flags.uses import CONVERTING


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertOptions(Options):
    """Options of `quire convert`."""

    output: str = option(
        "", "Directory to write; a conversion in it is replaced.", short="-o", writes="directory"
    )


def run(config: EngineConfig, options: ConvertOptions) -> None:
    if not options.output:
        raise ConfigError("name the directory to write: quire convert MODEL -o DIR")
    output = Path(options.output)
    manifest = convert_checkpoint(config, output)
    for path in sorted(output.glob("weights*.bin")):
        print(f"{path}: {path.stat().st_size / 1e6:,.1f} MB")
    print(
        f"{output}: {manifest.spec.architecture} for {manifest.ranks} rank{'s' if manifest.ranks > 1 else ''}"
    )


COMMAND = Command(run, ConvertOptions, arguments=("model",), uses=CONVERTING)
