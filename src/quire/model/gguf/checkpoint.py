"""The tensors of a GGUF model under the names of the checkpoint that it was made of, decoded as they are asked for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from quire.model.checkpoint.protocol import Array
from quire.model.gguf.dequantize import PLAIN, dequantize
from quire.model.gguf.names import Place
from quire.model.gguf.parts import GGUFParts

FLOAT32 = np.dtype(np.float32)
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


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

    def get(self, name: str) -> Array:
        place = self.tensors[name]
        entry, raw = self.parts.tensors[place.tensor], self.parts.raw(place.tensor)
        shape = entry.shape
        if place.index is not None:
            size, shape = len(raw) // shape[0], shape[1:]
            raw = raw[place.index * size : (place.index + 1) * size]
        plain = PLAIN.get(entry.kind.name)
        array: Array = (dequantize(entry.kind, raw) if plain is None else raw.view(plain)).reshape(shape)
        if place.take is not None:
            array = place.take(array)
        return np.require(array.astype(self.dtype(name), copy=False), requirements=["C", "A"])
