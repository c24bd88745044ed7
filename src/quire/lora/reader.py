"""Reads a served model's adapters, and counts the memory that they may take. Knows models, no request."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from quire.devices.adapters import Adapter
from quire.devices.protocol import Backend
from quire.errors import ConfigError
from quire.lazy import Lazy
from quire.lora.options import LoraConfig
from quire.model.adapter import AdapterBase, build_adapter
from quire.model.cost import matrices
from quire.model.families.names import TensorNames
from quire.model.loaded import ServedModel
from quire.model.parts.decoder import DecoderConfig
from quire.weights.adapter import open_adapter
from quire.weights.checkpoint import Checkpoint

if TYPE_CHECKING:
    from quire.model.gguf import adapted as gguf
else:
    gguf = Lazy("quire.model.gguf.adapted")

TENSORS_OF_A_MODULE = 4  # A, B, a magnitude and a bias

Reader = Callable[[Path], tuple[str, Callable[[], Adapter]]]


def adapter_base(served: ServedModel, backend: Backend) -> AdapterBase:
    """Describe the model as adapters change it. ConfigError if it takes none."""
    model = served.own("--enable-lora")
    if model.names is None:
        raise ConfigError(
            f"--enable-lora: {model.info.directory} was built by an older version: run `quire build` again"
        )
    names, opened = model.names, model.open
    if model.family is not None:
        names = model.family()
        if opened is not None:
            opened = partial(_by_family_names, model.spec, names, model.names, opened)
    return AdapterBase(
        model.decoder,
        names,
        backend,
        model.dtype,
        opened,
        model.shard,
        None if model.info.pooling is None else model.info.head_of,
    )


def _by_family_names(
    config: DecoderConfig, names: TensorNames, own: TensorNames, opened: Callable[[], Checkpoint]
) -> Checkpoint:
    return gguf.by_family_names(config, names, own, opened())


def adapter_reader(model: Callable[[], ServedModel], backend: Backend, config: LoraConfig) -> Reader:
    """Make a reader of adapters for the model that is loaded now."""

    def read(path: Path) -> tuple[str, Callable[[], Adapter]]:
        base = adapter_base(model(), backend)
        files = open_adapter(path, config.max_lora_rank, most_tensors(base))
        return files.digest, partial(build_adapter, base, files, config.lora_dtype)

    return read


def most_tensors(base: AdapterBase) -> int:
    """Bound the tensors of an adapter's file by the modules that the base has names for."""
    spec, names = base.decoder.config, base.names
    experts = sum(routing.num_experts for routing in spec.routings)
    return TENSORS_OF_A_MODULE * (len(names.modules) * (1 + spec.num_layers) + 3 * experts)


def adapters_bytes(model: ServedModel, backend: Backend, config: LoraConfig, slots: int) -> int:
    """Count the bytes of `slots` adapters of the largest rank on all attention and MLPs. ConfigError: it takes none.

    Adapters of experts and whole tables take more, and most adapters less.
    """
    base = adapter_base(model, backend)
    narrow = config.lora_dtype == "bfloat16" or (config.lora_dtype == "auto" and base.dtype == "bfloat16")
    widths = [
        sum(matrix.shape)
        for path, matrix in matrices(base.decoder.weights).items()
        if ".attention." in path or ".mlp." in path
    ]
    return slots * config.max_lora_rank * sum(widths) * (2 if narrow else 4)
