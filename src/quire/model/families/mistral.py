"""Mistral and its kin: Llama with one sliding window on all layers, on some, or none; and Mixtral."""

from __future__ import annotations

from quire.model.families.config import ConfigReader
from quire.model.families.family import (
    FULL,
    SLIDING,
    Family,
    layer_kinds,
    num_layers,
    one_window,
    read_decoder,
    read_moe,
    windows_of,
)
from quire.model.families.names import TensorNames
from quire.model.spec import ArchSpec

MIXTRAL_NAMES = TensorNames(
    router="block_sparse_moe.gate",
    experts="block_sparse_moe.experts.{e}.",
    expert_gate="w1",
    expert_up="w3",
    expert_down="w2",
)


def read_mistral(config: ConfigReader) -> ArchSpec:
    """Jiang et al. 2023, arXiv:2310.06825. A null window (v0.2 and later) is full attention."""
    return read_decoder(config, windows=one_window(config))


def read_ministral(config: ConfigReader) -> ArchSpec:
    """The window is on the layers that layer_types names, by default on all."""
    kind = FULL if config.get("sliding_window") is None else SLIDING
    kinds = layer_kinds(config, [kind] * num_layers(config))
    return read_decoder(config, windows=windows_of(config, kinds))


def read_mixtral(config: ConfigReader) -> ArchSpec:
    """Jiang et al. 2024, arXiv:2401.04088."""
    moe = read_moe(config, inner="intermediate_size", renormalize=True)
    return read_decoder(config, windows=one_window(config), moe=moe)


MISTRAL = {
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
    "sliding_window": 4096,
}
FAMILIES = {
    "MistralForCausalLM": Family(
        "mistral", "Mistral 7B (all versions), Nemo", read_mistral, defaults=MISTRAL
    ),
    "MinistralForCausalLM": Family("ministral", "Ministral 8B", read_ministral, defaults=MISTRAL),
    "MixtralForCausalLM": Family(
        "mixtral",
        "Mixtral 8x7B, 8x22B",
        read_mixtral,
        MIXTRAL_NAMES,
        {
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
            "num_experts": 8,
            "num_experts_per_tok": 2,
        },
        {"num_experts": "num_local_experts num_experts"},
    ),
}
