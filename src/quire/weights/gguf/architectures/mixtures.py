"""GGUF architectures with experts."""

from __future__ import annotations

from quire.weights.gguf.architectures.dense import granite, pictures
from quire.weights.gguf.config import (
    Config,
    Keys,
    has_bias,
    layer_types,
    llama_like,
    named,
    partly_rotated,
    routed,
)


def _experts(keys: Keys) -> Config:
    return {
        "num_experts": keys.integer("expert_count"),
        "num_experts_per_tok": keys.integer("expert_used_count"),
        "moe_intermediate_size": keys.integer("expert_feed_forward_length"),
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def qwen2_moe(keys: Keys) -> Config:
    shared = keys.integer("expert_shared_feed_forward_length")
    config = llama_like(keys) | _experts(keys) | {"shared_expert_intermediate_size": shared}
    return named("Qwen2MoeForCausalLM", config | {"norm_topk_prob": False})


def qwen3_moe(keys: Keys) -> Config:
    config = llama_like(keys) | _experts(keys) | {"attention_bias": has_bias(keys, "attn_q")}
    return named("Qwen3MoeForCausalLM", config | {"norm_topk_prob": True})


def qwen3vl_moe(keys: Keys) -> Config:
    """The language model of Qwen3-VL's mixtures."""
    pictures(keys)
    return qwen3_moe(keys)


def bailing(keys: Keys) -> Config:
    """Ling and Ring 1: scored by softmax, no groups."""
    return named("BailingMoeForCausalLM", _bailing(keys, "softmax"))


def bailing2(keys: Keys) -> Config:
    """Ling and Ring 2, and Sarvam's mixture, whose experts' biases the converter has centred."""
    return named("BailingMoeV2ForCausalLM", _bailing(keys, "sigmoid") | {"use_qk_norm": True})


def _bailing(keys: Keys, gating: str) -> Config:
    config = partly_rotated(keys) | routed(keys, gating)
    for name, known in (("num_experts", "n_routed_experts"), ("num_shared_experts", "n_shared_experts")):
        config[name] = config.pop(known)
    return config | {
        "score_function": gating,
        "use_qkv_bias": has_bias(keys, "attn_q"),
        "use_bias": has_bias(keys, "attn_output"),
        "num_nextn_predict_layers": 0,
    }


def gpt_oss(keys: Keys) -> Config:
    """Every second layer slides; the rope's bounds are not rounded."""
    config = llama_like(keys)
    if config["rope_scaling"] is not None:
        config["rope_scaling"] |= {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
    config |= {
        "attention_bias": has_bias(keys, "attn_q"),
        "sliding_window": keys.integer("attention.sliding_window"),
        "layer_types": layer_types(keys, 2),
        "intermediate_size": keys.integer("expert_feed_forward_length", config["intermediate_size"]),
        "num_local_experts": keys.integer("expert_count"),
        "num_experts_per_tok": keys.integer("expert_used_count"),
    }
    return named("GptOssForCausalLM", config)


def llama4(keys: Keys) -> Config:
    """Chunks, the scale of distant queries, and the layers without positions are the same in all models.

    Norms of queries and keys are not: the model of 128 experts (Maverick) has none.
    """
    config, experts = llama_like(keys), keys.integer("expert_count")
    chunk = keys.integer("attention.sliding_window", 8192)
    keys.scoring("sigmoid")
    inner = keys.integer("expert_feed_forward_length")
    if keys.integer("expert_shared_feed_forward_length", inner) != inner:
        shared = keys.get("expert_shared_feed_forward_length")
        raise keys.wrong("expert_shared_feed_forward_length", f"{inner}, as of the others", shared)
    config |= {
        "intermediate_size_mlp": config["intermediate_size"],
        "intermediate_size": inner,
        "num_local_experts": experts,
        "num_experts_per_tok": keys.integer("expert_used_count"),
        "interleave_moe_layer_step": keys.integer("interleave_moe_layer_step"),
        "attention_chunk_size": chunk,
        "use_qk_norm": experts != 128,
        "attention_bias": has_bias(keys, "attn_q"),
    }
    return named("Llama4ForCausalLM", config)


def glm4_moe(keys: Keys) -> Config:
    config = partly_rotated(keys) | routed(keys, "sigmoid")
    config |= {
        "attention_bias": has_bias(keys, "attn_q"),
        "use_qk_norm": keys.has("blk.0.attn_q_norm.weight"),
    }
    return named("Glm4MoeForCausalLM", config)


def dots1(keys: Keys) -> Config:
    config = llama_like(keys) | routed(keys, "sigmoid")
    return named(
        "Dots1ForCausalLM", config | {"attention_bias": has_bias(keys, "attn_q"), "sliding_window": None}
    )


def exaone_moe(keys: Keys) -> Config:
    config = llama_like(keys) | routed(keys, "sigmoid")
    window = keys.get("attention.sliding_window")
    renamed = {
        "num_experts": config.pop("n_routed_experts"),
        "num_shared_experts": config.pop("n_shared_experts"),
    }
    config |= renamed | {"sliding_window": window or None}
    if window:
        config["layer_types"] = layer_types(keys, 4)
    return named("ExaoneMoeForCausalLM", config)


def ernie_moe(keys: Keys) -> Config:
    config = llama_like(keys) | {
        "use_bias": has_bias(keys, "attn_q"),
        "moe_num_experts": keys.integer("expert_count"),
        "moe_k": keys.integer("expert_used_count"),
        "moe_intermediate_size": keys.integer("expert_feed_forward_length"),
        "moe_num_shared_experts": keys.count("expert_shared_count"),
        "moe_layer_start_index": keys.count("leading_dense_block_count"),
        "moe_layer_interval": keys.integer("interleave_moe_layer_step", 1),
    }
    keys.get("expert_shared_feed_forward_length")  # the sizes above say it
    keys.scoring("softmax", renormalize=True)
    return named("Ernie4_5_MoeForCausalLM", config)


def hunyuan_moe(keys: Keys) -> Config:
    config = llama_like(keys)
    config |= {
        "intermediate_size": keys.integer("expert_feed_forward_length", config["intermediate_size"]),
        "attention_bias": has_bias(keys, "attn_q"),
        "num_experts": keys.integer("expert_count"),
        "moe_topk": keys.integer("expert_used_count"),
    }
    keys.scoring("softmax", renormalize=True)
    for name in ("expert_shared_count", "expert_shared_feed_forward_length"):
        wanted = 1 if name == "expert_shared_count" else config["intermediate_size"]
        if keys.integer(name, wanted) != wanted:
            raise keys.wrong(name, str(wanted), keys.get(name))
    return named("HunYuanMoEV1ForCausalLM", config)


def minimax_m2(keys: Keys) -> Config:
    config = llama_like(keys) | {
        "num_local_experts": keys.integer("expert_count"),
        "num_experts_per_tok": keys.integer("expert_used_count"),
        "intermediate_size": keys.integer("expert_feed_forward_length"),
    }
    keys.scoring("sigmoid", renormalize=True)
    return named("MiniMaxM2ForCausalLM", config)


def afmoe(keys: Keys) -> Config:
    """Trinity scales embeddings, and renormalizes the weights of the experts."""
    config = llama_like(keys) | {
        "num_experts": keys.integer("expert_count"),
        "num_experts_per_tok": keys.integer("expert_used_count"),
        "moe_intermediate_size": keys.integer("expert_feed_forward_length"),
        "num_shared_experts": keys.count("expert_shared_count"),
        "num_dense_layers": keys.count("leading_dense_block_count"),
        "route_scale": keys.number("expert_weights_scale", 1.0),
        "attention_bias": has_bias(keys, "attn_q"),
        "sliding_window": keys.integer("attention.sliding_window"),
        "layer_types": layer_types(keys, 4),
        "mup_enabled": True,
    }
    keys.scoring("sigmoid", renormalize=True)
    return named("AfmoeForCausalLM", config)


def olmoe(keys: Keys) -> Config:
    config = llama_like(keys)
    del config["head_dim"]
    config |= {
        "num_experts": keys.integer("expert_count"),
        "num_experts_per_tok": keys.integer("expert_used_count"),
        "norm_topk_prob": False,
        "clip_qkv": keys.get("attention.clamp_kqv"),
        "intermediate_size": keys.integer("expert_feed_forward_length", config["intermediate_size"]),
    }
    keys.scoring("softmax", renormalize=False)
    return named("OlmoeForCausalLM", config)


def phimoe(keys: Keys) -> Config:
    config = llama_like(keys) | {
        "num_local_experts": keys.integer("expert_count"),
        "num_experts_per_tok": keys.integer("expert_used_count"),
        "attention_bias": has_bias(keys, "attn_q"),
        "lm_head_bias": keys.has("output.bias"),
        "sliding_window": keys.get("attention.sliding_window") or None,
        "intermediate_size": keys.integer("expert_feed_forward_length", keys.integer("feed_forward_length")),
    }
    return named("PhimoeForCausalLM", config)


def granite_moe(keys: Keys) -> Config:
    shared = keys.get("expert_shared_feed_forward_length")
    config = granite(keys)
    config |= {
        "intermediate_size": keys.integer("expert_feed_forward_length", config["intermediate_size"]),
        "num_local_experts": keys.integer("expert_count"),
        "num_experts_per_tok": keys.integer("expert_used_count"),
    }
    if shared:
        return named("GraniteMoeSharedForCausalLM", config | {"shared_intermediate_size": shared})
    return named("GraniteMoeForCausalLM", config)
