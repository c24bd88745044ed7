"""Scales X.scale beside X.weight, as DeepSeek-V4 names them: FP8 in blocks, and pairs of 4-bit codes in int8."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from quire.weights.checkpoint.protocol import Checkpoint, Unquantized
from quire.weights.readers.fields import E4M3, E5M2, E8M0, I8, U8
from quire.weights.tensor import Array

SCALE = ".scale"


def with_long_names(checkpoint: Checkpoint) -> Checkpoint:
    """Name scales of 8-bit weights as other libraries do; a checkpoint that has none is returned as it is."""
    present, stored = set(checkpoint.names()), dict[str, str]()
    for name in sorted(name for name in present if name.endswith(SCALE)):
        module = name.removesuffix(SCALE)
        weight = f"{module}.weight"
        if weight in present and checkpoint.dtype(weight) in (I8, E4M3, E5M2):
            stored[f"{module}.weight_scale"] = name
    return ShortScales(checkpoint, stored) if stored else checkpoint


class ShortScales(Unquantized):
    """A `Checkpoint` with other names for scales; int8 beside exponents is two codes in a byte."""

    def __init__(self, checkpoint: Checkpoint, stored: dict[str, str]) -> None:
        self._inner, self._stored = checkpoint, stored
        weights = {scale: name.removesuffix("_scale") for name, scale in stored.items()}
        self._names = [name for name in checkpoint.names() if name not in weights] + [*stored]
        self._pairs = {
            weight
            for scale, weight in weights.items()
            if checkpoint.dtype(scale) == E8M0 and checkpoint.dtype(weight) == I8
        }

    def names(self) -> Iterable[str]:
        return self._names

    def shape(self, name: str) -> tuple[int, ...]:
        return self._inner.shape(self._stored.get(name, name))

    def dtype(self, name: str) -> np.dtype[Any]:
        return U8 if name in self._pairs else self._inner.dtype(self._stored.get(name, name))

    def path(self, name: str) -> Path:
        return self._inner.path(self._stored.get(name, name))

    def get(self, name: str) -> Array:
        found = self._inner.get(self._stored.get(name, name))
        return found.view(U8) if name in self._pairs else found
