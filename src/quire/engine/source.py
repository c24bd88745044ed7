"""Finds the configured model and opens its files as the options ask."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from quire.config import EngineConfig, ModelConfig
from quire.devices import registry
from quire.engine.directory import model_directory
from quire.errors import ConfigError, ModelError, UnknownArchitectureError
from quire.lazy import Lazy
from quire.model import load
from quire.model.info import Asked, Reading
from quire.weights.gguf import is_gguf
from quire.weights.schemes import FLOAT_KINDS, METHODS, Quantization, scheme
from quire.weights.source import quantization_method

if TYPE_CHECKING:
    from quire.model import foreign
else:
    foreign = Lazy("quire.model.foreign")


def quantized_weights(config: ModelConfig, path: Path) -> Quantization | None:
    """Read what --quantization means for a model directory, a GGUF file or a config.json.

    ConfigError if it names a method and the checkpoint is quantized by another, or by none and floats are not rounded
    that way.
    """
    return asked_quantization(config, quantization_method(path))


def asked_quantization(config: ModelConfig, found: str | None) -> Quantization | None:
    """Read --quantization for a model that is quantized by the method `found`, or not (None)."""
    name = config.quantization
    if name in METHODS and found != METHODS[name] and not (found is None and name in FLOAT_KINDS):
        has = "is not quantized" if found is None else f"is quantized by {found}"
        raise ConfigError(f"--quantization {name}: the model {has}; leave the option out")
    return scheme(
        name,
        config.quantization_group_size,
        config.quantization_symmetric,
        config.quantization_pure,
        config.quantization_activations,
        rounds=found is None,
    )


def for_divided(config: EngineConfig, files: load.ModelFiles) -> EngineConfig:
    """Configure as many ranks as a model's files are divided among, unless several are asked for."""
    if config.parallel.tensor_parallel_size > 1 or files.ranks == 1:
        return config
    return replace(config, parallel=replace(config.parallel, tensor_parallel_size=files.ranks))


def asked_of(config: ModelConfig, path: Path, spare_tokens: int = 0) -> Asked:
    """Collect the options that concern the weights of the model at `path`."""
    reading = Reading(config.architecture, config.config_changes, config.load_format == "dummy", spare_tokens)
    return Asked(config.dtype, quantized_weights(config, path), reading, config.max_model_len)


def find_files(config: ModelConfig, spare_tokens: int = 0) -> load.ModelFiles:
    """Open the files of the configured model: one of Quire's own families, or one that transformers' code runs.

    `spare_tokens` makes room for tokens that adapters add. ModelError, ConfigError.
    """
    path, unknown = model_directory(config), ""
    asked = asked_of(config, path, spare_tokens)
    try:
        if config.model_impl != "transformers":
            return load.open_files(path, asked)
    except UnknownArchitectureError as error:
        if config.model_impl == "quire" or is_gguf(path):
            raise
        if not registry.foreign.runs_foreign_models():
            advice = "with `pip install torch transformers` it may run through transformers"
            raise UnknownArchitectureError(f"{error}; {advice}") from error
        unknown = f"{error}. "
    if is_gguf(path):
        raise ConfigError(
            f"--model-impl transformers needs a directory, and {path} is a GGUF file: leave it out"
        )
    if asked.reading.config or asked.reading.dummy:
        raise ConfigError(
            f"{unknown}--hf-overrides, --rope-scaling, --rope-theta and --load-format dummy are for Quire's own "
            "families; this model runs through transformers"
        )
    if asked.quantized is not None:
        raise ConfigError("--quantization is for Quire's own families; this model runs through transformers")
    try:
        return foreign.ForeignFiles(path, config.dtype)
    except ModelError as error:
        raise ModelError(f"{unknown}{error}") from error
