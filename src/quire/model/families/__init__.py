"""The table of supported families: a Hugging Face config becomes an ArchSpec and the names of its tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from quire.errors import ModelError, UnknownArchitectureError
from quire.model.families.config import ConfigReader
from quire.model.families.llama import read_llama
from quire.model.families.mistral import read_mistral
from quire.model.families.names import TensorNames
from quire.model.families.qwen import read_qwen2, read_qwen3
from quire.model.spec import ArchSpec


@dataclass(frozen=True, slots=True)
class Family:
    """One architecture: how its config is read and where its tensors are."""

    read: Callable[[ConfigReader], ArchSpec]
    names: TensorNames = field(default_factory=TensorNames)


FAMILIES: Mapping[str, Family] = {
    "LlamaForCausalLM": Family(read_llama),
    "MistralForCausalLM": Family(read_mistral),
    "Qwen2ForCausalLM": Family(read_qwen2),
    "Qwen3ForCausalLM": Family(read_qwen3),
}
MODEL_TYPES: Mapping[str, str] = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}


def read_config(values: Mapping[str, Any], where: str = "config.json") -> tuple[ArchSpec, TensorNames]:
    """The spec and tensor names of a config. Raises ModelError for anything not understood in full."""
    config = ConfigReader(values, where)
    family = FAMILIES[_architecture(config)]
    for key in ("quantization_config", "compression_config"):
        if config.get(key) is not None:
            raise ModelError(
                f"{where}: {key}: quantized checkpoints are not supported yet; use the original weights"
            )
    spec = family.read(config)
    config.finish()
    return spec, family.names


def _architecture(config: ConfigReader) -> str:
    """The name in `architectures`, or what `model_type` stands for where that is absent."""
    names = config.get("architectures")
    if names is None:
        kind = config.get("model_type")
        names = [MODEL_TYPES.get(kind, f"model_type {kind!r}")] if isinstance(kind, str) else []
    if not isinstance(names, list) or len(names) != 1:
        raise config.wrong("architectures", names, "a list of one architecture")
    if names[0] not in FAMILIES:
        raise UnknownArchitectureError(
            f"{config.where}: architecture {names[0]} is not supported; supported are {', '.join(FAMILIES)}"
        )
    return str(names[0])
