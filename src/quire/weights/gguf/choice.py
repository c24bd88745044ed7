"""Chooses the one model among GGUF files, in a directory or on the hub."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from quire.errors import ModelError
from quire.weights.gguf import is_gguf

DEFAULT_TAG = "Q4_K_M"
FIRST_PART = re.compile(r"(.*)-00001-of-([0-9]{5})\.gguf")
LATER_PART = re.compile(r".*-(?!00001)[0-9]{5}-of-[0-9]{5}\.gguf")


def model_at(path: Path) -> Path:
    """Return a GGUF file, the one in a directory if that is the whole model, or the directory. ModelError: none."""
    if is_gguf(path):
        return path
    if not path.is_dir():
        raise ModelError(
            f"{path} is a file; give a GGUF file, or the directory that holds config.json and the weights"
        )
    names = [file.name for file in path.glob("*.gguf")]
    return path / choose_gguf(names, None, str(path))[0] if names else path


def choose_gguf(names: Iterable[str], tag: str | None, where: str) -> tuple[str, ...]:
    """Choose the files of the one GGUF model whose name has the tag; without one, Q4_K_M or the only model.

    ModelError, with the names that there are.
    """
    files = sorted(name for name in names if name.endswith(".gguf") and "/" not in name)
    models = [name for name in files if not LATER_PART.fullmatch(name) and not name.startswith("mmproj")]
    found = [name for name in models if (tag or DEFAULT_TAG).lower() in name.lower()]
    found = found or ([] if tag else models)
    if len(found) != 1:
        which = f"found {', '.join(found)}" if found else f"found none; it has {', '.join(models) or 'none'}"
        pattern = f"*{tag}*.gguf" if tag else "*.gguf"
        raise ModelError(f"{where}: one model must match {pattern}, {which}; name the file that you mean")
    return all_parts(found[0])


def all_parts(name: str) -> tuple[str, ...]:
    """Name the files of a model: those after a first part, or the file alone."""
    parts = FIRST_PART.fullmatch(name)
    if parts is None:
        return (name,)
    return tuple(f"{parts[1]}-{number:05}-of-{parts[2]}.gguf" for number in range(1, int(parts[2]) + 1))
