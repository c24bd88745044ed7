"""Mixtures of experts that are Llama's or Qwen3's decoder with another choice of experts."""

from __future__ import annotations

from typing import Any

from quire.model.families.config import ConfigReader
from quire.model.families.family import (
    FULL,
    SLIDING,
    Family,
    alternate,
    biases,
    head_size,
    layer_kinds,
    num_layers,
    read_decoder,
    read_moe,
    sparse_after,
    windows_of,
)
from quire.model.families.mistral import MIXTRAL_NAMES
from quire.model.families.names import LLAMA_NAMES
from quire.model.families.olmo import exaone_layers
from quire.model.families.qwen import sparse_layers
from quire.model.families.rope import read_layer_ropes, rotary_dim
from quire.model.parts.decoder import DecoderConfig

SHARED = LLAMA_NAMES.changed({"mixture.shared": "mlp.shared_experts."})
LIKE_V3: dict[str, Any] = {"correction": True, "scoring": "sigmoid", "group_sum": True}


def read_minimax_m2(config: ConfigReader) -> DecoderConfig:
    """MiniMax 2025: partly rotated heads, norms over all heads together."""
    config.expect_all(
        {
            "use_qk_norm": True,
            "qk_norm_type": "per_layer",
            "use_routing_bias": True,
            "scoring_func": "sigmoid",
            "shared_intermediate_size": 0,
            "attn_type_list": [1] * num_layers(config),
        },
        None,
    )
    config.skip("use_mtp num_mtp_modules mtp_transformer_layers")
    size = head_size(config)
    if (part := config.optional_integer("rotary_dim", high=size)) is None or part % 2:
        part = rotary_dim(config, size)
    elif rotary_dim(config, size, part / size) != part:
        raise config.wrong("rotary_dim", part, "what partial_rotary_factor says")
    moe = read_moe(config, inner="intermediate_size", correction=True, scoring="sigmoid", renormalize=True)
    return read_decoder(config, rotated=part, qk_norm="all_heads", moe=moe)


def v3_moe(
    config: ConfigReader, layers: list[bool] | None, experts: str = "n_routed_experts"
) -> dict[str, Any]:
    """Read experts as DeepSeek-V3 chooses them, with a shared one of some experts' size."""
    key = "num_shared_experts" if experts == "num_experts" else "n_shared_experts"
    return read_moe(
        config,
        layers=layers,
        experts=experts,
        shared=config.count(key) * config.integer("moe_intermediate_size"),
        renormalize=config.boolean("norm_topk_prob"),
        scale=config.number("routed_scaling_factor", 1.0),
        **LIKE_V3,
    )


def read_glm4_moe(config: ConfigReader) -> DecoderConfig:
    """Zhipu 2025, arXiv:2508.06471."""
    extra = config.count("num_nextn_predict_layers", 0)
    if extra > 1:
        raise config.wrong("num_nextn_predict_layers", extra, "0 or 1")
    return read_decoder(
        config,
        rotated=rotary_dim(config, head_size(config), 0.5),
        attention_qkv_bias=config.boolean("attention_bias", False),
        qk_norm="head" if config.boolean("use_qk_norm") else None,
        moe=v3_moe(config, sparse_after(config)),
    )


def read_solar_open(config: ConfigReader) -> DecoderConfig:
    config.skip("first_k_dense_replace partial_rotary_factor")
    return read_decoder(
        config, attention_qkv_bias=config.boolean("attention_bias", False), moe=v3_moe(config, None)
    )


def read_dots1(config: ConfigReader) -> DecoderConfig:
    """Rednote 2025, arXiv:2506.05767."""
    layers, window = num_layers(config), config.get("sliding_window")
    first = config.count("max_window_layers")
    kinds = layer_kinds(
        config, [SLIDING if window is not None and i >= first else FULL for i in range(layers)]
    )
    return read_decoder(
        config,
        **biases(config),
        qk_norm="head",
        scores_window=windows_of(config, kinds),
        moe=v3_moe(config, sparse_after(config)),
    )


def read_exaone_moe(config: ConfigReader) -> DecoderConfig:
    """K-EXAONE. If some layers slide, the others have no positions."""
    kinds, slides = exaone_layers(config)
    moe = v3_moe(config, sparse_after(config, prevails=True), "num_experts")
    turned = [kind == SLIDING for kind in kinds] if slides else None
    return read_decoder(
        config, qk_norm="head", scores_window=windows_of(config, kinds), turned=turned, moe=moe
    )


def read_mellum(config: ConfigReader) -> DecoderConfig:
    """Qwen3's mixture with a rope for each kind of layer."""
    layers = num_layers(config)
    config.skip("mtp_layer_types mtp_mlp_layer_types")
    config.expect("num_mtp_layers", None, 0)
    kinds = layer_kinds(config, [FULL] * layers)
    ropes = read_layer_ropes(config, head_size(config), kinds)
    moe = read_moe(config, layers=sparse_after(config, ""), renormalize=config.boolean("norm_topk_prob"))
    return read_decoder(
        config, **biases(config), qk_norm="head", **ropes, scores_window=windows_of(config, kinds), moe=moe
    )


def read_kolibri(config: ConfigReader) -> DecoderConfig:
    """Norms on both sides; a layer that does not slide has no positions."""
    kinds = layer_kinds(config, alternate(num_layers(config), 5))
    slides = config.get("sliding_window") is not None
    moe = read_moe(
        config,
        shared=config.count("shared_expert_intermediate_size"),
        correction=True,
        correct_logits=True,
        scoring="sigmoid",
        renormalize=config.boolean("norm_topk_prob"),
    )
    return read_decoder(
        config,
        qk_norm="head",
        placement="sandwich",
        scores_window=windows_of(config, kinds),
        turned=[kind == SLIDING for kind in kinds] if slides else None,
        moe=moe,
    )


def read_flint(config: ConfigReader) -> DecoderConfig:
    """Qwen3's mixture with sinks and a shared expert; a layer that does not slide has no positions."""
    layers = num_layers(config)
    kinds = layer_kinds(
        config, [FULL if i < 2 or i % 4 == 1 or i == layers - 1 else SLIDING for i in range(layers)]
    )
    moe = read_moe(
        config,
        layers=sparse_layers(config, (0, 1)),
        shared=config.integer("shared_expert_intermediate_size"),
        scoring="sigmoid",
        renormalize=config.boolean("norm_topk_prob"),
    )
    return read_decoder(
        config,
        **biases(config),
        qk_norm="head",
        scores_sinks=True,
        scores_window=windows_of(config, kinds),
        turned=[kind == SLIDING for kind in kinds],
        moe=moe,
    )


def read_afmoe(config: ConfigReader) -> DecoderConfig:
    """Arcee's Trinity: attention's output is gated; a layer that does not slide has no positions."""
    layers = num_layers(config)
    kinds = layer_kinds(config, alternate(layers, config.integer("global_attn_every_n_layers")))
    dense = config.count("num_dense_layers")
    config.expect("score_func", "sigmoid")
    config.expect("route_norm", True)
    config.skip("n_group topk_group num_expert_groups num_limited_groups load_balance_coeff use_grouped_mm")
    moe = read_moe(
        config,
        layers=[i >= dense for i in range(layers)],
        shared=config.count("num_shared_experts") * config.integer("moe_intermediate_size"),
        correction=True,
        scoring="sigmoid",
        renormalize=True,
        scale=config.number("route_scale"),
        num_groups=1,
    )
    hidden = config.integer("hidden_size")
    return read_decoder(
        config,
        **biases(config),
        qk_norm="head",
        attention_gate="elements",
        placement="sandwich",
        embedding_scale=hidden**0.5 if config.boolean("mup_enabled", False) else 1.0,
        scores_window=windows_of(config, kinds),
        turned=[kind == SLIDING for kind in kinds],
        moe=moe,
    )


def read_phimoe(config: ConfigReader) -> DecoderConfig:
    """Microsoft 2024, arXiv:2404.14219: LayerNorms, and SparseMixer instead of a softmax."""
    config.skip("input_jitter_noise")
    config.expect("num_experts_per_tok", 2)
    threshold = config.number("router_jitter_noise", 0.01)
    moe = read_moe(config, inner="intermediate_size", experts="num_local_experts", sparse_mixer=threshold)
    head = config.boolean("lm_head_bias", False)
    return read_decoder(
        config,
        **biases(config),
        norm_kind="layer",
        norm_bias=True,
        head_bias=head,
        scores_window=config.optional_integer("sliding_window"),
        moe=moe,
    )


def read_aria(config: ConfigReader) -> DecoderConfig:
    """Aria's language model. Li et al. 2024, arXiv:2410.05993."""
    config.expect("mlp_bias", False, None)
    inner = config.integer("intermediate_size")
    moe = read_moe(
        config,
        inner="intermediate_size",
        shared=config.count("moe_num_shared_experts") * inner,
        softmax_after=True,
    )
    return read_decoder(config, **biases(config), moe=moe)


V3: dict[str, Any] = {
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "n_routed_experts": 128,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
}
ROUTED = {"n_routed_experts": "n_routed_experts num_local_experts"}
FAMILIES = {
    "MiniMaxM2ForCausalLM": Family(
        "MiniMax-M2, M2.1, M2.5",
        read_minimax_m2,
        MIXTRAL_NAMES.changed({"mixture.correction": "block_sparse_moe.e_score_correction_bias"}),
        {
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 196608,
            "rope_theta": 5e6,
            "num_experts": 256,
            "num_experts_per_tok": 8,
        },
        {"num_experts": "num_local_experts num_experts"},
        further=3,
    ),
    "Glm4MoeForCausalLM": Family(
        "GLM-4.5, 4.6, 4.7",
        read_glm4_moe,
        SHARED,
        {**V3, "moe_intermediate_size": 1408, "first_k_dense_replace": 1, "use_qk_norm": False},
        {**ROUTED, "num_nextn_predict_layers": "num_nextn_predict_layers num_mtp_layers"},
        further=1,
    ),
    "SolarOpenForCausalLM": Family(
        "Solar Open 100B",
        read_solar_open,
        SHARED,
        {**V3, "moe_intermediate_size": 1280, "head_dim": 128, "rope_theta": 1e6},
        ROUTED,
    ),
    "Dots1ForCausalLM": Family(
        "dots.llm1",
        read_dots1,
        SHARED,
        {
            "num_key_value_heads": 32,
            "max_position_embeddings": 2048,
            "moe_intermediate_size": 1408,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 0,
            "norm_topk_prob": False,
            "sliding_window": 4096,
            "max_window_layers": 62,
        },
        ROUTED,
    ),
    "ExaoneMoeForCausalLM": Family(
        "K-EXAONE 236B-A23B",
        read_exaone_moe,
        {"mixture.shared": SHARED["mixture.shared"], "mixture.correction": "mlp.e_score_correction_bias"},
        {
            "num_key_value_heads": 32,
            "max_position_embeddings": 2048,
            "rms_norm_eps": 1e-5,
            "sliding_window": 4096,
            "sliding_window_pattern": 4,
            "first_k_dense_replace": 1,
            "moe_intermediate_size": 1024,
            "num_experts": 64,
            "num_experts_per_tok": 8,
            "num_shared_experts": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
            "n_group": 1,
            "topk_group": 1,
        },
    ),
    "MellumForCausalLM": Family(
        "Mellum 2",
        read_mellum,
        defaults={
            "num_key_value_heads": 4,
            "head_dim": 128,
            "max_position_embeddings": 131072,
            "sliding_window": 1024,
            "moe_intermediate_size": 896,
            "num_experts": 64,
            "num_experts_per_tok": 8,
            "norm_topk_prob": True,
            "rope_parameters": {
                FULL: {"rope_type": "default", "rope_theta": 500000.0},
                SLIDING: {"rope_type": "default", "rope_theta": 10000.0},
            },
        },
        spellings={
            "num_experts": "num_local_experts num_experts",
            "num_mtp_layers": "num_mtp_layers num_nextn_predict_layers",
        },
    ),
    "Kolibri1ForCausalLM": Family(
        "Kolibri 1",
        read_kolibri,
        {
            "mixture.shared": SHARED["mixture.shared"],
            "mixture.correction": "moe.router.expert_bias",
            "attention_post_norm": "post_attn_norm",
            "mlp_post_norm": "post_ffn_norm",
        },
        {
            "num_key_value_heads": 4,
            "head_dim": 128,
            "max_position_embeddings": 262144,
            "sliding_window": 513,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
            "num_experts": 384,
            "num_experts_per_tok": 6,
            "norm_topk_prob": False,
        },
        {"num_experts": "num_local_experts num_experts"},
    ),
    "FlintForCausalLM": Family(
        "Flint",
        read_flint,
        {"attention.sinks": "self_attn.softmax_offset"},
        {
            "num_key_value_heads": 4,
            "head_dim": 128,
            "max_position_embeddings": 262144,
            "sliding_window": 513,
            "decoder_sparse_step": 1,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 1024,
            "num_experts": 256,
            "num_experts_per_tok": 6,
            "norm_topk_prob": True,
        },
    ),
    "AfmoeForCausalLM": Family(
        "Trinity Nano, Mini",
        read_afmoe,
        {
            "mixture.shared": SHARED["mixture.shared"],
            "mixture.router": "mlp.router.gate",
            "mixture.correction": "mlp.expert_bias",
            "attention_post_norm": "post_attention_layernorm",
            "mlp_norm": "pre_mlp_layernorm",
            "mlp_post_norm": "post_mlp_layernorm",
        },
        {
            "head_dim": 128,
            "max_position_embeddings": 16384,
            "rms_norm_eps": 1e-5,
            "moe_intermediate_size": 1408,
            "num_dense_layers": 1,
            "num_experts": 64,
            "num_experts_per_tok": 6,
            "num_shared_experts": 2,
            "route_scale": 1.0,
            "global_attn_every_n_layers": 4,
            "sliding_window": 1024,
        },
    ),
    "PhimoeForCausalLM": Family(
        "Phi-3.5-MoE, Phi-mini-MoE",
        read_phimoe,
        MIXTRAL_NAMES,
        {
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
            "num_local_experts": 16,
            "num_experts_per_tok": 2,
        },
    ),
    "AriaTextForCausalLM": Family(
        "Aria (text)",
        read_aria,
        {
            "mixture.router": "mlp.router",
            "mixture.shared": SHARED["mixture.shared"],
            "mixture.experts": "mlp.experts.",
            "mixture.expert.up": "fc1.weight",
            "mixture.expert.down": "fc2.weight",
            "expert_stack": "columns",
            "expert_halves": True,
        },
        {
            "max_position_embeddings": 2048,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_num_shared_experts": 2,
        },
        {"num_experts": "moe_num_experts", "num_experts_per_tok": "moe_topk"},
    ),
}
