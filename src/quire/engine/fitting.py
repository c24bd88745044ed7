"""What would fit, said when a model does not: ranks, or a quantization. Reads headers alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from quire.config import EngineConfig
from quire.devices.protocol import Backend
from quire.engine.source import find_files
from quire.engine.stages import share_of
from quire.errors import ConfigError, ModelError
from quire.model.load import ModelFiles
from quire.runtime.memory import GIB, MemoryNeed

RANKS = (2, 4, 8, 16, 32, 64)
SMALLER: tuple[Literal["int8", "int4"], ...] = ("int8", "int4")


def advice(config: EngineConfig, files: ModelFiles, backend: Backend, need: MemoryNeed, free: int) -> str:
    """Name the fewest ranks and the widest quantization whose weights leave room for a cache, in `free` bytes each.

    `backend` is an outline. Empty if the weights fit, and something else does not.
    """
    most = int(free * config.cache.gpu_memory_utilization) - need.workspace
    if need.weights < most:
        return ""
    fits = [
        words
        for words in (_ranks(config, files, backend, most), _quantization(config, files, backend, most))
        if words
    ]
    found = f"{' or '.join(fits)} would fit" if fits else "no number of ranks and no quantization would fit"
    return f"; {found}; `quire plan` shows what a model takes"


def _ranks(config: EngineConfig, files: ModelFiles, backend: Backend, most: int) -> str:
    """Return the option of more ranks than are asked for; those of a CPU share its memory."""
    parallel = config.parallel
    for size in RANKS:
        if backend.choices.shared_memory or files.ranks > 1 or size <= parallel.tensor_parallel_size:
            continue
        try:
            shard = share_of(replace(parallel, tensor_parallel_size=size), 0, files.info)
            weights = files.outline(backend, shard).weight_bytes
        except ConfigError:  # it cannot be divided so
            continue
        if weights < most:
            return f"--tensor-parallel-size {size} ({weights / GIB:.2f} GiB of weights on each GPU)"
    return ""


def _quantization(config: EngineConfig, files: ModelFiles, backend: Backend, most: int) -> str:
    """Return the option that makes weights smaller, if they are floats."""
    for name in SMALLER if files.info.quantized is None else ():
        try:
            other = find_files(replace(config.model, quantization=name), config.lora.spare_tokens)
            weights = other.outline(backend, share_of(config.parallel, 0, other.info)).weight_bytes
        except (ConfigError, ModelError):  # a built engine, a foreign model
            continue
        if weights < most:
            return f"--quantization {name} ({weights / GIB:.2f} GiB)"
    return ""
