"""`quantize.py`: a checkpoint, calibrated and made smaller."""

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import quire.cli
from quire.config import EngineConfig, option
from quire.convert import convert_checkpoint
from quire.errors import ConfigError
from tensorrt_llm.options import QUANTIZING

# Methods of `quire quantize`, and what a conversion rounds to by itself.
WITHOUT_TEXT = ("fp8", "nvfp4")
METHODS = {"fp8": "fp8", "nvfp4": "nvfp4", "int4_awq": "awq", "int8_sq": "smoothquant"}
ROUNDED = {"int8_wo": "int8wo", "int4_wo": "int4wo", "full_prec": "auto"}


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizeArguments:
    """Options of `quantize.py`."""

    model_dir: str = option("", "Directory of a Hugging Face checkpoint.")
    output_dir: str = option("exported_model", "Directory to write.")
    qformat: Literal["full_prec", "fp8", "nvfp4", "int8_sq", "int4_awq", "int8_wo", "int4_wo"] = option(
        "full_prec", "Format of the weights; int8_sq has activations in 8 bits too."
    )
    export_format: Literal["tensorrt_llm", "hf"] = option(
        "tensorrt_llm", "What is written: a converted checkpoint, or one of Hugging Face's form."
    )
    dtype: str = option("auto", "Type of what is not quantized: float16, bfloat16, float32, auto.")
    tp_size: int = option(1, "Ranks that divide each layer.", low=1)
    calib_dataset: str | None = option(
        None, "Text file to calibrate with; by default a small one of Quire's own."
    )
    calib_size: int = option(512, "Pieces of the text.", low=1)
    calib_max_seq_length: int = option(512, "Tokens of a piece.", low=8)
    awq_block_size: int = option(128, "Columns that share a scale: AWQ.", low=16, high=1024)


def run(arguments: QuantizeArguments) -> None:
    if not arguments.model_dir:
        raise ConfigError("name the checkpoint: quantize.py --model_dir DIR")
    output, method = Path(arguments.output_dir), METHODS.get(arguments.qformat)
    if arguments.export_format == "hf":
        if method is None:
            raise ConfigError(
                f"--qformat {arguments.qformat} is rounded by a build: leave out --export_format hf"
            )
        _quantize(arguments, method, output)
        return
    with tempfile.TemporaryDirectory(prefix="quire-quantize-") as folder:
        model = arguments.model_dir
        if method is not None:
            model = f"{folder}/model"
            _quantize(arguments, method, Path(model))
        config = EngineConfig.from_options(
            model=model,
            dtype=arguments.dtype,
            tensor_parallel_size=arguments.tp_size,
            quantization=ROUNDED.get(arguments.qformat, "auto"),
        )
        convert_checkpoint(config, output)


def _quantize(arguments: QuantizeArguments, method: str, output: Path) -> None:
    words = ["quantize", arguments.model_dir, "-o", str(output), "--method", method]
    if method == "awq":
        words += ["--group-size", str(arguments.awq_block_size)]
    if method not in WITHOUT_TEXT:
        words += ["--samples", str(arguments.calib_size), "--sample-len", str(arguments.calib_max_seq_length)]
        if arguments.calib_dataset is not None:
            words += ["--calibration", arguments.calib_dataset]
    quire.cli.main(words)


COMMAND = quire.cli.Command(run, QuantizeArguments, uses=frozenset(), foreign=lambda: QUANTIZING.foreign)
PROGRAM = quire.cli.Program.single("quantize.py", __name__, "Quantize a checkpoint.")


def main(argv: list[str] | None = None) -> None:
    quire.cli.main(argv, PROGRAM)


if __name__ == "__main__":
    main()
