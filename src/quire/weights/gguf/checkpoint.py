"""The tensors of a GGUF model under the names of the checkpoint that it was made of, decoded as they are asked for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from quire.devices.protocol import GROUPS_OF_INT4
from quire.weights.checkpoint.protocol import Array
from quire.weights.gguf.dequantize import PLAIN, dequantize, grouped
from quire.weights.gguf.names import Place
from quire.weights.gguf.parts import GGUFParts

FLOAT32 = np.dtype(np.float32)
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
GROUPED = ("Q4_0", "Q4_1", "Q4_K")  # what `dequantize.grouped` knows


@dataclass(frozen=True, slots=True)
class GGUFCheckpoint:
    """A `Checkpoint`. Quantized tensors are float32 once read; MXFP4 is bfloat16, which holds it."""

    parts: GGUFParts
    tensors: Mapping[str, Place]

    def names(self) -> Iterable[str]:
        return self.tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self.tensors[name].shape

    def dtype(self, name: str) -> np.dtype[Any]:
        place = self.tensors[name]
        kind = self.parts.tensors[place.tensor].kind.name
        if not place.exact:
            return FLOAT32
        return BFLOAT16 if kind == "MXFP4" else PLAIN.get(kind, FLOAT32)

    def path(self, name: str) -> Path:
        return self.parts.path_of(self.tensors[name].tensor)

    def groups(self, name: str, outline: bool) -> Array | None:
        place = self.tensors[name]
        entry, shape = self.parts.tensors[place.tensor], place.shape
        if entry.kind.name not in GROUPED or not place.exact or len(shape) != 2:
            return None
        rows, columns = entry.shape[-2:]
        if outline:
            none = np.zeros((), GROUPS_OF_INT4[entry.kind.name != "Q4_0"])
            found: Array = np.broadcast_to(none, (rows, columns // 32))
        else:
            groups = grouped(entry.kind, self._raw(place)[0])
            assert groups is not None
            found = groups.reshape(rows, -1)
        if place.take is not None:
            found = place.take(found)
        return found if found.shape == (shape[0], shape[1] // 32) else None

    def _raw(self, place: Place) -> tuple[Array, tuple[int, ...]]:
        """Bytes and shape in the file."""
        raw, shape = self.parts.raw(place.tensor), self.parts.tensors[place.tensor].shape
        if place.index is not None:
            size, shape = len(raw) // shape[0], shape[1:]
            raw = raw[place.index * size : (place.index + 1) * size]
        return raw, shape

    def get(self, name: str) -> Array:
        place = self.tensors[name]
        entry = self.parts.tensors[place.tensor]
        raw, shape = self._raw(place)
        plain = PLAIN.get(entry.kind.name)
        array: Array = (dequantize(entry.kind, raw) if plain is None else raw.view(plain)).reshape(shape)
        if place.take is not None:
            array = place.take(array)
        return np.require(array.astype(self.dtype(name), copy=False), requirements=["C", "A"])
