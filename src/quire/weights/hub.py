"""Finds the local directory or GGUF file of a model argument: a path, or a hub id that is fetched or found cached."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from quire.errors import ModelError
from quire.lazy import Lazy

if TYPE_CHECKING:
    from quire.weights import download
    from quire.weights.gguf import choice
else:
    choice = Lazy("quire.weights.gguf.choice")
    download = Lazy("quire.weights.download")

SHIPPED = Path(__file__).parent.parent / "assets"


def find_model(
    model: str,
    revision: str | None = None,
    download_dir: str | None = None,
    weights: bool = True,
    token: str | None = None,
) -> Path:
    """Find the directory or GGUF file of `model`; an id is fetched to `download_dir` (default: the hub's cache).

    An id with a colon (owner/name:Q4_K_M) means the GGUF file whose name contains what follows it.
    Models and drafters inside the package have names too. torch weights are fetched only if there are no safetensors,
    and GGUF files if there is neither; without `weights`, for a tokenizer, only GGUF files are. Raises ModelError.
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
    if is_shipped(model):
        return SHIPPED / model
    return download.fetch_model(model, revision, download_dir, weights, token)


def is_local(model: str) -> bool:
    """Whether a model is a path, the package's own, or none: nothing is asked of the hub."""
    return not model or existing(model) is not None or is_shipped(model)


def is_shipped(model: str) -> bool:
    """Whether a model inside the package has this name."""
    return "/" not in model and existing(str(SHIPPED / model / "config.json")) is not None


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
    names = (path.name for path in directory.glob("*.gguf"))
    return directory / choice.choose_gguf(names, None, str(directory))[0]
