"""GGUF architectures with LayerNorms or plain MLPs: those from before Llama, and their kin."""

from __future__ import annotations

from quire.weights.gguf.config import (
    Config,
    Keys,
    common,
    has_bias,
    head_dim,
    named,
    rope,
)


def phi2(keys: Keys) -> Config:
    config = common(keys) | {
        "intermediate_size": keys.integer("feed_forward_length"),
        "layer_norm_eps": keys.number("attention.layer_norm_epsilon"),
        "hidden_act": "gelu_new",
    }
    size = config["hidden_size"] // config["num_attention_heads"]
    return named("PhiForCausalLM", config | rope(keys, size))


def gpt2(keys: Keys) -> Config:
    found = common(keys)
    config = {
        "vocab_size": found["vocab_size"],
        "n_embd": found["hidden_size"],
        "n_layer": found["num_hidden_layers"],
        "n_head": found["num_attention_heads"],
        "n_positions": found["max_position_embeddings"],
        "n_inner": keys.integer("feed_forward_length"),
        "layer_norm_epsilon": keys.number("attention.layer_norm_epsilon"),
        "activation_function": "gelu_new",
        "tie_word_embeddings": found["tie_word_embeddings"],
    }
    return named("GPT2LMHeadModel", config)


def gpt_neox(keys: Keys) -> Config:
    found = common(keys)
    size = found["hidden_size"] // found["num_attention_heads"]
    turned = rope(keys, size)
    config = {
        **found,
        "intermediate_size": keys.integer("feed_forward_length"),
        "layer_norm_eps": keys.number("attention.layer_norm_epsilon"),
        "hidden_act": "gelu",
        "attention_bias": has_bias(keys, "attn_qkv"),
        "use_parallel_residual": bool(keys.get("use_parallel_residual")),
        "rotary_pct": turned.pop("partial_rotary_factor", 1.0),
        "rotary_emb_base": turned["rope_theta"],
    }
    del config["num_key_value_heads"]
    return named("GPTNeoXForCausalLM", config)


def starcoder2(keys: Keys) -> Config:
    config = common(keys) | {
        "intermediate_size": keys.integer("feed_forward_length"),
        "norm_epsilon": keys.number("attention.layer_norm_epsilon"),
        "hidden_act": "gelu_pytorch_tanh",
        "use_bias": has_bias(keys, "attn_q"),
    }
    size = config["hidden_size"] // config["num_attention_heads"]
    return named("Starcoder2ForCausalLM", config | rope(keys, size))


def stablelm(keys: Keys) -> Config:
    config = common(keys) | {
        "intermediate_size": keys.integer("feed_forward_length"),
        "layer_norm_eps": keys.number("attention.layer_norm_epsilon"),
        "hidden_act": "silu",
        "use_parallel_residual": bool(keys.get("use_parallel_residual")),
        "use_qkv_bias": has_bias(keys, "attn_q"),
        "qk_layernorm": keys.has("blk.0.attn_q_norm.weight"),
    }
    size = config["hidden_size"] // config["num_attention_heads"]
    return named("StableLmForCausalLM", config | rope(keys, size))


def bloom(keys: Keys) -> Config:
    found = common(keys)
    config = {
        "vocab_size": found["vocab_size"],
        "hidden_size": found["hidden_size"],
        "n_layer": found["num_hidden_layers"],
        "num_attention_heads": found["num_attention_heads"],
        "seq_length": found["max_position_embeddings"],
        "layer_norm_epsilon": keys.number("attention.layer_norm_epsilon"),
        "tie_word_embeddings": found["tie_word_embeddings"],
    }
    _expect_four(keys, found)
    return named("BloomForCausalLM", config)


def falcon(keys: Keys) -> Config:
    """Falcon 7B has one head of keys; 40B and 180B have groups, with a norm each for attention and MLP."""
    config = common(keys)
    kv_heads, two = config.pop("num_key_value_heads"), keys.has("blk.0.attn_norm_2.weight")
    newer = kv_heads > 1
    turned = rope(keys, config["hidden_size"] // config["num_attention_heads"])
    config |= turned | {
        "ffn_hidden_size": keys.integer("feed_forward_length"),
        "layer_norm_epsilon": keys.number("attention.layer_norm_epsilon"),
        "bias": has_bias(keys, "attn_qkv"),
        "new_decoder_architecture": newer,
        "num_kv_heads": kv_heads,
    }
    return named(
        "FalconForCausalLM", config | ({"num_ln_in_parallel_attn": 2 if two else 1} if newer else {})
    )


def starcoder(keys: Keys) -> Config:
    found = gpt2(keys)
    heads = keys.integer("attention.head_count_kv", 1)
    if heads != 1:
        raise keys.wrong("attention.head_count_kv", "1, as in StarCoder 1", heads)
    changed = {"activation_function": "gelu_pytorch_tanh", "multi_query": True}
    return named("GPTBigCodeForCausalLM", found | changed)


def mpt(keys: Keys) -> Config:
    """Alibi's largest bias is 8 in the models of this architecture."""
    found = common(keys)
    bias, clip = keys.number("attention.max_alibi_bias", 8.0), keys.get("attention.clamp_kqv")
    if bias != 8:
        raise keys.wrong("attention.max_alibi_bias", "8", bias)
    _expect_four(keys, found)
    config = {
        "vocab_size": found["vocab_size"],
        "d_model": found["hidden_size"],
        "n_layers": found["num_hidden_layers"],
        "n_heads": found["num_attention_heads"],
        "max_seq_len": found["max_position_embeddings"],
        "layer_norm_epsilon": keys.number("attention.layer_norm_epsilon"),
        "tie_word_embeddings": found["tie_word_embeddings"],
        "attn_config": {"clip_qkv": clip or None},
    }
    return named("MptForCausalLM", config)


def nemotron(keys: Keys) -> Config:
    config = common(keys) | head_dim(keys)
    size = config["head_dim"]
    keys.get("attention.layer_norm_rms_epsilon")  # written beside the other
    config |= {
        "intermediate_size": keys.integer("feed_forward_length"),
        "norm_eps": keys.number("attention.layer_norm_epsilon"),
        "hidden_act": "relu2",
        "attention_bias": has_bias(keys, "attn_q"),
        "mlp_bias": has_bias(keys, "ffn_up"),
    }
    return named("NemotronForCausalLM", {"partial_rotary_factor": 1.0} | config | rope(keys, size))


def jais2(keys: Keys) -> Config:
    config = common(keys) | head_dim(keys)
    config |= {
        "intermediate_size": keys.integer("feed_forward_length"),
        "layer_norm_eps": keys.number("attention.layer_norm_epsilon"),
        "hidden_act": "relu2",
        "attention_bias": has_bias(keys, "attn_q"),
        "mlp_bias": has_bias(keys, "ffn_up"),
    }
    return named("Jais2ForCausalLM", config | rope(keys, config["head_dim"]))


def olmo(keys: Keys) -> Config:
    """LayerNorms have no weights; their epsilon is the class's own."""
    config, eps = common(keys), keys.number("attention.layer_norm_epsilon")
    if eps != 1e-5:
        raise keys.wrong("attention.layer_norm_epsilon", "1e-05", eps)
    config |= {
        "intermediate_size": keys.integer("feed_forward_length"),
        "hidden_act": "silu",
        "clip_qkv": keys.get("attention.clamp_kqv"),
    }
    size = config["hidden_size"] // config["num_attention_heads"]
    return named("OlmoForCausalLM", config | rope(keys, size))


def _expect_four(keys: Keys, found: Config) -> None:
    """The MLP is four times as wide as the rest in these families."""
    inner = keys.integer("feed_forward_length")
    if inner != 4 * found["hidden_size"]:
        raise keys.wrong("feed_forward_length", f"{4 * found['hidden_size']}", inner)
