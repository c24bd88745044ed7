"""GLM-4: half of each head rotated, in neighbouring pairs; the newer form has norms on both sides."""

from __future__ import annotations

from functools import partial
from typing import Any

from quire.model.families.config import ConfigReader
from quire.model.families.family import Family, head_size, read_decoder
from quire.model.families.rope import rotary_dim
from quire.model.parts.decoder import DecoderConfig


def read_glm(config: ConfigReader, **fields: Any) -> DecoderConfig:
    """arXiv:2406.12793."""
    rotated = rotary_dim(config, head_size(config), 0.5)
    return read_decoder(
        config, rotated=rotated, attention_qkv_bias=config.boolean("attention_bias"), **fields
    )


GLM = {
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1.5625e-7,
    "attention_bias": True,
}
FAMILIES = {
    "GlmForCausalLM": Family(
        "GLM-4 9B (2024)", read_glm, {"interleaved": True, "mlp.gate_up": "mlp.gate_up_proj"}, GLM
    ),
    "Glm4ForCausalLM": Family(
        "GLM-4 0414",
        partial(read_glm, placement="sandwich"),
        {
            "interleaved": True,
            "mlp.gate_up": "mlp.gate_up_proj",
            "attention_post_norm": "post_self_attn_layernorm",
            "mlp_post_norm": "post_mlp_layernorm",
        },
        GLM,
    ),
}
