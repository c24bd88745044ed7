"""GLM-4: half of each head rotated, in neighbouring pairs; the newer form has norms on both sides."""

from __future__ import annotations

from typing import Any

from quire.model.families.config import ConfigReader
from quire.model.families.llama import llama_like
from quire.model.families.names import TensorNames
from quire.model.families.rope import rotary_dim
from quire.model.spec import ArchSpec

GLM_NAMES = TensorNames(interleaved=True, gate_up="mlp.gate_up_proj")
GLM4_NAMES = TensorNames(
    interleaved=True,
    gate_up="mlp.gate_up_proj",
    attention_post_norm="post_self_attn_layernorm",
    mlp_post_norm="post_mlp_layernorm",
)


def read_glm(config: ConfigReader) -> ArchSpec:
    """GLM-4 9B of 2024. arXiv:2406.12793."""
    return _glm(config, "GlmForCausalLM")


def read_glm4(config: ConfigReader) -> ArchSpec:
    """GLM-4 0414, 9B and 32B."""
    return _glm(config, "Glm4ForCausalLM", placement="sandwich")


def _glm(config: ConfigReader, architecture: str, **fields: Any) -> ArchSpec:
    head_dim = config.integer("head_dim", 128)
    return llama_like(
        config,
        architecture,
        default_max_position=131072,
        default_kv_heads=2,
        default_head_dim=128,
        default_eps=1.5625e-7,
        rotated=rotary_dim(config, head_dim, 0.5),
        qkv_bias=config.boolean("attention_bias", True),
        **fields,
    )
