"""`convert_checkpoint.py`: a Hugging Face checkpoint, divided among ranks, in the form that a build reads."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import quire.cli
from quire.config import EngineConfig, option
from quire.convert import convert_checkpoint
from quire.errors import ConfigError
from tensorrt_llm.options import CONVERTING

# What weights are rounded to, by --weight_only_precision; the last three ask for a checkpoint of that kind.
PRECISIONS = {"int8": "int8wo", "int4": "int4wo", "int8_gptq": "gptq", "int4_gptq": "gptq", "int4_awq": "awq"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertArguments:
    """Options of `convert_checkpoint.py`."""

    model_dir: str = option("", "Directory of a Hugging Face checkpoint.")
    output_dir: str = option("tllm_checkpoint", "Directory to write; a conversion in it is replaced.")
    dtype: str = option("auto", "Type of the weights: float16, bfloat16, float32, auto.")
    tp_size: int = option(1, "Ranks that divide each layer.", low=1)
    use_weight_only: bool = option(False, "Round weights, and leave activations as they are.")
    weight_only_precision: Literal["int8", "int4", "int8_gptq", "int4_gptq", "int4_awq"] = option(
        "int8", "What --use_weight_only rounds to; gptq and awq are for checkpoints of that kind."
    )
    use_fp8: bool = option(False, "Round weights to FP8.")
    use_fp8_rowwise: bool = option(False, "The same: each row has a scale.")


def run(arguments: ConvertArguments) -> None:
    if not arguments.model_dir:
        raise ConfigError("name the checkpoint: convert_checkpoint.py --model_dir DIR")
    quantization = "fp8" if arguments.use_fp8 or arguments.use_fp8_rowwise else "auto"
    if arguments.use_weight_only:
        quantization = PRECISIONS[arguments.weight_only_precision]
    config = EngineConfig.from_options(
        model=arguments.model_dir,
        dtype=arguments.dtype,
        tensor_parallel_size=arguments.tp_size,
        quantization=quantization,
    )
    convert_checkpoint(config, Path(arguments.output_dir))
    for path in sorted(Path(arguments.output_dir).glob("weights*.bin")):
        print(f"{path}: {path.stat().st_size / 1e6:,.1f} MB")


COMMAND = quire.cli.Command(run, ConvertArguments, uses=frozenset(), foreign=lambda: CONVERTING.foreign)
PROGRAM = quire.cli.Program.single("convert_checkpoint.py", __name__, "Divide a checkpoint among ranks.")


def main(argv: list[str] | None = None) -> None:
    quire.cli.main(argv, PROGRAM)


if __name__ == "__main__":
    main()
