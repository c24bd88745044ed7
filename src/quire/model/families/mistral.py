"""Mistral and its kin: Llama with one sliding window on all layers, on some, or none; and Mixtral."""

from __future__ import annotations

from quire.devices.protocol import Temperature
from quire.model.families.config import ConfigReader
from quire.model.families.family import (
    FULL,
    SLIDING,
    Family,
    head_size,
    layer_kinds,
    num_layers,
    read_decoder,
    read_moe,
    windows_of,
)
from quire.model.families.names import LLAMA_NAMES
from quire.model.families.rope import read_rope
from quire.model.parts.decoder import DecoderConfig

MIXTRAL_NAMES = LLAMA_NAMES.changed(
    {
        "mixture.router": "block_sparse_moe.gate",
        "mixture.experts": "block_sparse_moe.experts.{e}.",
        "mixture.expert.gate": "w1",
        "mixture.expert.up": "w3",
        "mixture.expert.down": "w2",
    }
)


def read_mistral(config: ConfigReader) -> DecoderConfig:
    """Jiang et al. 2023, arXiv:2310.06825. A null window (v0.2 and later) is full attention."""
    return read_decoder(config, scores_window=config.optional_integer("sliding_window"))


def read_ministral(config: ConfigReader) -> DecoderConfig:
    """The window is on the layers that layer_types names, by default on all."""
    kind = FULL if config.get("sliding_window") is None else SLIDING
    kinds = layer_kinds(config, [kind] * num_layers(config))
    return read_decoder(config, scores_window=windows_of(config, kinds))


def read_mixtral(config: ConfigReader) -> DecoderConfig:
    """Jiang et al. 2024, arXiv:2401.04088."""
    moe = read_moe(config, inner="intermediate_size", renormalize=True)
    return read_decoder(config, scores_window=config.optional_integer("sliding_window"), moe=moe)


def read_ministral3(config: ConfigReader) -> DecoderConfig:
    """Mistral AI 2025: queries far from the trained length are scaled up."""
    inner = config.section("rope_scaling") or config.section("rope_parameters")
    assert inner is not None  # the class has one by default
    inner.skip("max_position_embeddings")
    beta = inner.number("llama_4_scaling_beta")
    rope = read_rope(config, head_size(config), config.integer("max_position_embeddings"))
    length = rope.original_max_position
    if rope.kind != "yarn":
        length = inner.integer("original_max_position_embeddings")
    window, far = config.optional_integer("sliding_window"), Temperature(beta, length)
    return read_decoder(config, rope=rope, scores_window=window, attention_temperature=far)


MISTRAL = {"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096}
FAMILIES = {
    "MistralForCausalLM": Family("Mistral 7B (all versions), Nemo", read_mistral, defaults=MISTRAL),
    "MinistralForCausalLM": Family("Ministral 8B", read_ministral, defaults=MISTRAL),
    "MixtralForCausalLM": Family(
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
    "Ministral3ForCausalLM": Family(
        "Ministral 3",
        read_ministral3,
        defaults={
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 262144,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e6,
                "factor": 16.0,
                "original_max_position_embeddings": 16384,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "mscale_all_dim": 1.0,
                "mscale": 1.0,
                "llama_4_scaling_beta": 0.1,
            },
        },
    ),
}
