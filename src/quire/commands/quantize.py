"""`quire quantize`: a float checkpoint made smaller, in a format that other engines read too."""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path

import numpy as np

from quire.cli import Command, Options
from quire.config import EngineConfig, option
from quire.devices.protocol import IntArray
from quire.engine.directory import load_tokenizer, model_directory
from quire.engine.plan import make_backend
from quire.errors import ConfigError
from quire.files import read_text
from quire.flags.uses import QUANTIZING
from quire.progress import progress
from quire.quantize.fisher import fisher_information, read_fisher
from quire.quantize.methods import READERS, Method, Name
from quire.quantize.run import Quantizer
from quire.weights.hub import ASSETS

log = logging.getLogger("quire")

TEXT = ASSETS / "calibration.txt"
MAX_TEXT = 256 << 20  # bytes
FISHER = "quantize-fisher"


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizeOptions(Options):
    """Options of `quire quantize`."""

    output: str = option(
        "",
        "Directory to write; an unfinished run in it goes on.",
        short="-o",
        writes="directory",
        common=True,
    )
    method: Name = option(
        "gptq",
        "gptq or awq (4 bits, calibrated), smoothquant or int8-static (8 bits, activations too), squeezellm (tables "
        "of 3 or 4 bits), fp8, nvfp4 or mxfp4 (no calibration), rtn (GPTQ's format, rounded to nearest).",
        common=True,
    )
    bits: int | None = option(
        None, "Bits of a weight, if the method has several.", low=2, high=8, common=True
    )
    group_size: int = option(128, "Columns that share a scale: GPTQ, AWQ.", low=16, high=1024, common=True)
    symmetric: bool = option(True, "GPTQ without zero points, as vLLM wants it.")
    damp: float = option(0.01, "GPTQ: part of the mean diagonal that is added to it.", low=1e-6, high=1)
    calibration: str | None = option(
        None,
        "UTF-8 text like that which the model will see; by default a small one of Quire's own.",
        common=True,
    )
    samples: int = option(128, "Pieces of the text.", low=1, common=True)
    sample_len: int = option(512, "Tokens of a piece.", low=8)
    fisher: bool = option(
        False,
        "SqueezeLLM: weigh by squared gradients; needs the transformers extra, and memory for gradients.",
    )

    outliers: float = option(
        0.0, "SqueezeLLM: percent of weights kept as floats beside the tables, such as 0.45.", low=0, high=10
    )


def run(config: EngineConfig, options: QuantizeOptions) -> None:
    if not options.output:
        raise ConfigError("name the directory to write: quire quantize MODEL -o DIR")
    for field in fields(options):
        methods = READERS.get(field.name)
        if methods and options.method not in methods and getattr(options, field.name) != field.default:
            flag = field.name.replace("_", "-")
            raise ConfigError(f"--{flag} is for --method {' or '.join(methods)}; leave it out")
    method = Method.of(
        options.method, options.bits, options.group_size, options.symmetric, options.damp, options.outliers
    )
    source, output = model_directory(config.model), Path(options.output)
    backend = make_backend(config.device)
    tokens = _samples(config, options, source) if method.calibrated else np.zeros((1, 1), np.int32)
    quantizer = Quantizer(source, method, backend, tokens)
    cache = output.with_name(f".{output.name}.{FISHER}")
    if options.fisher:
        if not cache.exists():
            fisher_information(source, tokens, cache)
        quantizer.importance = partial(read_fisher, cache)
    settings = {
        **asdict(options),
        "source": str(source.resolve()),
        "tokens": hashlib.sha256(tokens.tobytes()).hexdigest(),
    }
    with progress(f"{options.method} of {source}", quantizer.num_layers, "layers") as told:
        kept = quantizer.run(output, settings, told)
    shutil.rmtree(cache, ignore_errors=True)
    before, after = _size(source), _size(output)
    print(f"{output}: {after / 1e6:,.1f} MB of {before / 1e6:,.1f} MB")
    if kept:
        print(
            f"{len(kept)} matrices of layers stay float: {', '.join(kept[:4])}{', ...' if len(kept) > 4 else ''}"
        )


def _size(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.glob("*.safetensors"))


def _samples(config: EngineConfig, options: QuantizeOptions, source: Path) -> IntArray:
    """Cut pieces [N, S] from all over the text. ConfigError if it is too short for one."""
    if options.calibration is None:
        log.warning(
            "no --calibration: a small text of Quire's own is used; a text like your prompts does better"
        )
    path = TEXT if options.calibration is None else Path(options.calibration)
    tokens = np.array(load_tokenizer(config.model).encode(read_text(path, MAX_TEXT)), np.int32)
    longest = json.loads((source / "config.json").read_text()).get("max_position_embeddings")
    length = min(options.sample_len, longest or options.sample_len, len(tokens))
    count = min(options.samples, max(1, len(tokens) // length))
    if length < 8:
        raise ConfigError(f"{path} is too short to calibrate with: {len(tokens)} tokens")
    starts = np.linspace(0, len(tokens) - length, count).astype(np.intp)
    return np.stack([tokens[start : start + length] for start in starts])


COMMAND = Command(run, QuantizeOptions, arguments=("model",), uses=QUANTIZING)
