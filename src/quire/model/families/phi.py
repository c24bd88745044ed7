"""Phi 1 to 4, and StarCoder2."""

from __future__ import annotations

from quire.model.families.config import ConfigReader
from quire.model.families.family import Family, head_size, read_decoder
from quire.model.families.names import LLAMA_NAMES
from quire.model.families.rope import rotary_dim
from quire.model.parts.decoder import DecoderConfig

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
    config.expect_all({"full_attn_mod": 1, "interpolate_factor": 1, "lm_head_bias": False})
    config.get("original_max_position_embeddings")  # longrope's, read there
    window = config.optional_integer("sliding_window")
    return read_decoder(config, rotated=rotary_dim(config, head_size(config)), scores_window=window)


def read_starcoder2(config: ConfigReader) -> DecoderConfig:
    """Lozhkov et al. 2024, arXiv:2402.19173."""
    config.expect_all({"norm_type": "layer_norm", "mlp_type": "default", "scale_attn_weights": True})
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
        "Phi-1, 1.5, 2",
        read_phi,
        PHI_NAMES,
        {"hidden_act": "gelu_new", "max_position_embeddings": 2048, "rms_norm_eps": 1e-5},
        {"rms_norm_eps": "layer_norm_eps"},
    ),
    "Phi3ForCausalLM": Family(
        "Phi-3, 3.5, 4 (dense, text)",
        read_phi3,
        {"attention.qkv": "self_attn.qkv_proj", "mlp.gate_up": "mlp.gate_up_proj"},
        {"max_position_embeddings": 4096, "original_max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
    ),
    "Starcoder2ForCausalLM": Family(
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
}
