"""gpt-oss: attention sinks, clamped SwiGLU, biases throughout, experts in MXFP4 as published."""

from __future__ import annotations

from quire.devices.protocol import Routing
from quire.model.families.config import ConfigReader
from quire.model.families.llama import alternate, layer_kinds, llama_like, windows_of
from quire.model.families.names import TensorNames
from quire.model.spec import ArchSpec, MoESpec

GPT_OSS_NAMES = TensorNames(
    router="mlp.router",
    experts="mlp.experts.",
    expert_up="gate_up_proj",
    expert_down="down_proj",
    expert_stack="plain",
)


def read_gpt_oss(config: ConfigReader) -> ArchSpec:
    """OpenAI 2025, arXiv:2508.10925."""
    for key, value in (("hidden_act", "silu"), ("swiglu_limit", 7.0), ("swiglu_alpha", 1.702)):
        config.expect(key, value)
    for key in ("experts_per_token", "initial_context_length"):
        config.get(key)  # what num_experts_per_tok and the rope say
    layers, bias = config.integer("num_hidden_layers", high=4096), config.boolean("attention_bias", True)
    inner = config.integer("intermediate_size", 2880)
    experts = config.integer("num_local_experts", 128)
    routing = Routing(experts, config.integer("num_experts_per_tok", 4, high=experts), softmax_after=True)
    return llama_like(
        config,
        "GptOssForCausalLM",
        default_max_position=131072,
        default_kv_heads=8,
        default_head_dim=64,
        default_eps=1e-5,
        default_theta=150000.0,
        activation="clamped_swiglu",
        intermediate_size=inner,
        qkv_bias=bias,
        o_bias=bias,
        sinks=True,
        windows=windows_of(config, layer_kinds(config, layers, alternate(layers, 2)), 128),
        moe=MoESpec(routing, inner, (True,) * layers, bias=True),
    )
