"""Fetches models and adapters from the hub, or finds them in its cache.

`import huggingface_hub` is light; its client is imported when `snapshot_download` is first touched.
"""

from __future__ import annotations

import errno
import logging
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import huggingface_hub
from huggingface_hub import errors
from huggingface_hub.utils.tqdm import tqdm

from quire.errors import ModelError
from quire.spelling import nearest
from quire.weights.gguf.choice import choose_gguf, model_at
from quire.weights.hub import ASSETS, existing
from quire.weights.repository import (
    OTHER_SAFETENSORS,
    SAFETENSORS,
    TORCH,
    Repository,
    cached_names,
    find_repository,
)

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}(/[A-Za-z0-9][\w.-]{0,95})?", re.ASCII)
HUB_GGUF = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*):([\w.-]+)")  # owner/name:Q4_K_M
# Config, tokenizer, chat template, and the modules of sentence-transformers.
ABOUT = ("*.json", "*.jinja", "*.txt", "*.model", "LICENSE*", "[0-9]_*/model.safetensors")
SUBFOLDERS = ("[!0-9]*/*", "[0-9][!_]*/*")
ADAPTER = ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt")
MAX_ADAPTER = 16 << 30  # bytes of an adapter that a user has fetched
SHOWN = 8

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class HubModel:
    """A model of the hub: its repository, the tag of a GGUF file, and where it is fetched to."""

    name: str
    tag: str | None
    revision: str | None
    download_dir: str | None
    token: str | None

    @classmethod
    def parse(cls, model: str, revision: str | None, download_dir: str | None, token: str | None) -> HubModel:
        """Read a hub id such as owner/name or owner/name:Q4_K_M. ModelError: it is none."""
        if model.startswith(("/", ".", "~")) or model.endswith((".gguf", ".safetensors")):
            raise ModelError(
                f"{model!r:.300} is neither an existing directory nor a file; a GGUF file of the hub is named by "
                "its tag, as in owner/name:Q4_K_M"
            )
        tagged = HUB_GGUF.fullmatch(model)
        if tagged is None and not HUB_ID.fullmatch(model):
            raise ModelError(
                f"{model!r} is neither an existing directory nor a Hugging Face id such as owner/name"
            )
        name, tag = (model, None) if tagged is None else (tagged[1], tagged[2])
        return cls(name, tag, revision, download_dir, token)

    def find(self) -> Repository | None:
        """Ask the hub for the files; None if it cannot be reached or refuses: what is cached counts then."""
        try:
            return find_repository(self.name, self.tag, self.revision, self.download_dir, self.token)
        except ModelError:
            raise
        except Exception as error:  # each version of the client has other errors of connections
            logger.debug("%s: %s", self.name, error)
            return None

    def fetch(self, patterns: Iterable[str]) -> Path:
        return _fetch(self.name, tuple(patterns), self.revision, self.download_dir, self.token)

    def fetch_known(self, repository: Repository, weights: bool) -> Path:
        """Fetch a repository's small files, and its weights. A tokenizer too may lie in a GGUF file."""
        if not weights and not repository.gguf:
            return self.fetch(ABOUT)
        if not repository.weights:
            names = ", ".join(sorted(repository.sizes)[:SHOWN]) or "no file"
            raise ModelError(f"{self.name} holds no weights that Quire reads: it has {names}")
        if notice := repository.check_room():
            logger.warning("%s", notice)
        with repository.fetching():
            if repository.gguf:
                return self.fetch(repository.weights) / repository.weights[0]
            return self.fetch((*ABOUT, *repository.weights))

    def fetch_cached(self, weights: bool) -> Path:
        """Find what is cached of a repository whose files are not known."""
        if self.tag:
            directory = self.fetch((f"*{self.tag}*.gguf",))
            return (
                directory / choose_gguf((path.name for path in directory.iterdir()), self.tag, self.name)[0]
            )
        directory = self.fetch((*ABOUT, *SAFETENSORS) if weights else ABOUT)
        if weights and not any(any(directory.glob(pattern)) for pattern in SAFETENSORS):
            directory = self.fetch((*ABOUT, *TORCH, *OTHER_SAFETENSORS))
        return directory if (directory / "config.json").exists() else model_at(directory)


def fetch_model(
    model: str, revision: str | None, download_dir: str | None, weights: bool, token: str | None
) -> Path:
    """Fetch the model of a hub id: see `quire.weights.hub.find_model`."""
    named = HubModel.parse(model, revision, download_dir, token)
    repository = named.find()
    if repository is None:
        return named.fetch_cached(weights)
    return named.fetch_known(repository, weights)


def sketch_model(
    model: str, revision: str | None, download_dir: str | None, token: str | None, folder: Path
) -> Path | None:
    """Fetch a model's small files and the headers of its weights to `folder`, where it looks as if it were fetched.

    None if nothing is missing, the hub cannot be reached, or the weights are pickles, which have no header.
    ModelError: the model is none, or the disk has no room for it.
    """
    named = HubModel.parse(model, revision, download_dir, token)
    repository = named.find()
    if repository is None or not repository.absent() or repository.weights[0].endswith(".bin"):
        return None
    repository.check_room()
    folder.mkdir(parents=True)
    for path in () if repository.gguf else named.fetch(ABOUT).iterdir():
        if path.name not in repository.weights:
            (folder / path.name).symlink_to(path)
    try:
        repository.sketch(folder)
    except ModelError:
        raise
    except Exception as error:  # see `find`
        raise explained(error, named.name, revision, download_dir) from error
    return folder / repository.weights[0] if repository.gguf else folder


def find_adapter(
    adapter: str,
    download_dir: str | None = None,
    token: str | None = None,
    roots: tuple[Path, ...] | None = None,
    ids: bool = True,
) -> Path:
    """Find an adapter's directory: a path, the name of a packaged one, or a hub id that is fetched. ModelError.

    With `roots`, which users' adapters have, a path must lie in one of them, links followed, and what is fetched is
    bounded. Nothing else on the disk changes the answer. `ids` says whether hub ids are allowed.
    """
    path = existing(adapter, roots)
    if path is not None and path.is_dir():
        return path.resolve()
    if HUB_ID.fullmatch(adapter):
        if (ASSETS / adapter / ADAPTER[0]).is_file():
            return ASSETS / adapter
        if not ids:
            raise ModelError(
                f"{adapter!r:.300} is not in a directory of --lora-root, and --no-lora-hub-ids is set"
            )
        local = roots is not None and not _check_size(adapter, token)
        return _fetch(adapter, ADAPTER, None, download_dir, token, local)
    if roots is not None:
        raise ModelError(f"{adapter!r:.300} is not in a directory of --lora-root, and no Hugging Face id")
    raise ModelError(f"{adapter!r:.300} is neither a directory here nor a Hugging Face id")


def _check_size(adapter: str, token: str | None) -> bool:
    """Whether the hub can be reached; if not, only cached files count. ModelError: the files are too large."""
    try:
        found = huggingface_hub.HfApi().model_info(adapter, files_metadata=True, token=token)
    except errors.HfHubHTTPError as error:
        raise explained(error, adapter, None, None) from error
    except Exception:  # each version has other errors of connections
        return False
    size = sum(file.size or 0 for file in found.siblings or [] if file.rfilename in ADAPTER)
    if size > MAX_ADAPTER:
        raise ModelError(
            f"{adapter}: its files have {size} bytes; adapters of users have at most {MAX_ADAPTER}"
        )
    return True


class Bar(tqdm):
    """A bar of the hub's client, on a terminal alone."""

    def __init__(self, *args: Any, disable: bool | None = None, **given: Any) -> None:
        super().__init__(*args, disable=disable, **given)  # type: ignore[no-untyped-call]


def _fetch(
    model: str,
    patterns: tuple[str, ...],
    revision: str | None,
    download_dir: str | None,
    token: str | None,
    local: bool = False,
) -> Path:
    """Fetch a repository's files, or find them cached; `local`: they must be."""
    try:
        return Path(
            huggingface_hub.snapshot_download(
                model,
                revision=revision,
                cache_dir=download_dir,
                local_files_only=local,
                token=token,
                allow_patterns=list(patterns),
                ignore_patterns=list(SUBFOLDERS),
                tqdm_class=Bar,
            )
        )
    except Exception as error:  # each version of the client has other errors of connections
        raise explained(error, model, revision, download_dir) from error


def explained(error: Exception, model: str, revision: str | None, cache: str | None) -> ModelError:
    """Say in one line why the hub gives no files of a model, and what to do."""
    at = f" at revision {revision}" if revision else ""
    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, errors.GatedRepoError):
        return ModelError(f"{model} is gated: accept its terms on its page, then log in with `hf auth login`")
    if isinstance(error, errors.RevisionNotFoundError):
        return ModelError(f"{model} has no revision {revision!r}")
    if isinstance(error, errors.RepositoryNotFoundError) or status == 401:
        return ModelError(
            f"{model} is not a directory here and not a model on the hub (or private: `hf auth login`)"
            + nearest(model, cached_names(cache))
        )
    if isinstance(error, errors.LocalEntryNotFoundError):
        return ModelError(
            f"{model}{at} is not a path here, not in the cache, and the hub cannot be reached: check the name and the "
            f"network{nearest(model, cached_names(cache))}"
        )
    if isinstance(error, errors.HFValidationError):
        return ModelError(
            f"{model!r} is not an existing directory nor a valid Hugging Face id: {_line(error)}"
        )
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return ModelError(
            f"{model}{at} cannot be fetched: {error.strerror}: make room, or give --download-dir"
        )
    return ModelError(
        f"{model}{at} cannot be fetched from the hub: {_line(error)}; try again: what came is kept"
    )


def _line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
