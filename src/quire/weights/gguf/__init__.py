"""GGUF files: everything that a model directory holds, in one file (or a file split in parts)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from quire.weights.gguf.architectures import read_architecture
from quire.weights.gguf.checkpoint import GGUFCheckpoint
from quire.weights.gguf.names import made_places, places
from quire.weights.gguf.parts import GGUFParts
from quire.weights.gguf.tokenizer import read_ends

__all__ = ["is_gguf", "read_gguf"]

# general.sampling.* by generation_config.json's names.
SAMPLING = {
    "temperature": "temp",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "penalty_repeat",
}


def is_gguf(path: Path) -> bool:
    return path.suffix == ".gguf" and path.is_file()


def read_gguf(path: Path) -> tuple[dict[str, Any], dict[str, Any], GGUFCheckpoint]:
    """What config.json and generation_config.json would say, and the tensors. Raises ModelError."""
    parts = GGUFParts(path)
    config, naming, unused, made = read_architecture(parts)
    generation = {name: parts.get(f"general.sampling.{key}") for name, key in SAMPLING.items()}
    generation["eos_token_id"] = list(read_ends(parts.first)) or None
    generation = {name: value for name, value in generation.items() if value is not None}
    return (
        config,
        generation,
        GGUFCheckpoint(parts, {**places(parts.tensors, naming, config, unused), **made_places(made)}),
    )
