"""Opens models as an engine does, for tests that need no engine."""

from __future__ import annotations

from pathlib import Path

from quire.devices.protocol import Backend
from quire.model.info import AS_IT_IS, Asked, AskedDtype, ModelInfo, Reading
from quire.model.load import open_files
from quire.model.loaded import LoadedModel
from quire.model.shard import WHOLE, Shard
from quire.weights.hub import find_model
from quire.weights.schemes import Quantization


def inspect_model(
    model: str | Path,
    dtype: AskedDtype = "auto",
    quantized: Quantization | None = None,
    reading: Reading = AS_IT_IS,
) -> ModelInfo:
    """Read what the headers of a directory, a GGUF file or a hub id describe."""
    return open_files(find_model(str(model)), Asked(dtype, quantized, reading)).info


def load_model(
    model: str | Path,
    backend: Backend,
    dtype: AskedDtype = "auto",
    quantized: Quantization | None = None,
    reading: Reading = AS_IT_IS,
    shard: Shard = WHOLE,
) -> LoadedModel:
    """Load a directory, a GGUF file or a hub id."""
    return open_files(find_model(str(model)), Asked(dtype, quantized, reading)).load(backend, shard)
