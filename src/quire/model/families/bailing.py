"""Ling and Ring of Bailing, and Sarvam's mixture: experts chosen as DeepSeek-V3 does, fused attention or a hybrid."""

from __future__ import annotations

from quire.model.families.config import ConfigReader
from quire.model.families.deepseek import read_latent
from quire.model.families.family import (
    FULL,
    Family,
    head_size,
    layer_kinds,
    num_layers,
    read_decoder,
    read_moe,
    sparse_after,
)
from quire.model.families.gated_delta import DELTA, LINEAR, decay_bound, delta_names, kda
from quire.model.families.mixtures import LIKE_V3, v3_moe
from quire.model.families.names import LLAMA_NAMES
from quire.model.families.rope import rotary_dim
from quire.model.parts.decoder import DecoderConfig

NAMES = LLAMA_NAMES.changed(
    {
        "embedding": "model.word_embeddings",
        "attention.qkv": "attention.query_key_value",
        "attention.q_norm": "attention.query_layernorm",
        "attention.k_norm": "attention.key_layernorm",
        "attention.out": "attention.dense",
        "mixture.correction": "mlp.gate.expert_bias",
        "mixture.shared": "mlp.shared_experts.",
    }
)
LATENT = [
    f"attention.{name}" for name in ("q", "q_down", "q_down_norm", "q_up", "kv_down", "kv_norm", "kv_up")
]
HYBRID_NAMES = NAMES.changed(
    {
        **delta_names("attention"),
        **{path: LLAMA_NAMES[path].replace("self_attn", "attention") for path in LATENT},
        "attention.gate": "attention.g_proj",
        "delta.gate": "attention.g_proj",
        "delta.steps": "attention.f_proj",
        "delta.out": "attention.dense",
        "plain_shared": True,
        "interleaved": True,
    }
)


def read_bailing(config: ConfigReader) -> DecoderConfig:
    """Ling 2.0, arXiv:2510.22115. The first generation chooses by softmax and norms no queries."""
    config.expect_all({"use_rmsnorm": True, "norm_head": False, "norm_softmax": False, "multi_gate": False})
    config.expect_all({"using_split_qkv_in_self_attention": False, "use_sliding_window": False})
    config.skip("sliding_window max_window_layers output_dropout router_dtype")
    config.skip("num_nextn_predict_layers num_mtp_layers mtp_loss_scaling_factor")
    size, inner = head_size(config), config.integer("moe_intermediate_size")
    score = config.get("score_function")
    if score not in ("softmax", "sigmoid"):
        raise config.wrong("score_function", score, "softmax or sigmoid")
    sigmoid = score == "sigmoid"
    config.expect("moe_router_enable_expert_bias", sigmoid, None)
    if not sigmoid:
        config.expect("n_group", 1, None)
        config.expect("topk_group", 1, None)
    shared = config.optional_integer("moe_shared_expert_intermediate_size")
    moe = read_moe(
        config,
        layers=sparse_after(config),
        shared=config.count("num_shared_experts") * (shared or inner),
        renormalize=config.boolean("norm_topk_prob"),
        scale=config.number("routed_scaling_factor", 1.0),
        **(LIKE_V3 if sigmoid else {"num_groups": 1}),
    )
    return read_decoder(
        config,
        rotated=rotary_dim(config, size),
        attention_qkv_bias=config.boolean("use_qkv_bias", False),
        attention_out_bias=config.boolean("use_bias", False),
        qk_norm="head" if config.boolean("use_qk_norm") else None,
        moe=moe,
    )


def read_bailing_hybrid(config: ConfigReader) -> DecoderConfig:
    """Ling 3: Kimi Delta Attention, with decays and a gate of one matrix each, and latent attention at a group's end.

    Where transformers has written the config, head_dim is another size, and linear_head_dim this one.
    """
    heads = config.integer("num_attention_heads")
    config.expect_all(
        {
            "no_kda_lora": True,
            "gated_attention_proj_granularity_type": "head_wise",
            "score_function": "sigmoid",
            "linear_num_heads": heads,
        }
    )
    config.skip("num_nextn_predict_layers num_mtp_layers mtp_loss_scaling_factor router_dtype")
    every, layers = config.integer("layer_group_size"), num_layers(config)
    kinds = layer_kinds(config, [LINEAR if (i + 1) % every else FULL for i in range(layers)], (FULL, LINEAR))
    size = config.optional_integer("linear_head_dim") or config.integer("head_dim")
    bound = config.get("kda_lower_bound") if config.boolean("kda_safe_gate") else 0.0
    bound = decay_bound(config, "kda_lower_bound", bound)
    config.skip("kda_lower_bound")
    taps = config.integer("short_conv_kernel_size", low=2, high=64)
    delta = kda(heads, size, taps, config.number("rms_norm_eps", 1e-6), bound=bound)
    rope, original = config.section("rope_scaling"), "original_max_position_embeddings"
    if (
        rope is not None
        and "yarn" in (rope.get("rope_type"), rope.get("type"))
        and rope.get(original) is None
    ):
        raise rope.wrong(original, None, "given")  # transformers takes its default, not the model's length
    return read_latent(
        config,
        latent={"gate": "heads"},
        kinds=[DELTA if kind == LINEAR else "latent" for kind in kinds],
        mixers={DELTA: delta},
        moe=v3_moe(config, sparse_after(config), "num_experts"),
    )


BAILING = {
    "num_key_value_heads": 4,
    "max_position_embeddings": 32768,
    "rope_theta": 600000.0,
    "norm_topk_prob": True,
    "num_shared_experts": 0,
    "first_k_dense_replace": 0,
    "score_function": "softmax",
    "use_qk_norm": False,
}
V2 = {
    **BAILING,
    "score_function": "sigmoid",
    "use_qk_norm": True,
    "routed_scaling_factor": 2.5,
    "n_group": 8,
    "topk_group": 4,
}
FAMILIES = {
    "BailingMoeForCausalLM": Family(
        "Ling and Ring 1, 1.5 (lite, plus)", read_bailing, NAMES, BAILING, further=1
    ),
    "BailingMoeV2ForCausalLM": Family(
        "Ling and Ring 2.0 (mini, flash, 1T)", read_bailing, NAMES, V2, further=1
    ),
    "BailingHybridForCausalLM": Family(
        "Ling 3.0 (Flash)",
        read_bailing_hybrid,
        HYBRID_NAMES,
        {
            **V2,
            "max_position_embeddings": 262144,
            "rope_theta": 6e6,
            "q_lora_rank": None,
            "head_dim": 128,
            "short_conv_kernel_size": 4,
            "layer_group_size": 6,
            "kda_safe_gate": True,
            "kda_lower_bound": -5.0,
            "num_shared_experts": 1,
            "first_k_dense_replace": 2,
        },
        {
            "max_position_embeddings": "max_position_embeddings model_max_length",
            "norm_topk_prob": "norm_topk_prob moe_renormalize",
            "n_group": "n_group num_expert_group",
            "num_experts": "num_experts num_local_experts",
            "num_experts_per_tok": "num_experts_per_tok num_experts_per_token",
            "num_shared_experts": "num_shared_experts n_shared_experts",
            "short_conv_kernel_size": "short_conv_kernel_size linear_conv_kernel_dim",
        },
        further=1,
    ),
    "SarvamMoEForCausalLM": Family(
        "Sarvam 30B",
        read_bailing,
        NAMES,
        {
            **BAILING,
            "max_position_embeddings": 131072,
            "rope_theta": 8e6,
            "head_dim": 64,
            "moe_intermediate_size": 1024,
            "num_experts": 128,
            "num_experts_per_tok": 6,
            "num_shared_experts": 1,
            "routed_scaling_factor": 2.5,
            "first_k_dense_replace": 1,
            "score_function": "sigmoid",
            "use_qk_norm": True,
            "n_group": 1,
            "topk_group": 1,
        },
        {
            "num_experts": "n_routed_experts num_experts num_local_experts",
            "num_shared_experts": "n_shared_experts num_shared_experts",
            "use_qkv_bias": "attention_bias use_qkv_bias",
        },
        further=1,
    ),
}
