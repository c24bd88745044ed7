"""Files that a backend made ahead of time, in a folder with a manifest: read back bounded and checked."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Annotated, Any, Protocol, TypeVar, runtime_checkable

import msgspec

from quire.devices.protocol import Backend, Graph, KVCache, Limits
from quire.errors import ModelError
from quire.files import read_bytes, replaced

FOLDER = "artifacts"
"""FOLDER is their place in an engine directory."""
MANIFEST = "manifest.json"
FORMAT = 1
MAX_MANIFEST, MAX_FILE = 16 << 20, 64 << 20  # bytes
T = TypeVar("T")
Hash = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]


@runtime_checkable
class Builder(Backend, Protocol):
    """A backend of a target that is not here: it plans graphs and packs weights, and compiles what would run."""

    def write_artifacts(self, folder: Path, block_size: int) -> None:
        """Write what the planned graphs need to a folder."""

    def list_artifacts(self, block_size: int) -> list[dict[str, Any]]:
        """Describe what the planned graphs need, as rows of plain values."""


@runtime_checkable
class Checker(Backend, Protocol):
    """A backend whose kernels can be checked where they run."""

    def check(self, graph: Graph, kv: KVCache, limits: Limits) -> dict[str, tuple[bool, bool]]:
        """Run each kernel that a model launches: whether its values are right, and whether rows keep their bits."""


class Artifact(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file, which has its SHA-256 as its name, and what its backend says about it."""

    sha256: Hash
    nbytes: Annotated[int, msgspec.Meta(ge=0, le=MAX_FILE)]
    about: dict[str, Any]


class _Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    sha256: Hash  # of `content`
    content: msgspec.Raw


class _Content(msgspec.Struct, forbid_unknown_fields=True):
    format: int
    about: dict[str, Any]
    files: dict[str, Artifact] = {}


class Artifacts:
    """A backend's files by key. `about` says what all of them depend on; `again` says how to make them anew."""

    def __init__(self, folder: Path, about: dict[str, Any], again: str) -> None:
        """Begin without files."""
        self.folder, self._again, self._content = folder, again, _Content(FORMAT, about)

    @classmethod
    def opened(cls, folder: Path, again: str) -> Artifacts:
        """Read the manifest. ModelError: it is missing, damaged or of another version."""
        found, path = cls(folder, {}, again), folder / MANIFEST
        data = found._bytes(path, MAX_MANIFEST)
        try:
            manifest = msgspec.json.decode(data, type=_Manifest)
            if _sha256(bytes(manifest.content)) != manifest.sha256:
                raise ModelError(f"{path}: altered after it was written; {again}")
            found._content = msgspec.json.decode(manifest.content, type=_Content)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise ModelError(f"{path}: not a manifest of artifacts ({error}); {again}") from error
        if found._content.format != FORMAT:
            raise ModelError(
                f"{path}: format {found._content.format}, this version of Quire reads {FORMAT}; {again}"
            )
        return found

    def about(self, kind: type[T], key: str | None = None) -> T:
        """Convert what all files depend on, or what is said of one. ModelError: it is no such thing."""
        try:
            return msgspec.convert(self._content.about if key is None else self.files[key].about, kind)
        except msgspec.ValidationError as error:
            raise ModelError(f"{self.folder / MANIFEST}: {error}; {self._again}") from error

    @property
    def files(self) -> dict[str, Artifact]:
        return self._content.files

    @property
    def nbytes(self) -> int:
        return sum(file.nbytes for file in self.files.values())

    def read(self, key: str) -> bytes:
        """Return the bytes of a file. ModelError: it is missing, or not what was written."""
        file = self.files[key]
        path = self.folder / file.sha256
        data = self._bytes(path, file.nbytes)
        if _sha256(data) != file.sha256:
            raise ModelError(f"{path}: altered or cut off after it was written; {self._again}")
        return data

    def _bytes(self, path: Path, most: int) -> bytes:
        try:
            return read_bytes(path, most)
        except ModelError as error:
            raise ModelError(f"{error}; {self._again}") from error

    def add(self, key: str, data: bytes, about: dict[str, Any]) -> None:
        """Write a file. It is in the manifest once that is saved."""
        name = _sha256(data)
        self.folder.mkdir(parents=True, exist_ok=True)
        with replaced(self.folder / name) as new:
            new.write_bytes(data)
        self.files[key] = Artifact(name, len(data), about)

    def save(self) -> None:
        """Write the manifest."""
        self.folder.mkdir(parents=True, exist_ok=True)
        content = msgspec.json.encode(self._content)
        with replaced(self.folder / MANIFEST) as new:
            new.write_bytes(msgspec.json.encode(_Manifest(_sha256(content), msgspec.Raw(content))))


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
