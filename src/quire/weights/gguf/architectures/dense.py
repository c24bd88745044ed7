"""GGUF architectures that are Llama's decoder with variations."""

from __future__ import annotations

import numpy as np

from quire.weights.gguf.config import (
    Config,
    Keys,
    common,
    has_bias,
    head_dim,
    layer_types,
    llama_like,
    named,
    partly_rotated,
    rope,
)
from quire.weights.tensor import Array


def llama(keys: Keys) -> Config:
    """Llama, and what is converted as one: Mistral, Mixtral, Yi, SmolLM2."""
    config, experts = llama_like(keys), keys.get("expert_count")
    window = keys.get("attention.sliding_window")
    if experts:
        more = {"num_local_experts": experts, "num_experts_per_tok": keys.integer("expert_used_count")}
        more["intermediate_size"] = keys.integer("expert_feed_forward_length", config["intermediate_size"])
        return named("MixtralForCausalLM", config | more | {"sliding_window": window})
    if window:
        return named("MistralForCausalLM", config | {"sliding_window": window})
    config |= {"attention_bias": has_bias(keys, "attn_q"), "mlp_bias": has_bias(keys, "ffn_up")}
    return named("LlamaForCausalLM", config)


def smollm3(keys: Keys) -> Config:
    """Every fourth layer is without positions; no key says so."""
    config = llama_like(keys) | {"attention_bias": has_bias(keys, "attn_q"), "no_rope_layer_interval": 4}
    return named("SmolLM3ForCausalLM", config)


def qwen2(keys: Keys) -> Config:
    return named("Qwen2ForCausalLM", llama_like(keys))


def qwen3(keys: Keys) -> Config:
    return named("Qwen3ForCausalLM", llama_like(keys) | {"attention_bias": has_bias(keys, "attn_q")})


def gemma(keys: Keys) -> Config:
    config = llama_like(keys) | {"hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True}
    return named("GemmaForCausalLM", config)


def gemma2(keys: Keys) -> Config:
    """The scale of queries is not in the file: it is the head's size, but for the model of 46 layers (27B)."""
    config = llama_like(keys)
    large = config["num_hidden_layers"] == 46
    scale = config["hidden_size"] // config["num_attention_heads"] if large else config["head_dim"]
    config |= {
        "hidden_activation": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
        "query_pre_attn_scalar": scale,
        "attn_logit_softcapping": keys.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": keys.number("final_logit_softcapping", 30.0),
        "sliding_window": keys.integer("attention.sliding_window", 4096),
    }
    del config["hidden_act"]
    return named("Gemma2ForCausalLM", config)


def gemma3(keys: Keys) -> Config:
    """As Gemma 2's: the model of 62 layers (27B) scales by another size than the head's."""
    config = llama_like(keys)
    large = config["num_hidden_layers"] == 62
    scale = config["hidden_size"] // config["num_attention_heads"] if large else config["head_dim"]
    config |= {
        "hidden_activation": "gelu_pytorch_tanh",
        "tie_word_embeddings": not keys.has("output.weight"),
        "query_pre_attn_scalar": scale,
        "sliding_window": keys.integer("attention.sliding_window", 1024),
        "sliding_window_pattern": 6,
        "rope_local_base_freq": keys.number("rope.freq_base_swa", 10000.0),
        "rope_theta": keys.number("rope.freq_base", 1_000_000.0),
    }
    del config["hidden_act"]
    return named("Gemma3ForCausalLM", config)


def phi3(keys: Keys) -> Config:
    config = llama_like(keys)
    original = keys.get("rope.scaling.original_context_length")
    window = keys.get("attention.sliding_window")
    if original is not None:
        config["original_max_position_embeddings"] = original
    return named("Phi3ForCausalLM", config | ({"sliding_window": window} if window else {}))


def olmo2(keys: Keys) -> Config:
    """OLMo 2, or OLMo 3 if a window is given."""
    config = llama_like(keys)
    del config["head_dim"]
    window = keys.get("attention.sliding_window")
    if not window:
        return named("Olmo2ForCausalLM", config)
    if keys.number("rope.freq_base_swa", config["rope_theta"]) != config["rope_theta"]:
        raise keys.wrong("rope.freq_base_swa", "rope.freq_base", keys.get("rope.freq_base_swa"))
    full = _rope(config)
    config["rope_parameters"] = {
        "full_attention": full,
        "sliding_attention": {"rope_type": "default", "rope_theta": full["rope_theta"]},
    }
    return named("Olmo3ForCausalLM", config | {"sliding_window": window, "layer_types": layer_types(keys, 4)})


def granite(keys: Keys) -> Config:
    config = llama_like(keys)
    del config["head_dim"]
    multipliers = {
        "attention_multiplier": keys.number("attention.scale"),
        "embedding_multiplier": keys.number("embedding_scale", 1.0),
        "residual_multiplier": keys.number("residual_scale", 1.0),
        "logits_scaling": keys.number("logit_scale", 1.0),
    }
    return named("GraniteForCausalLM", config | multipliers)


def command_r(keys: Keys) -> Config:
    config = common(keys) | {
        "intermediate_size": keys.integer("feed_forward_length"),
        "layer_norm_eps": keys.number("attention.layer_norm_epsilon"),
        "hidden_act": "silu",
        "logit_scale": keys.number("logit_scale"),
        "use_qk_norm": keys.has("blk.0.attn_q_norm.weight"),
        "attention_bias": has_bias(keys, "attn_q"),
    }
    size = config["hidden_size"] // config["num_attention_heads"]
    return named("CohereForCausalLM", config | rope(keys, size))


def cohere2(keys: Keys) -> Config:
    config = common(keys) | head_dim(keys)
    return named(
        "Cohere2ForCausalLM",
        config
        | rope(keys, config["head_dim"])
        | {
            "intermediate_size": keys.integer("feed_forward_length"),
            "layer_norm_eps": keys.number("attention.layer_norm_epsilon"),
            "hidden_act": "silu",
            "attention_bias": has_bias(keys, "attn_q"),
            "logit_scale": keys.number("logit_scale"),
            "sliding_window": keys.integer("attention.sliding_window"),
            "layer_types": layer_types(keys, 4),
        },
    )


def exaone(keys: Keys) -> Config:
    """Its epsilon goes by either name."""
    eps = keys.get("attention.layer_norm_rms_epsilon")
    config = common(keys) | head_dim(keys)
    config |= rope(keys, config["head_dim"]) | {
        "intermediate_size": keys.integer("feed_forward_length"),
        "layer_norm_epsilon": keys.number("attention.layer_norm_epsilon", eps),
        "activation_function": "silu",
    }
    return named("ExaoneForCausalLM", config)


def exaone4(keys: Keys) -> Config:
    config, window = llama_like(keys), keys.get("attention.sliding_window")
    kinds = {"layer_types": layer_types(keys, 4)} if window else {}
    return named("Exaone4ForCausalLM", config | kinds | {"sliding_window": window or None})


def seed_oss(keys: Keys) -> Config:
    biases = {
        "attention_bias": has_bias(keys, "attn_q"),
        "attention_out_bias": has_bias(keys, "attn_output"),
        "mlp_bias": has_bias(keys, "ffn_up"),
    }
    return named("SeedOssForCausalLM", llama_like(keys) | biases)


def arcee(keys: Keys) -> Config:
    biases = {"attention_bias": has_bias(keys, "attn_q"), "mlp_bias": has_bias(keys, "ffn_up")}
    return named("ArceeForCausalLM", llama_like(keys) | biases | {"hidden_act": "relu2"})


def bitnet(keys: Keys) -> Config:
    return named("BitNetForCausalLM", llama_like(keys) | {"hidden_act": "relu2"})


def apertus(keys: Keys) -> Config:
    config = llama_like(keys) | {"hidden_act": "xielu", "attention_bias": has_bias(keys, "attn_q")}
    config["rope_parameters"] = _rope(config)
    return named("ApertusForCausalLM", config)


def _rope(config: Config) -> Config:
    """The rope as newer configs spell it, taken out of the config's older keys."""
    scaling = config.pop("rope_scaling") or {"rope_type": "default"}
    return {**scaling, "rope_theta": config.pop("rope_theta")}


def xielu_parameters(keys: Keys) -> dict[str, Array]:
    """The parameters of Apertus' activations, which its checkpoint keeps in tensors."""
    shapes = {"alpha_p": (1,), "alpha_n": (1,), "beta": (), "eps": ()}
    return {
        f"model.layers.{i}.mlp.act_fn.{name}": np.array(value, np.float32).reshape(shape)
        for name, shape in shapes.items()
        for i, value in enumerate(keys.numbers(f"xielu.{name}"))
    }


def qwen3vl(keys: Keys) -> Config:
    """The language model of Qwen3-VL: for texts its rope is the plain one."""
    pictures(keys)
    return qwen3(keys)


def pictures(keys: Keys) -> None:
    """Keys that say how pictures are placed and mixed in."""
    for name in ("rope.dimension_sections", "n_deepstack_layers"):
        keys.get(name)


def ernie4_5(keys: Keys) -> Config:
    return named("Ernie4_5ForCausalLM", llama_like(keys) | {"use_bias": has_bias(keys, "attn_q")})


def hunyuan_dense(keys: Keys) -> Config:
    """The base of the rope has its alpha in it already."""
    return named("HunYuanDenseV1ForCausalLM", llama_like(keys) | {"attention_bias": has_bias(keys, "attn_q")})


def mistral3(keys: Keys) -> Config:
    """Ministral 3; without a scale of distant queries it is Mistral's decoder."""
    config, beta = llama_like(keys), keys.get("attention.temperature_scale")
    multiplier = keys.get("rope.scaling.yarn_log_multiplier")
    scaling = config.pop("rope_scaling") or {}
    if beta is None or scaling.get("rope_type") != "yarn":
        raise keys.wrong("attention.temperature_scale", "a number, beside a rope scaled by yarn", beta)
    scaling |= {"rope_theta": config.pop("rope_theta"), "llama_4_scaling_beta": beta}
    if multiplier:
        scaling |= {"mscale": 1.0, "mscale_all_dim": multiplier}
    return named("Ministral3ForCausalLM", config | {"rope_parameters": scaling, "sliding_window": None})


def chatglm(keys: Keys) -> Config:
    config = partly_rotated(keys)
    return named("GlmForCausalLM", config | {"attention_bias": glm_bias(keys)})


def glm4(keys: Keys) -> Config:
    return named("Glm4ForCausalLM", partly_rotated(keys) | {"attention_bias": glm_bias(keys)})


def glm_bias(keys: Keys) -> bool:
    return has_bias(keys, "attn_q") or has_bias(keys, "attn_qkv")
