"""A model's files: config, generation defaults and tensors, from a directory or a GGUF file. Knows no family."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.errors import ModelError
from quire.files import read_json
from quire.text.tokenizer import Tokenizer
from quire.weights.checkpoint import Checkpoint, open_checkpoint
from quire.weights.gguf import is_gguf, read_gguf
from quire.weights.gguf.container import GGUFFile
from quire.weights.gguf.tokenizer import read_tokenizer
from quire.weights.readers import find_quantization


@dataclass(frozen=True, slots=True)
class Source:
    """`config` and `generation` are config.json and generation_config.json, or a GGUF file's equivalents.

    `where` names the config in messages. `tensors` opens the weights, quantized ones through their reader.
    """

    path: Path
    where: str
    config: dict[str, Any]
    generation: dict[str, Any]
    tensors: Callable[[], Checkpoint]


def open_source(path: Path) -> Source:
    """Open a directory or a GGUF file; reads headers only. Raises ModelError."""
    if is_gguf(path):
        config, generation, tensors = read_gguf(path)
        return Source(path, str(path), config, generation, lambda: tensors)
    config_path, generation_path = path / "config.json", path / "generation_config.json"
    if not config_path.exists():
        raise ModelError(
            f"{path}: no config.json; give the directory of a Hugging Face model, or a GGUF file"
        )
    config = read_json(config_path)
    generation = read_json(generation_path) if generation_path.exists() else {}
    quantization = find_quantization(config, str(config_path), path)
    if quantization is None:
        return Source(path, str(config_path), config, generation, lambda: open_checkpoint(path))
    reader = quantization.reader()
    config = {**config, "quantization_config": quantization.section()}
    return Source(path, str(config_path), config, generation, lambda: reader(open_checkpoint(path)))


def open_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of a model directory or a GGUF file. Raises ModelError."""
    return read_tokenizer(GGUFFile(path)) if is_gguf(path) else Tokenizer.load(path)
