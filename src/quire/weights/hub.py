"""Finds the local directory or GGUF file of a model argument: a path, or a hub id that is fetched or found cached."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from quire.errors import ModelError
from quire.lazy import Lazy
from quire.weights.gguf import is_gguf

if TYPE_CHECKING:
    from quire.text import tokenizer
    from quire.text.tokenizer import Tokenizer
    from quire.weights.gguf import tokenizer as gguf_tokenizer
else:
    tokenizer = Lazy("quire.text.tokenizer")
    gguf_tokenizer = Lazy("quire.weights.gguf.tokenizer")


def open_tokenizer(path: Path) -> Tokenizer:
    """Open the tokenizer of a model directory or a GGUF file. ModelError if there is none."""
    return gguf_tokenizer.open_tokenizer(path) if is_gguf(path) else tokenizer.Tokenizer.load(path)


if TYPE_CHECKING:
    from quire.weights import download, repository
    from quire.weights.gguf import choice
else:
    choice = Lazy("quire.weights.gguf.choice")
    download, repository = Lazy("quire.weights.download"), Lazy("quire.weights.repository")

ASSETS = Path(__file__).parent.parent / "assets"


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
    path = local(model)
    if path is not None:
        return path if (path / "config.json").exists() else choice.model_at(path)
    return download.fetch_model(model, revision, download_dir, weights, token)


def local(model: str) -> Path | None:
    """Return the path of this name, or the package's own model: nothing is asked of the hub. None: neither is here."""
    path, own = existing(model), ASSETS / model
    return own if path is None and "/" not in model and existing(str(own / "config.json")) else path


def is_cached(name: str, download_dir: str | None) -> bool:
    """Whether the hub's cache has something of the model of this id."""
    return repository.cache_folder(name, download_dir).is_dir()


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
