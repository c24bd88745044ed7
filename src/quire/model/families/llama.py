"""Llama and its nearest kin: Granite, SmolLM3, StableLM."""

from __future__ import annotations

from quire.model.families.config import ConfigReader
from quire.model.families.family import (
    FULL,
    Family,
    biases,
    head_size,
    layer_kinds,
    num_layers,
    read_decoder,
    rotate_some,
    windows_of,
)
from quire.model.families.names import TensorNames
from quire.model.families.rope import rotary_dim
from quire.model.spec import ArchSpec


def read_llama(config: ConfigReader) -> ArchSpec:
    return read_decoder(config, **biases(config), mlp_bias=config.boolean("mlp_bias", False))


def granite_multipliers(config: ConfigReader) -> dict[str, float]:
    scaling = config.number("logits_scaling")
    if scaling == 0:
        raise config.wrong("logits_scaling", scaling, "greater than 0")
    return {
        "attention_scale": config.number("attention_multiplier"),
        "embedding_scale": config.number("embedding_multiplier"),
        "residual_multiplier": config.number("residual_multiplier"),
        "logit_scale": 1.0 / scaling,
    }


def read_granite(config: ConfigReader) -> ArchSpec:
    bias = config.boolean("mlp_bias", False)
    return read_decoder(config, **biases(config), mlp_bias=bias, **granite_multipliers(config))


def read_smollm3(config: ConfigReader) -> ArchSpec:
    """By default every fourth layer has no positions."""
    layers, interval = num_layers(config), config.integer("no_rope_layer_interval")
    turned = config.get("no_rope_layers")
    turned = [int((i + 1) % interval != 0) for i in range(layers)] if turned is None else turned
    if not isinstance(turned, list) or len(turned) != layers or any(t not in (0, 1) for t in turned):
        raise config.wrong("no_rope_layers", turned, f"{layers} entries, each 0 or 1")
    config.expect("use_sliding_window", False)
    config.skip("max_window_layers")
    windows = windows_of(config, layer_kinds(config, [FULL] * layers))
    bias = config.boolean("mlp_bias", False)
    return rotate_some(read_decoder(config, **biases(config), mlp_bias=bias, windows=windows), turned)


def read_stablelm(config: ConfigReader) -> ArchSpec:
    """LayerNorm and partly rotated heads."""
    return read_decoder(
        config,
        rotated=rotary_dim(config, head_size(config), 0.25),
        norm="layer",
        norm_bias=True,
        qkv_bias=config.boolean("use_qkv_bias", False),
        qk_norm="own_head" if config.boolean("qk_layernorm", False) else None,
        placement="parallel" if config.boolean("use_parallel_residual", False) else "pre",
    )


LLAMA = {"max_position_embeddings": 2048, "rms_norm_eps": 1e-6}
MULTIPLIERS = {
    "embedding_multiplier": 1.0,
    "logits_scaling": 1.0,
    "residual_multiplier": 1.0,
    "attention_multiplier": 1.0,
}
FAMILIES = {
    "LlamaForCausalLM": Family(
        "llama", "Llama 2, 3, 3.1, 3.2, 3.3; TinyLlama, SmolLM 2, Yi", read_llama, defaults=LLAMA
    ),
    "GraniteForCausalLM": Family("granite", "Granite 3", read_granite, defaults={**LLAMA, **MULTIPLIERS}),
    "SmolLM3ForCausalLM": Family(
        "smollm3",
        "SmolLM3",
        read_smollm3,
        defaults={
            "num_key_value_heads": 4,
            "max_position_embeddings": 32768,
            "rms_norm_eps": 1e-6,
            "rope_theta": 2e6,
            "no_rope_layer_interval": 4,
            "tie_word_embeddings": True,
        },
    ),
    "StableLmForCausalLM": Family(
        "stablelm",
        "StableLM 3B, 2",
        read_stablelm,
        TensorNames(
            q_norm="self_attn.q_layernorm.norms", k_norm="self_attn.k_layernorm.norms", norm_by_head=True
        ),
        {"num_key_value_heads": 32, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
        {"rms_norm_eps": "layer_norm_eps"},
    ),
}
