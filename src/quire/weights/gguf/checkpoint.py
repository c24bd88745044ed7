"""Presents the tensors of a GGUF model by the file's own names, and decodes them when asked."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from quire.errors import ModelError
from quire.weights.activations import KeptActivations
from quire.weights.checkpoint.protocol import Unquantized
from quire.weights.gguf.container import GGUFFile, TensorEntry
from quire.weights.gguf.kinds import PLAIN
from quire.weights.gguf.pieces import Place
from quire.weights.layouts import AnyLayout, Blocks
from quire.weights.layouts.blocks import decode
from quire.weights.parts import Part
from quire.weights.tensor import Array, QuantTensor, Rows

SPLIT = re.compile(r"(.*)-([0-9]{5})-of-([0-9]{5})\.gguf")


class GGUFParts:
    """The metadata of the first file and the tensors of all. ModelError if a part is missing or another's."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.first = GGUFFile(path)
        self._owner: dict[str, GGUFFile] = {}
        self.tensors: dict[str, TensorEntry] = {}
        for file in [self.first, *(GGUFFile(other) for other in self._others())]:
            for name, entry in file.tensors.items():
                if name in self._owner:
                    raise ModelError(f"{file.path}: tensor {name} is also in {self._owner[name].path.name}")
                self._owner[name], self.tensors[name] = file, entry

    def keys_under(self, prefix: str) -> list[str]:
        return self.first.keys_under(prefix)

    def get(self, key: str) -> Any:
        return self.first.get(key)

    def raw(self, name: str) -> Array:
        """Return the bytes of a tensor as its file has them: uint8."""
        return self._owner[name].raw(name)

    def path_of(self, name: str) -> Path:
        return self._owner[name].path

    def _others(self) -> list[Path]:
        path, count = self.path, self.first.get("split.count")
        if count in (None, 0, 1):
            return []
        name = SPLIT.fullmatch(path.name)
        if type(count) is not int or name is None or int(name[3]) != count:
            raise ModelError(
                f"{path}: is one of {count!r} parts; they must be named NAME-00001-of-{count:05}.gguf"
            )
        if int(name[2]) != 1 or self.first.get("split.no") != 0:
            raise ModelError(
                f"{path}: is a later part; give the first one, {name[1]}-00001-of-{name[3]}.gguf"
            )
        return [path.with_name(f"{name[1]}-{i:05}-of-{name[3]}.gguf") for i in range(2, count + 1)]


FLOAT32 = np.dtype(np.float32)
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


@dataclass(frozen=True, slots=True)
class GGUFCheckpoint(Unquantized):
    """A `Checkpoint` of a GGUF model. Values are float32, but for plain types and for MXFP4, which bfloat16 holds."""

    parts: GGUFParts
    tensors: Mapping[str, Place]

    def names(self) -> Iterable[str]:
        return self.tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self.tensors[name].shape

    def dtype(self, name: str) -> np.dtype[Any]:
        place = self.tensors[name]
        if place.values is not None:
            return place.values.dtype
        kind = self.parts.tensors[place.tensor].kind.name
        if place.second and self.parts.tensors[place.second].kind.name != kind:
            return FLOAT32
        return BFLOAT16 if kind == "MXFP4" else PLAIN.get(kind, FLOAT32)

    def path(self, name: str) -> Path:
        place = self.tensors[name]
        return self.parts.path if place.values is not None else self.parts.path_of(place.tensor)

    @property
    def activations(self) -> KeptActivations:
        """Round activations, as llama.cpp does."""
        return "int8"

    def layout(self, name: str) -> AnyLayout | None:
        place = self.tensors[name]
        if (
            place.values is not None
            or place.second
            or len(place.shape) != 2
            or self._file_rows(place) is None
        ):
            return None
        kind = self.parts.tensors[place.tensor].kind.name
        return None if kind in PLAIN else Blocks(kind.lower())

    def quantized(self, name: str, rows: Rows) -> QuantTensor:
        place = self.tensors[name]
        raw, shape = self._raw(place)
        file_rows = self._file_rows(place)
        assert file_rows is not None
        kind, in_file = self.parts.tensors[place.tensor].kind, raw.reshape(prod(shape[:-1]), -1)
        return Blocks(kind.name.lower()).tensor(_picked(in_file, file_rows[rows]))

    def _file_rows(self, place: Place) -> Rows | None:
        """Find the rows in the file that make a matrix; None if its rows are not rows there."""
        shape = self.parts.tensors[place.tensor].shape[-2:]
        if len(shape) != 2:
            return None
        return Part((("", shape),), place.take).rows()

    def _raw(self, place: Place) -> tuple[Array, tuple[int, ...]]:
        """Return the bytes of a place and their shape in the file."""
        raw, shape = self.parts.raw(place.tensor), self.parts.tensors[place.tensor].shape
        if place.index is not None:
            size, shape = len(raw) // shape[0], shape[1:]
            raw = raw[place.index * size : (place.index + 1) * size]
        return raw, shape

    def get(self, name: str) -> Array:
        place = self.tensors[name]
        if place.values is not None:
            return place.values
        raw, shape = self._raw(place)
        arrays = [self._values(place.tensor, raw).reshape(shape)]
        if place.second is not None:
            whole = self._values(place.second, self.parts.raw(place.second))
            arrays.append(whole.reshape(self.parts.tensors[place.second].shape))
        array = arrays[0] if place.take is None else place.take(*arrays)
        return np.require(array.astype(self.dtype(name), copy=False), requirements=["C", "A"])

    def _values(self, tensor: str, raw: Array) -> Array:
        kind = self.parts.tensors[tensor].kind.name
        plain = PLAIN.get(kind)
        return decode(kind.lower(), raw) if plain is None else raw.view(plain)


def _picked(array: Array, rows: Rows) -> Array:
    """Take rows, as a view if they follow each other."""
    if len(rows) and np.array_equal(rows, np.arange(rows[0], rows[0] + len(rows))):
        return array[rows[0] : rows[0] + len(rows)]
    return array[rows]
