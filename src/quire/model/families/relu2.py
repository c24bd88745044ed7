"""Decoders with a squared ReLU: Arcee, BitNet, Jais 2, nanochat, Nemotron; and Apertus with its XIELU."""

from __future__ import annotations

from msgspec.structs import replace

from quire.model.families.config import ConfigReader
from quire.model.families.family import Family, biases, head_size, read_decoder
from quire.model.families.gemma import cap
from quire.model.families.names import LLAMA_NAMES
from quire.model.families.rope import read_rope, rotary_dim
from quire.model.parts.decoder import DecoderConfig


def read_arcee(config: ConfigReader) -> DecoderConfig:
    bias = config.boolean("mlp_bias", False)
    return read_decoder(config, **biases(config), mlp_bias=bias, mlp_gated=False)


def read_jais2(config: ConfigReader) -> DecoderConfig:
    bias = config.boolean("mlp_bias")
    return read_decoder(
        config, **biases(config), mlp_bias=bias, mlp_gated=False, norm_kind="layer", norm_bias=True
    )


def read_nemotron(config: ConfigReader) -> DecoderConfig:
    """Parmar et al. 2024, arXiv:2402.16819: LayerNorms that add one to their weights, partly rotated heads."""
    return read_decoder(
        config,
        **biases(config),
        mlp_bias=config.boolean("mlp_bias", False),
        rotated=rotary_dim(config, head_size(config), 0.5),
        mlp_gated=False,
        norm_kind="layer",
        norm_bias=True,
    )


def read_bitnet(config: ConfigReader) -> DecoderConfig:
    """Ma et al. 2025, arXiv:2504.12285, in floats: norms before the projections that end attention and MLP."""
    return read_decoder(config, **biases(config), attention_out_norm=True, mlp_down_norm=True)


def read_nanochat(config: ConfigReader) -> DecoderConfig:
    """Norms have no weights and one follows the embedding; heads turn backwards before they are normed."""
    rope = read_rope(config, head_size(config), config.integer("max_position_embeddings"))
    return read_decoder(
        config,
        **biases(config),
        rope=replace(rope, backwards=True),
        mlp_gated=False,
        norm_weight=False,
        embedding_norm=True,
        qk_norm="head",
        qk_norm_weight=False,
        qk_norm_after_rope=True,
        head_cap=cap(config, "final_logit_softcapping"),
    )


def read_apertus(config: ConfigReader) -> DecoderConfig:
    """Swiss AI 2025, arXiv:2509.14233."""
    if config.get("hidden_act") != "xielu":
        raise config.wrong("hidden_act", config.get("hidden_act"), "xielu")
    config.expect("output_vocab_size", None, config.integer("vocab_size"))
    return read_decoder(
        config, **biases(config), mlp_gated=False, qk_norm="head", activation="relu", mlp_xielu=True
    )


APERTUS_NAMES = LLAMA_NAMES.changed(
    {"attention_norm": "attention_layernorm", "mlp_norm": "feedforward_layernorm"}
)
APERTUS = {
    "hidden_act": "xielu",
    "max_position_embeddings": 65536,
    "rms_norm_eps": 1e-5,
    "rope_theta": 12e6,
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 12e6,
        "factor": 8.0,
        "original_max_position_embeddings": 8192,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    },
}
ARCEE = {"hidden_act": "relu2", "max_position_embeddings": 4096, "rms_norm_eps": 1e-5}
FAMILIES = {
    "ArceeForCausalLM": Family("AFM 4.5B", read_arcee, defaults=ARCEE),
    "Jais2ForCausalLM": Family(
        "Jais 2",
        read_jais2,
        defaults={**ARCEE, "max_position_embeddings": 8192, "attention_bias": True, "mlp_bias": True},
        spellings={"rms_norm_eps": "layer_norm_eps"},
    ),
    "NemotronForCausalLM": Family(
        "Nemotron 4, Minitron", read_nemotron, {"norm_offset": 1.0}, ARCEE, {"rms_norm_eps": "norm_eps"}
    ),
    "BitNetForCausalLM": Family(
        "BitNet b1.58 (its float weights)",
        read_bitnet,
        {"attention.out_norm": "self_attn.attn_sub_norm", "mlp.down_norm": "mlp.ffn_sub_norm"},
        {**ARCEE, "num_key_value_heads": 5, "max_position_embeddings": 2048, "rope_theta": 5e5},
    ),
    "NanoChatForCausalLM": Family(
        "nanochat",
        read_nanochat,
        {"mlp.up": "mlp.fc1", "mlp.down": "mlp.fc2"},
        {**ARCEE, "max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "final_logit_softcapping": 15.0},
    ),
    "ApertusForCausalLM": Family("Apertus 8B, 70B", read_apertus, APERTUS_NAMES, APERTUS),
    "Apertus1p5TextForCausalLM": Family(
        "Apertus 1.5 (text)", read_apertus, APERTUS_NAMES, {**APERTUS, "vocab_size": 266752}
    ),
}
