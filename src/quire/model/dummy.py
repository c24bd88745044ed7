"""Random weights for a model of which only the config is known. Knows shapes; knows no family."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from quire.errors import ModelError
from quire.model.families.names import TensorNames
from quire.model.packing import BFLOAT16, WantedTensor, wanted_tensors
from quire.model.parts.decoder import DecoderConfig
from quire.weights.checkpoint.protocol import Unquantized
from quire.weights.source import Source
from quire.weights.tensor import Array

STANDARD_DEVIATION = 0.02
BLOCK = (1 << 20) + 7  # values that are drawn once and repeated; odd, so that rows of a matrix differ


class DummyCheckpoint(Unquantized):
    """A `Checkpoint` of the tensors that a model wants: small normal values, norms' vectors around 1, small numbers.

    A tensor depends on its name and shape alone.
    """

    def __init__(self, wanted: Mapping[str, WantedTensor], path: Path, half: bool) -> None:
        self._wanted, self._path = dict(wanted), path
        self._dtype = BFLOAT16 if half else np.dtype(np.float32)
        values = np.random.default_rng(0).standard_normal(BLOCK).astype(np.float32)
        self._block = values * np.float32(STANDARD_DEVIATION)

    def names(self) -> Iterable[str]:
        return self._wanted.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._wanted[name].shape

    def dtype(self, name: str) -> np.dtype[Any]:
        if self._wanted[name].numbers:
            return np.dtype(np.int64)
        return np.dtype(np.float32) if self._wanted[name].exact else self._dtype

    def path(self, name: str) -> Path:
        return self._path

    def get(self, name: str) -> Array:
        if self._wanted[name].numbers:
            return np.resize(np.arange(self.shape(name)[-1]), self.shape(name))
        block = np.roll(self._block, xxhash.xxh32_intdigest(name.encode()) % BLOCK)
        if len(self.shape(name)) == 1 and name.endswith("weight"):
            block += 1
        return np.resize(block.astype(self.dtype(name)), self.shape(name))


def dummy_checkpoint(source: Source, spec: DecoderConfig, names: TensorNames) -> DummyCheckpoint:
    """Make random weights for a model of these files. ModelError: its weights are quantized."""
    config = source.config
    if config.get("quantization_config") is not None:
        raise ModelError(
            f"{source.where}: --load-format dummy makes float weights, and this model's are quantized: take "
            "quantization_config out by --hf-overrides, and give --quantization"
        )
    named = config.get("torch_dtype") or config.get("dtype")
    return DummyCheckpoint(wanted_tensors(spec, names), source.path, named in ("bfloat16", "float16"))
