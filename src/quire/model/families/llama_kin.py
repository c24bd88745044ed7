"""Llama's nearest kin, which differ from it by a bias, a rope or the layers that slide."""

from __future__ import annotations

from quire.model.families.config import ConfigReader
from quire.model.families.family import (
    FULL,
    Family,
    alternate,
    head_size,
    layer_kinds,
    num_layers,
    read_decoder,
    windows_of,
)
from quire.model.families.llama import read_llama
from quire.model.families.rope import rotary_dim
from quire.model.parts.decoder import DecoderConfig


def read_smollm3(config: ConfigReader) -> DecoderConfig:
    """By default every fourth layer has no positions."""
    layers, interval = num_layers(config), config.integer("no_rope_layer_interval")
    default = [int((i + 1) % interval != 0) for i in range(layers)]
    turned = layer_kinds(config, default, (0, 1), "no_rope_layers")
    config.expect("use_sliding_window", False)
    config.skip("max_window_layers")
    windows = windows_of(config, layer_kinds(config, [FULL] * layers))
    return read_llama(config, scores_window=windows, turned=turned)


def read_stablelm(config: ConfigReader) -> DecoderConfig:
    """LayerNorm and partly rotated heads."""
    return read_decoder(
        config,
        rotated=rotary_dim(config, head_size(config), 0.25),
        norm_kind="layer",
        norm_bias=True,
        attention_qkv_bias=config.boolean("use_qkv_bias", False),
        qk_norm="own_head" if config.boolean("qk_layernorm", False) else None,
        placement="parallel" if config.boolean("use_parallel_residual", False) else "pre",
    )


def read_cwm(config: ConfigReader) -> DecoderConfig:
    """Code World Model (Meta 2025, arXiv:2510.02387): every fourth layer, the first included, sees all positions."""
    kinds = layer_kinds(config, alternate(num_layers(config), 4, offset=0))
    return read_decoder(
        config, mlp_bias=config.boolean("mlp_bias", False), scores_window=windows_of(config, kinds)
    )


def read_seed_oss(config: ConfigReader) -> DecoderConfig:
    return read_decoder(
        config,
        attention_qkv_bias=config.boolean("attention_bias"),
        attention_out_bias=config.boolean("attention_out_bias", False),
        mlp_bias=config.boolean("mlp_bias", False),
    )


def read_helium(config: ConfigReader) -> DecoderConfig:
    """Neighbouring rotary pairs."""
    bias = config.boolean("mlp_bias", False)
    return read_decoder(config, attention_qkv_bias=config.boolean("attention_bias", False), mlp_bias=bias)


FAMILIES = {
    "SmolLM3ForCausalLM": Family(
        "SmolLM3",
        read_smollm3,
        defaults={
            "num_key_value_heads": 4,
            "max_position_embeddings": 32768,
            "rope_theta": 2e6,
            "no_rope_layer_interval": 4,
            "tie_word_embeddings": True,
        },
    ),
    "StableLmForCausalLM": Family(
        "StableLM 3B, 2",
        read_stablelm,
        {
            "attention.q_norm": "self_attn.q_layernorm.norms",
            "attention.k_norm": "self_attn.k_layernorm.norms",
            "norm_by_head": True,
        },
        {"num_key_value_heads": 32, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
        {"rms_norm_eps": "layer_norm_eps"},
    ),
    "CwmForCausalLM": Family(
        "CWM 32B",
        read_cwm,
        defaults={
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "sliding_window": 8192,
            "rope_theta": 1e6,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 1e6,
                "factor": 16.0,
                "high_freq_factor": 4.0,
                "low_freq_factor": 1.0,
                "original_max_position_embeddings": 8192,
            },
        },
    ),
    "Emu3ForCausalLM": Family(
        "Emu3 8B, its text model",
        read_llama,
        defaults={
            "num_key_value_heads": 8,
            "max_position_embeddings": 9216,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
        },
    ),
    "SeedOssForCausalLM": Family(
        "Seed-OSS 36B",
        read_seed_oss,
        defaults={
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 524288,
            "attention_bias": True,
        },
    ),
    "HeliumForCausalLM": Family(
        "Helium 1 2B",
        read_helium,
        {"interleaved": True},
        {
            "num_key_value_heads": 20,
            "head_dim": 128,
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-8,
            "rope_theta": 1e5,
        },
    ),
    "ExaoneForCausalLM": Family(
        "EXAONE 3.0, 3.5, Deep",
        read_llama,
        {
            "base": "transformer.",
            "embedding": "transformer.wte",
            "norm": "transformer.ln_f",
            "layer": "transformer.h.{i}.",
            "attention_norm": "ln_1",
            "attention.q": "attn.attention.q_proj",
            "attention.k": "attn.attention.k_proj",
            "attention.v": "attn.attention.v_proj",
            "attention.out": "attn.attention.out_proj",
            "mlp_norm": "ln_2",
            "mlp.gate": "mlp.c_fc_0",
            "mlp.up": "mlp.c_fc_1",
            "mlp.down": "mlp.c_proj",
            "ignored": (r"transformer\.(h\.\d+\.attn\.attention\.)?rotary(_emb)?\.inv_freq",),
        },
        {"num_key_value_heads": 8, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "rope_theta": 5e5},
        {
            "num_hidden_layers": "num_hidden_layers num_layers",
            "hidden_act": "hidden_act activation_function",
            "rms_norm_eps": "rms_norm_eps layer_norm_epsilon",
        },
    ),
    "InternLM3ForCausalLM": Family(
        "InternLM 3",
        read_llama,
        defaults={
            "num_key_value_heads": 2,
            "head_dim": 128,
            "max_position_embeddings": 32768,
            "rms_norm_eps": 1e-5,
        },
        spellings={"attention_bias": "attention_bias qkv_bias", "mlp_bias": "mlp_bias bias"},
    ),
    "IQuestCoderForCausalLM": Family(
        "IQuest-Coder",
        read_llama,
        defaults={
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
        },
    ),
}
