"""Phi, StarCoder 2, GLM and ERNIE: decoders with partly or pairwise rotated heads, biases, or norms on both sides."""

from __future__ import annotations

from typing import Any

from quire.model.families.config import ConfigReader
from quire.model.families.family import Family, head_size, num_layers, read_decoder, read_moe
from quire.model.families.names import LLAMA_NAMES
from quire.model.families.rope import rotary_dim
from quire.model.parts.decoder import DecoderConfig


def read_glm(config: ConfigReader, **fields: Any) -> DecoderConfig:
    """arXiv:2406.12793."""
    rotated = rotary_dim(config, head_size(config), 0.5)
    return read_decoder(
        config, rotated=rotated, attention_qkv_bias=config.boolean("attention_bias"), **fields
    )


def read_glm4(config: ConfigReader) -> DecoderConfig:
    return read_glm(config, placement="sandwich")


GLM = {
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1.5625e-7,
    "attention_bias": True,
}


def read_ernie(config: ConfigReader, **fields: Any) -> DecoderConfig:
    bias = config.boolean("use_bias")
    return read_decoder(config, attention_qkv_bias=bias, attention_out_bias=bias, mlp_bias=bias, **fields)


def read_ernie_moe(config: ConfigReader) -> DecoderConfig:
    """Experts are chosen by a softmax and a correction; some layers, by their number, are mixtures."""
    config.expect("use_bias", False)  # its experts' biases would be refused with it
    config.expect("moe_norm_min", 1e-12)
    layers, start = num_layers(config), config.count("moe_layer_start_index")
    end, every = config.get("moe_layer_end_index"), config.integer("moe_layer_interval")
    if isinstance(end, bool) or not isinstance(end, int) or end < -1:
        raise config.wrong("moe_layer_end_index", end, "an integer >= -1")
    end = layers - 1 if end == -1 else end
    moe = read_moe(
        config,
        layers=[(i + 1) % every == 0 and start <= i <= end for i in range(layers)],
        shared=config.count("moe_num_shared_experts") * config.integer("moe_intermediate_size"),
        correction=True,
        renormalize=True,
    )
    return read_ernie(config, moe=moe)


ERNIE = {
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5e5,
    "tie_word_embeddings": True,
    "use_bias": False,
}


PHI_NAMES = LLAMA_NAMES.changed(
    {
        "norm": "model.final_layernorm",
        "attention.out": "self_attn.dense",
        "attention.q_norm": "self_attn.q_layernorm",
        "attention.k_norm": "self_attn.k_layernorm",
        "mlp.up": "mlp.fc1",
        "mlp.down": "mlp.fc2",
    }
)


def read_phi(config: ConfigReader) -> DecoderConfig:
    """Attention and MLP beside each other behind one LayerNorm, biases everywhere."""
    qk_norm = config.boolean("qk_layernorm", False)
    return read_decoder(
        config,
        rotated=rotary_dim(config, head_size(config), 0.5),
        placement="parallel",
        norm_kind="layer",
        norm_bias=True,
        attention_qkv_bias=True,
        attention_out_bias=True,
        mlp_bias=True,
        head_bias=True,
        mlp_gated=False,
        qk_norm="head" if qk_norm else None,
        qk_norm_bias=qk_norm,
    )


def read_phi3(config: ConfigReader) -> DecoderConfig:
    """Llama with fused projections, and longrope where the context is long."""
    for key, value in (("full_attn_mod", 1), ("interpolate_factor", 1), ("lm_head_bias", False)):
        config.expect(key, value)
    config.get("original_max_position_embeddings")  # longrope's, read there
    window = config.optional_integer("sliding_window")
    return read_decoder(config, rotated=rotary_dim(config, head_size(config)), scores_window=window)


def read_starcoder2(config: ConfigReader) -> DecoderConfig:
    """Lozhkov et al. 2024, arXiv:2402.19173."""
    for key, value in (("norm_type", "layer_norm"), ("mlp_type", "default"), ("scale_attn_weights", True)):
        config.expect(key, value)
    # left from an older format; hidden_act prevails and softmax is always exact
    config.skip("activation_function attention_softmax_in_fp32 scale_attention_softmax_in_fp32")
    config.expect("layer_norm_epsilon", config.number("rms_norm_eps", 1e-6))
    bias = config.boolean("use_bias")
    return read_decoder(
        config,
        norm_kind="layer",
        norm_bias=True,
        attention_qkv_bias=bias,
        attention_out_bias=bias,
        mlp_bias=bias,
        mlp_gated=False,
        scores_window=config.optional_integer("sliding_window"),
    )


FAMILIES = {
    "PhiForCausalLM": Family(
        "phi",
        "Phi-1, 1.5, 2",
        read_phi,
        PHI_NAMES,
        {"hidden_act": "gelu_new", "max_position_embeddings": 2048, "rms_norm_eps": 1e-5},
        {"rms_norm_eps": "layer_norm_eps"},
    ),
    "Phi3ForCausalLM": Family(
        "phi3",
        "Phi-3, 3.5, 4 (dense, text)",
        read_phi3,
        {"attention.qkv": "self_attn.qkv_proj", "mlp.gate_up": "mlp.gate_up_proj"},
        {"max_position_embeddings": 4096, "original_max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
    ),
    "Starcoder2ForCausalLM": Family(
        "starcoder2",
        "StarCoder2",
        read_starcoder2,
        {"mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj"},
        {
            "num_key_value_heads": 2,
            "hidden_act": "gelu_pytorch_tanh",
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "use_bias": True,
            "tie_word_embeddings": True,
        },
        {"rms_norm_eps": "norm_epsilon"},
    ),
    "GlmForCausalLM": Family(
        "glm", "GLM-4 9B (2024)", read_glm, {"interleaved": True, "mlp.gate_up": "mlp.gate_up_proj"}, GLM
    ),
    "Glm4ForCausalLM": Family(
        "glm4",
        "GLM-4 0414",
        read_glm4,
        {
            "interleaved": True,
            "mlp.gate_up": "mlp.gate_up_proj",
            "attention_post_norm": "post_self_attn_layernorm",
            "mlp_post_norm": "post_mlp_layernorm",
        },
        GLM,
    ),
    "Ernie4_5ForCausalLM": Family("ernie4_5", "Ernie 4.5 0.3B", read_ernie, {"interleaved": True}, ERNIE),
    "Ernie4_5_MoeForCausalLM": Family(
        "ernie4_5_moe",
        "Ernie 4.5 21B-A3B, 300B-A47B",
        read_ernie_moe,
        {
            "interleaved": True,
            "mixture.shared": "mlp.shared_experts.",
            "mixture.correction": "mlp.moe_statics.e_score_correction_bias",
            "correction_row": True,
        },
        {
            **{key: value for key, value in ERNIE.items() if key != "head_dim"},
            "num_key_value_heads": 4,
            "moe_intermediate_size": 1536,
            "num_experts": 64,
            "num_experts_per_tok": 6,
            "moe_num_shared_experts": 2,
            "moe_layer_start_index": 1,
            "moe_layer_end_index": -1,
            "moe_layer_interval": 1,
        },
        {"num_experts": "moe_num_experts num_experts", "num_experts_per_tok": "moe_k num_experts_per_tok"},
    ),
}
