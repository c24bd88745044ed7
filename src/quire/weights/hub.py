"""Finds the local directory or GGUF file of a model argument: a path, or a hub id that is fetched or found cached."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from quire.errors import ModelError
from quire.lazy import Lazy

if TYPE_CHECKING:
    from quire.weights import download
else:
    download = Lazy("quire.weights.download")

LATER_PART = re.compile(r".*-(?!00001)[0-9]{5}-of-[0-9]{5}\.gguf")


def find_model(
    model: str,
    revision: str | None = None,
    download_dir: str | None = None,
    weights: bool = True,
    token: str | None = None,
) -> Path:
    """Find the directory or GGUF file of `model`; an id is fetched to `download_dir` (default: the hub's cache).

    An id with a colon (owner/name:Q4_K_M) means the GGUF file whose name contains what follows it.
    torch weights are fetched only if there are no safetensors; without `weights`, for a tokenizer, neither is
    fetched. Raises ModelError.
    """
    if not model:
        raise ModelError("no model given; name a local directory or a Hugging Face id")
    path = existing(model)
    if path is not None and path.is_dir():
        return _gguf_inside(path)
    if path is not None:
        if path.suffix == ".gguf":
            return path
        raise ModelError(
            f"{model} is a file; give a GGUF file, or the directory that holds config.json and the weights"
        )
    return download.fetch_model(model, revision, download_dir, weights, token)


def existing(name: str, roots: tuple[Path, ...] | None = None) -> Path | None:
    """Return the path of this name, if there is one (in one of the `roots`, links followed).

    None also where no path can have the name: an unknown user, a NUL, a part of 300 letters, a loop of links.
    """
    try:
        path = Path(name).expanduser()
        if roots is not None:
            path = path.resolve()
            if not any(path.is_relative_to(root.resolve()) for root in roots):
                return None
        path.stat()
    except (OSError, RuntimeError, ValueError):
        return None
    return path


def _gguf_inside(directory: Path) -> Path:
    """Return the directory, or the GGUF file in it if that is the whole model."""
    if (directory / "config.json").exists() or not any(directory.glob("*.gguf")):
        return directory
    return only_gguf(directory, "*.gguf")


def only_gguf(directory: Path, pattern: str) -> Path:
    """Find the one model in a directory of GGUF files. ModelError if there is not just one."""
    found = sorted(path for path in directory.glob(pattern) if not LATER_PART.fullmatch(path.name))
    if len(found) != 1:
        names = ", ".join(path.name for path in found) or "none"
        raise ModelError(
            f"{directory}: one model must match {pattern}, found {names}; name the file that you mean"
        )
    return found[0]
