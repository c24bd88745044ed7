"""Phi 1 to 4, and StarCoder2."""

from __future__ import annotations

from quire.model.families.config import ConfigReader
from quire.model.families.llama import Keys, head_size, llama_like
from quire.model.families.mistral import one_window
from quire.model.families.names import TensorNames
from quire.model.families.rope import rotary_dim
from quire.model.spec import ArchSpec

PHI_NAMES = TensorNames(
    norm="model.final_layernorm",
    out="self_attn.dense",
    q_norm="self_attn.q_layernorm",
    k_norm="self_attn.k_layernorm",
    up="mlp.fc1",
    down="mlp.fc2",
)
PHI3_NAMES = TensorNames(qkv="self_attn.qkv_proj", gate_up="mlp.gate_up_proj")
STARCODER2_NAMES = TensorNames(up="mlp.c_fc", down="mlp.c_proj")


def read_phi(config: ConfigReader) -> ArchSpec:
    """Phi-1, 1.5 and 2: attention and MLP beside each other behind one LayerNorm, biases everywhere."""
    qk_norm = config.boolean("qk_layernorm", False)
    return llama_like(
        config,
        "PhiForCausalLM",
        keys=Keys(eps="layer_norm_eps"),
        default_max_position=2048,
        default_activation="gelu_new",
        default_eps=1e-5,
        rotated=rotary_dim(config, head_size(config), 0.5),
        placement="parallel",
        norm="layer",
        norm_bias=True,
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        head_bias=True,
        gated=False,
        qk_norm="head" if qk_norm else None,
        qk_norm_bias=qk_norm,
    )


def read_phi3(config: ConfigReader) -> ArchSpec:
    """Phi-3, 3.5 and 4 (dense, text): Llama with fused projections, and longrope where the context is long."""
    for key, value in (("full_attn_mod", 1), ("interpolate_factor", 1), ("lm_head_bias", False)):
        config.expect(key, value)
    config.get("original_max_position_embeddings")  # longrope's, read there
    return llama_like(
        config,
        "Phi3ForCausalLM",
        default_max_position=4096,
        default_eps=1e-5,
        rotated=rotary_dim(config, head_size(config)),
        windows=one_window(config, None),
    )


def read_starcoder2(config: ConfigReader) -> ArchSpec:
    """Lozhkov et al. 2024, arXiv:2402.19173."""
    for key, value in (("norm_type", "layer_norm"), ("mlp_type", "default"), ("scale_attn_weights", True)):
        config.expect(key, value)
    for key in ("activation_function", "attention_softmax_in_fp32", "scale_attention_softmax_in_fp32"):
        config.get(key)  # left from an older format; hidden_act prevails and softmax is always exact
    config.expect("layer_norm_epsilon", config.number("norm_epsilon", 1e-5))
    bias = config.boolean("use_bias", True)
    return llama_like(
        config,
        "Starcoder2ForCausalLM",
        keys=Keys(eps="norm_epsilon"),
        default_max_position=4096,
        default_kv_heads=2,
        default_activation="gelu_pytorch_tanh",
        default_eps=1e-5,
        default_tied=True,
        norm="layer",
        norm_bias=True,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bias,
        gated=False,
        windows=one_window(config, None),
    )
