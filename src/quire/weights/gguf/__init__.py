"""GGUF files: a whole model in one file, or in a file split into parts."""

from __future__ import annotations

from pathlib import Path


def is_gguf(path: Path) -> bool:
    """Tell a GGUF file by its name or, as in Ollama's store of blobs, by its first bytes."""
    if not path.is_file():
        return False
    if path.suffix == ".gguf":
        return True
    with path.open("rb") as file:
        return file.read(4) == b"GGUF"
