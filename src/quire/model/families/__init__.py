"""The table of supported families: a Hugging Face config becomes an ArchSpec and the names of its tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from quire.errors import ModelError, UnknownArchitectureError
from quire.model.families import llama, mistral, qwen
from quire.model.families.config import ConfigReader
from quire.model.families.names import TensorNames
from quire.model.spec import ArchSpec


@dataclass(frozen=True, slots=True)
class Family:
    """One architecture: how its config is read, where its tensors are, and which models it is that of.

    `names` may depend on the spec.
    """

    model_type: str
    models: str
    read: Callable[[ConfigReader], ArchSpec]
    names: TensorNames | Callable[[ArchSpec], TensorNames] = field(default_factory=TensorNames)


FAMILIES: Mapping[str, Family] = {
    "LlamaForCausalLM": Family(
        "llama", "Llama 2, 3, 3.1, 3.2, 3.3; TinyLlama, SmolLM 2, Yi", llama.read_llama
    ),
    "MistralForCausalLM": Family("mistral", "Mistral 7B (all versions), Nemo", mistral.read_mistral),
    "MinistralForCausalLM": Family("ministral", "Ministral 8B", mistral.read_ministral),
    "MixtralForCausalLM": Family(
        "mixtral", "Mixtral 8x7B, 8x22B", mistral.read_mixtral, mistral.MIXTRAL_NAMES
    ),
    "Qwen2ForCausalLM": Family("qwen2", "Qwen2, Qwen2.5", qwen.read_qwen2),
    "Qwen2MoeForCausalLM": Family("qwen2_moe", "Qwen1.5-MoE, Qwen2-57B-A14B", qwen.read_qwen2_moe),
    "Qwen3ForCausalLM": Family("qwen3", "Qwen3", qwen.read_qwen3),
    "Qwen3MoeForCausalLM": Family("qwen3_moe", "Qwen3-30B-A3B, Qwen3-235B-A22B", qwen.read_qwen3_moe),
    "GraniteForCausalLM": Family("granite", "Granite 3", llama.read_granite),
    "SmolLM3ForCausalLM": Family("smollm3", "SmolLM3", llama.read_smollm3),
    "StableLmForCausalLM": Family("stablelm", "StableLM 3B, 2", llama.read_stablelm, llama.STABLELM_NAMES),
}
MODEL_TYPES: Mapping[str, str] = {family.model_type: name for name, family in FAMILIES.items()}


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
    return spec, family.names(spec) if callable(family.names) else family.names


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
