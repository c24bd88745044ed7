"""GGUF architectures with latent attention: DeepSeek's and their kin."""

from __future__ import annotations

from quire.weights.gguf.config import (
    Config,
    Keys,
    common,
    named,
    rope,
    routed,
)


def deepseek2(keys: Keys) -> Config:
    """DeepSeek-V3 and its kin if experts are chosen with a correction; V2 without; Youtu without experts."""
    config = _latent(keys)
    layers = config["num_hidden_layers"]
    dense = keys.count("leading_dense_block_count")
    keys.get("attention.key_length"), keys.get("attention.value_length")  # of the compressed form
    if dense >= layers:
        for name in ("expert_feed_forward_length", "expert_shared_count", "expert_weights_scale"):
            keys.get(name)  # of experts that it does not have
        return named("YoutuForCausalLM", config)
    corrected = keys.has(f"blk.{layers - 1}.exp_probs_b.bias") or keys.has(f"blk.{layers - 1}.exp_probs_b")
    config |= routed(keys, "sigmoid" if corrected else "softmax")
    if corrected:
        return named("DeepseekV3ForCausalLM", config)
    method = "greedy" if config["n_group"] == 1 else "group_limited_greedy"
    return named("DeepseekV2ForCausalLM", config | {"topk_method": method})


def minicpm3(keys: Keys) -> Config:
    """The multipliers are those of the 4B model, the only one."""
    config = _latent(keys)
    return named("MiniCPM3ForCausalLM", config | {"scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 256})


def _latent(keys: Keys) -> Config:
    """Latent attention. Files that split keys from values give a head's sizes under keys of their own (mla)."""
    config = common(keys)
    heads, rotated = config["num_attention_heads"], keys.integer("rope.dimension_count")
    size = keys.optional_integer("attention.key_length_mla") or keys.integer("attention.key_length")
    if size <= rotated:
        raise keys.wrong("rope.dimension_count", f"less than a head's size, {size}", rotated)
    value = keys.optional_integer("attention.value_length_mla")
    value = (
        value or keys.optional_integer("attention.value_length") or _value_size(keys, heads, size - rotated)
    )
    config |= {
        "num_key_value_heads": heads,
        "intermediate_size": keys.integer("feed_forward_length"),
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "hidden_act": "silu",
        "q_lora_rank": keys.optional_integer("attention.q_lora_rank"),
        "kv_lora_rank": keys.integer("attention.kv_lora_rank"),
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": size - rotated,
        "v_head_dim": value,
        **rope(keys, rotated),
    }
    multiplier = keys.get("rope.scaling.yarn_log_multiplier")
    if multiplier and config["rope_scaling"] is not None:  # stored as a tenth
        scale = round(10 * multiplier, 6)
        config["rope_scaling"] |= {"mscale": scale, "mscale_all_dim": scale}
    return config


def _value_size(keys: Keys, heads: int, keys_size: int) -> int:
    """A value's size, which the matrix that makes keys and values of all heads tells."""
    entry = keys.file.tensors.get("blk.0.attn_kv_b.weight")
    return max(1, 1 if entry is None else entry.shape[0] // heads - keys_size)
