"""Finds the weights in a model directory and opens them as one `Checkpoint`, sharded or not."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from quire.errors import ModelError
from quire.files import read_json
from quire.lazy import Lazy
from quire.weights.activations import KeptActivations, Rounding
from quire.weights.checkpoint.protocol import Checkpoint
from quire.weights.checkpoint.safetensors import SafetensorsFile
from quire.weights.layouts import AnyLayout
from quire.weights.tensor import Array, QuantTensor, Rows

if TYPE_CHECKING:
    from quire.weights.checkpoint import torch_pickle
else:
    torch_pickle = Lazy("quire.weights.checkpoint.torch_pickle")

__all__ = ["ChangedCheckpoint", "Checkpoint", "ShardedCheckpoint", "open_checkpoint"]

# In order of preference, as transformers looks for them.
FORMATS: tuple[tuple[str, Callable[[Path], Checkpoint]], ...] = (
    ("model.safetensors", SafetensorsFile),
    ("pytorch_model.bin", lambda path: torch_pickle.TorchFile(path)),
)
MAX_INDEX = 64 << 20  # bytes
SHARD = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})(?P<suffix>\.safetensors|\.bin)")


class ShardedCheckpoint:
    """Several files as one. A name in two of them is an error, unless an index says which has it."""

    def __init__(self, shards: Iterable[Checkpoint], index: Mapping[str, Checkpoint] | None = None) -> None:
        listed = index or {}
        self._owner: dict[str, Checkpoint] = {**listed}
        for shard in shards:
            for name in shard.names():
                if name in listed:
                    continue
                if name in self._owner:
                    first = self._owner[name].path(name)
                    raise ModelError(f"{shard.path(name)}: tensor {name} is also in {first.name}")
                self._owner[name] = shard

    def names(self) -> Iterable[str]:
        return self._owner.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._owner[name].shape(name)

    def dtype(self, name: str) -> np.dtype[Any]:
        return self._owner[name].dtype(name)

    def path(self, name: str) -> Path:
        return self._owner[name].path(name)

    def get(self, name: str) -> Array:
        return self._owner[name].get(name)

    @property
    def activations(self) -> KeptActivations:
        return "float"

    def layout(self, name: str) -> AnyLayout | None:
        return self._owner[name].layout(name)

    def quantized(self, name: str, rows: Rows) -> QuantTensor:
        return self._owner[name].quantized(name, rows)

    def rounding(self, name: str) -> Rounding | None:
        return self._owner[name].rounding(name)


class ChangedCheckpoint(ShardedCheckpoint):
    """A checkpoint with some tensors replaced by others of the same shape. `read` notes which of them were read."""

    def __init__(self, base: Checkpoint, changes: Mapping[str, Array]) -> None:
        super().__init__([base])
        self._changes = changes
        self.read: set[str] = set()

    def get(self, name: str) -> Array:
        if name not in self._changes:
            return super().get(name)
        self.read.add(name)
        return self._changes[name]


def open_checkpoint(directory: Path) -> Checkpoint:
    """Open a model directory's weights; reads headers only. Raises ModelError, naming the file at fault."""
    for name, opener in FORMATS:
        single, index = directory / name, directory / f"{name}.index.json"
        if single.exists():
            return opener(single)
        if index.exists():
            return _open_shards(index, opener)
        if (numbered := _numbered(directory, opener, single.suffix)) is not None:
            return numbered
    # Older quantized models have names of their own, such as gptq_model-4bit-128g.safetensors or sq-llama-7b-w3-s0.pt.
    for pattern, opener in (("*.safetensors", SafetensorsFile), ("*.pt", FORMATS[1][1])):
        index_files, other = sorted(directory.glob(f"{pattern}.index.json")), sorted(directory.glob(pattern))
        if len(index_files) == 1:
            return _open_shards(index_files[0], opener)
        if len(other) == 1:
            return opener(other[0])
    looked = ", ".join(f"{name}[.index.json]" for name, _ in FORMATS)
    raise ModelError(f"{directory}: no weights found; looked for {looked}")


def _open_shards(index: Path, opener: Callable[[Path], Checkpoint]) -> ShardedCheckpoint:
    weight_map = _weight_map(index)
    shards = {file: opener(index.parent / file) for file in sorted(set(weight_map.values()))}
    for tensor, file in weight_map.items():
        if tensor not in shards[file].names():
            raise ModelError(
                f"{index}: tensor {tensor} should be in {file} and is not; fetch the model again"
            )
    return ShardedCheckpoint(shards.values(), {tensor: shards[file] for tensor, file in weight_map.items()})


def _numbered(directory: Path, opener: Callable[[Path], Checkpoint], suffix: str) -> Checkpoint | None:
    """Open shards that lie there without an index, as their names number them. ModelError if one is missing."""
    found = [match for path in sorted(directory.iterdir()) if (match := SHARD.fullmatch(path.name))]
    found = [match for match in found if match["suffix"] == suffix]
    if len({(match["stem"], match["count"]) for match in found}) != 1:
        return None
    names = {int(match["number"]): match[0] for match in found}
    if missing := set(range(1, int(found[0]["count"]) + 1)) - names.keys():
        raise ModelError(
            f"{directory}: {found[0][0]} is there and number {min(missing)} is not; fetch it again"
        )
    return ShardedCheckpoint(opener(directory / name) for name in names.values())


def _weight_map(index: Path) -> dict[str, str]:
    """{tensor: file name}; files lie beside the index."""
    weight_map = read_json(index, most=MAX_INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{index}: has no weight_map")
    for file in weight_map.values():
        if not isinstance(file, str) or not _is_file_name(file):
            raise ModelError(f"{index}: weight_map must name files beside it, got {file!r:.300}")
    return weight_map


def _is_file_name(name: str) -> bool:
    return name.isprintable() and name not in ("", ".", "..") and not {"/", "\\"} & {*name}
