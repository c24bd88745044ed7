"""`trtllm-build`: a checkpoint, converted or not, becomes an engine directory."""

import logging
from dataclasses import dataclass
from pathlib import Path

import quire.cli
from quire.build import build_engine
from quire.config import EngineConfig, option
from quire.errors import ConfigError
from tensorrt_llm.builder import LIMITS, BuildConfig
from tensorrt_llm.options import BUILDING

log = logging.getLogger("quire")


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildArguments:
    """Options of `trtllm-build`."""

    checkpoint_dir: str = option(
        "", "Directory of a checkpoint: what convert_checkpoint.py wrote, or any other."
    )
    output_dir: str = option("engine_outputs", "Directory to write; one that holds an engine is replaced.")
    build_config: str | None = option(None, "JSON file with the options of a BuildConfig.")
    max_batch_size: int | None = option(None, "Most sequences that the engine runs at once.", low=1)
    max_input_len: int | None = option(None, "Longest prompt, in tokens.", low=1)
    max_seq_len: int | None = option(None, "Longest prompt plus output, in tokens.", low=1)
    max_decoder_seq_len: int | None = option(None, "Another name of --max_seq_len.", low=1)


def run(arguments: BuildArguments) -> None:
    if not arguments.checkpoint_dir:
        raise ConfigError("name the checkpoint: trtllm-build --checkpoint_dir DIR")
    config = (
        BuildConfig()
        if arguments.build_config is None
        else BuildConfig.from_json_file(arguments.build_config)
    )
    for name in LIMITS:
        if (value := getattr(arguments, name)) is not None:
            setattr(config, name, value)
    config.max_seq_len = config.max_seq_len or arguments.max_decoder_seq_len
    output = Path(arguments.output_dir)
    build_engine(EngineConfig.from_options(model=arguments.checkpoint_dir), output, config.limits())
    print(f"{output}: {sum(path.stat().st_size for path in output.iterdir()) / 1e6:,.1f} MB")


COMMAND = quire.cli.Command(run, BuildArguments, uses=frozenset(), foreign=lambda: BUILDING.foreign)
PROGRAM = quire.cli.Program.single("trtllm-build", __name__, "Build an engine from a checkpoint.")


def main(argv: list[str] | None = None) -> None:
    quire.cli.main(argv, PROGRAM)


if __name__ == "__main__":
    main()
