"""gpt-oss: attention sinks, clamped SwiGLU, biases throughout, experts in MXFP4 as published."""

from __future__ import annotations

from quire.model.families.config import ConfigReader
from quire.model.families.family import (
    Family,
    alternate,
    biases,
    layer_kinds,
    num_layers,
    read_decoder,
    read_moe,
    windows_of,
)
from quire.model.families.names import LLAMA_NAMES
from quire.model.parts.decoder import DecoderConfig

GPT_OSS_NAMES = LLAMA_NAMES.changed(
    {
        "mixture.router": "mlp.router",
        "mixture.experts": "mlp.experts.",
        "mixture.expert.up": "gate_up_proj",
        "mixture.expert.down": "down_proj",
        "expert_stack": "columns",
    }
)
# YARN is the class's default rope.
YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def read_gpt_oss(config: ConfigReader) -> DecoderConfig:
    """OpenAI 2025, arXiv:2508.10925."""
    config.expect_all({"hidden_act": "silu", "swiglu_limit": 7.0, "swiglu_alpha": 1.702})
    config.skip("experts_per_token initial_context_length")  # what num_experts_per_tok and the rope say
    kinds = layer_kinds(config, alternate(num_layers(config), 2))
    return read_decoder(
        config,
        activation="clamped_swiglu",
        **biases(config),
        scores_sinks=True,
        scores_window=windows_of(config, kinds),
        moe=read_moe(config, inner="intermediate_size", bias=True, softmax_after=True),
    )


FAMILIES = {
    "GptOssForCausalLM": Family(
        "gpt-oss 20B, 120B",
        read_gpt_oss,
        GPT_OSS_NAMES,
        {
            "num_key_value_heads": 8,
            "head_dim": 64,
            "intermediate_size": 2880,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 150000.0,
            "rope_parameters": YARN,
            "attention_bias": True,
            "sliding_window": 128,
            "num_experts": 128,
            "num_experts_per_tok": 4,
        },
        {"num_experts": "num_local_experts num_experts"},
        quantized={"mxfp4": {"expert_stack": "rows"}},
    )
}
