"""Looks at a repository of the hub before its weights are fetched: its files, which of them are here, their headers."""

from __future__ import annotations

import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import huggingface_hub
from huggingface_hub import constants
from huggingface_hub.file_download import repo_folder_name

from quire.errors import ModelError
from quire.lazy import Lazy
from quire.meter import Work, in_bytes, telling
from quire.progress import Told, untold
from quire.weights.gguf.choice import choose_gguf
from quire.weights.gguf.container import GGUFFile

SAFETENSORS = ("model.safetensors", "model-*.safetensors")
TORCH = ("pytorch_model.bin", "pytorch_model-*.bin")
# Names that tools of quantization gave to the one file of weights.
OTHER_SAFETENSORS = ("gptq_model-*.safetensors", "*bit*.safetensors", "*awq*.safetensors")
utils = Lazy("huggingface_hub.utils")
HEAD = 1 << 20  # bytes that are asked for first
MAX_HEAD = 128 << 20
READERS = 8


def place_of(cache: str | None) -> Path:
    return Path(cache or constants.HF_HUB_CACHE).expanduser().absolute()


def cache_folder(name: str, cache: str | None) -> Path:
    """Return the folder of a model's files in the hub's cache."""
    return place_of(cache) / repo_folder_name(repo_id=name, repo_type="model")


def cached_names(cache: str | None) -> list[str]:
    """List the ids of the models in the hub's cache."""
    return [repo.name[8:].replace("--", "/") for repo in place_of(cache).glob("models--*--*")]


@dataclass(frozen=True, slots=True)
class Repository:
    """A commit of a repository, with the sizes of its files. `cache` is the place of the hub's cache, None for its own.

    `weights` are the files that hold the model's: those of one GGUF model with `gguf`.
    """

    name: str
    commit: str
    sizes: dict[str, int]
    cache: str | None
    token: str | None
    weights: tuple[str, ...]
    gguf: bool

    @property
    def place(self) -> Path:
        """The folder of the hub's cache."""
        return place_of(self.cache)

    def local(self, file: str) -> Path | None:
        found = huggingface_hub.try_to_load_from_cache(self.name, file, self.cache, self.commit)
        return Path(found) if isinstance(found, str) else None

    def absent(self) -> list[str]:
        """List the files of the weights that are not here."""
        return [file for file in self.weights if self.local(file) is None]

    def bytes_here(self) -> int:
        """Count the bytes of the repository's files in the cache, unfinished ones included."""
        blobs = cache_folder(self.name, self.cache) / "blobs"
        try:
            return sum(entry.stat().st_size for entry in os.scandir(blobs))
        except FileNotFoundError:  # not yet there, or just renamed
            return 0

    def fetching(self) -> AbstractContextManager[Told]:
        """Tell how far fetching the weights is; on a terminal the hub's client shows it itself."""
        needed = sum(self.sizes[file] for file in self.absent())
        kept = sum(self.sizes[file] for file in self.weights) - needed
        if not needed:
            return nullcontext(untold)
        done = partial(self._fetched, kept)
        return telling(Work(f"fetching {self.name}", needed, "", count=done), bar=False)

    def _fetched(self, kept: int) -> int:
        return max(0, self.bytes_here() - kept)

    def check_room(self) -> str:
        """Say how much there is to fetch, or nothing. ModelError: the disk has no room for it."""
        absent = self.absent()
        size, needed = (sum(self.sizes[file] for file in files) for files in (self.weights, absent))
        place = self.place
        free = shutil.disk_usage(next(path for path in (place, *place.parents) if path.exists())).free
        if needed > free:
            raise ModelError(
                f"{self.name}: {in_bytes(needed)} must be fetched and {in_bytes(free)} are free in {place}: make "
                "room, or choose another place with --download-dir"
            )
        here = len(self.weights) - len(absent)
        have = f", {here} of {len(self.weights)} files are here" if here else ""
        return (
            f"{self.name}: {in_bytes(size)} of weights{have}; fetching {in_bytes(needed)}" if absent else ""
        )

    def sketch(self, folder: Path) -> None:
        """Write the weights' headers to `folder`, in files of the full sizes without values. OSError, ModelError."""
        with ThreadPoolExecutor(READERS) as pool:
            list(pool.map(lambda file: self._sketch(file, folder / file), self.weights))

    def _sketch(self, file: str, path: Path) -> None:
        here = self.local(file)
        if here is not None:
            path.symlink_to(here)
            return
        size, have = self.sizes[file], 0
        needed = HEAD
        while have < (needed := min(size, needed)):
            with path.open("ab") as out:
                out.truncate(have)
                out.write(self._read(file, have, needed))
                out.truncate(size)
            have, needed = needed, self._head(path, needed)

    def _head(self, path: Path, have: int) -> int:
        """Return the bytes of a file that hold its header, of which `have` are there."""
        if not self.gguf:
            with path.open("rb") as file:
                return min(8 + int.from_bytes(file.read(8), "little"), MAX_HEAD)
        try:
            tensors = GGUFFile(path).tensors.values()
        except ModelError:
            if have < min(self.sizes[path.name], MAX_HEAD):  # the end of the header may be missing
                return 4 * have
            raise
        start = min((tensor.begin for tensor in tensors), default=0)
        return have if start <= have else 4 * have

    def _read(self, file: str, start: int, end: int) -> bytes:
        url = huggingface_hub.hf_hub_url(self.name, file, revision=self.commit)
        headers = {**utils.build_hf_headers(token=self.token), "Range": f"bytes={start}-{end - 1}"}
        response = utils.get_session().get(url, headers=headers)
        utils.hf_raise_for_status(response)
        if len(response.content) != end - start:
            raise ModelError(
                f"{self.name}: {file}: the hub sent {len(response.content)} bytes of {end - start}; try again"
            )
        return bytes(response.content)


def find_repository(
    name: str, tag: str | None, revision: str | None, cache: str | None, token: str | None
) -> Repository:
    """Ask the hub for a repository's files. Raises the client's errors; ModelError: it holds no such weights."""
    found = huggingface_hub.HfApi().model_info(name, revision=revision, files_metadata=True, token=token)
    sizes = {file.rfilename: file.size or 0 for file in found.siblings or []}
    for patterns in () if tag else (SAFETENSORS, TORCH, OTHER_SAFETENSORS):
        files = tuple(
            utils.filter_repo_objects(sizes, allow_patterns=list(patterns), ignore_patterns=["*/*"])
        )
        if files:
            return Repository(name, found.sha or "", sizes, cache, token, files, gguf=False)
    gguf = tag is not None or any(file.endswith(".gguf") for file in sizes)
    files = choose_gguf(sizes, tag, name) if gguf else ()
    if lacking := set(files) - sizes.keys():
        raise ModelError(f"{name}: {files[0]} is there and {min(lacking)} is not: choose another file")
    return Repository(name, found.sha or "", sizes, cache, token, files, gguf)
