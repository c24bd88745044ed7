"""GGUF files: a whole model in one file, or in a file split into parts."""

from __future__ import annotations

from pathlib import Path


def is_gguf(path: Path) -> bool:
    return path.suffix == ".gguf" and path.is_file()
