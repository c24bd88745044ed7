"""The table of GGUF architectures: which family's config each one becomes, and how its tensors are named.

Facts are llama.cpp's convert_hf_to_gguf.py, read backwards.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from quire.errors import UnknownArchitectureError
from quire.weights.gguf import names
from quire.weights.gguf.config import Config, Keys, common, has_bias, llama_like, rope
from quire.weights.gguf.names import Naming
from quire.weights.gguf.parts import GGUFParts


def read_architecture(file: GGUFParts) -> tuple[Config, Naming]:
    """The config and the names of a file. Raises ModelError for anything not understood in full."""
    keys = Keys(file)
    reader = ARCHITECTURES.get(keys.architecture)
    if reader is None:
        raise UnknownArchitectureError(
            f"{file.path}: architecture {keys.architecture} is not supported; supported are {', '.join(ARCHITECTURES)}"
        )
    config, naming = reader.read(keys), reader.naming
    if keys.architecture == "llama" and "num_local_experts" in config:
        naming = names.MIXTRAL
    keys.finish()
    return config, naming


def _named(architecture: str, config: Config) -> Config:
    return {"architectures": [architecture], **config}


def _llama(keys: Keys) -> Config:
    """Llama, and what is converted as one: Mistral, Mixtral, Yi, SmolLM2."""
    config, experts = llama_like(keys), keys.get("expert_count")
    window = keys.get("attention.sliding_window")
    if experts:
        more = {"num_local_experts": experts, "num_experts_per_tok": keys.integer("expert_used_count")}
        more["intermediate_size"] = keys.integer("expert_feed_forward_length", config["intermediate_size"])
        return _named("MixtralForCausalLM", config | more | {"sliding_window": window})
    if window:
        return _named("MistralForCausalLM", config | {"sliding_window": window})
    config |= {"attention_bias": has_bias(keys, "attn_q"), "mlp_bias": has_bias(keys, "ffn_up")}
    return _named("LlamaForCausalLM", config)


def _smollm3(keys: Keys) -> Config:
    """Every fourth layer is without positions; no key says so."""
    config = llama_like(keys) | {"attention_bias": has_bias(keys, "attn_q"), "no_rope_layer_interval": 4}
    return _named("SmolLM3ForCausalLM", config)


def _qwen2(keys: Keys) -> Config:
    return _named("Qwen2ForCausalLM", llama_like(keys))


def _qwen3(keys: Keys) -> Config:
    return _named("Qwen3ForCausalLM", llama_like(keys) | {"attention_bias": has_bias(keys, "attn_q")})


def _experts(keys: Keys) -> Config:
    return {
        "num_experts": keys.integer("expert_count"),
        "num_experts_per_tok": keys.integer("expert_used_count"),
        "moe_intermediate_size": keys.integer("expert_feed_forward_length"),
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _qwen2_moe(keys: Keys) -> Config:
    shared = keys.integer("expert_shared_feed_forward_length")
    config = llama_like(keys) | _experts(keys) | {"shared_expert_intermediate_size": shared}
    return _named("Qwen2MoeForCausalLM", config | {"norm_topk_prob": False})


def _qwen3_moe(keys: Keys) -> Config:
    config = llama_like(keys) | _experts(keys) | {"attention_bias": has_bias(keys, "attn_q")}
    return _named("Qwen3MoeForCausalLM", config | {"norm_topk_prob": True})


def _gemma(keys: Keys) -> Config:
    config = llama_like(keys) | {"hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True}
    return _named("GemmaForCausalLM", config)


def _gemma2(keys: Keys) -> Config:
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
    return _named("Gemma2ForCausalLM", config)


def _gemma3(keys: Keys) -> Config:
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
    return _named("Gemma3ForCausalLM", config)


def _phi3(keys: Keys) -> Config:
    config = llama_like(keys)
    original = keys.get("rope.scaling.original_context_length")
    window = keys.get("attention.sliding_window")
    if original is not None:
        config["original_max_position_embeddings"] = original
    return _named("Phi3ForCausalLM", config | ({"sliding_window": window} if window else {}))


def _phi2(keys: Keys) -> Config:
    config = common(keys) | {
        "intermediate_size": keys.integer("feed_forward_length"),
        "layer_norm_eps": keys.number("attention.layer_norm_epsilon"),
        "hidden_act": "gelu_new",
    }
    size = config["hidden_size"] // config["num_attention_heads"]
    return _named("PhiForCausalLM", config | rope(keys, size))


def _gpt2(keys: Keys) -> Config:
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
    return _named("GPT2LMHeadModel", config)


def _gpt_neox(keys: Keys) -> Config:
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
    return _named("GPTNeoXForCausalLM", config)


def _starcoder2(keys: Keys) -> Config:
    config = common(keys) | {
        "intermediate_size": keys.integer("feed_forward_length"),
        "norm_epsilon": keys.number("attention.layer_norm_epsilon"),
        "hidden_act": "gelu_pytorch_tanh",
        "use_bias": has_bias(keys, "attn_q"),
    }
    size = config["hidden_size"] // config["num_attention_heads"]
    return _named("Starcoder2ForCausalLM", config | rope(keys, size))


def _stablelm(keys: Keys) -> Config:
    config = common(keys) | {
        "intermediate_size": keys.integer("feed_forward_length"),
        "layer_norm_eps": keys.number("attention.layer_norm_epsilon"),
        "hidden_act": "silu",
        "use_parallel_residual": bool(keys.get("use_parallel_residual")),
        "use_qkv_bias": has_bias(keys, "attn_q"),
        "qk_layernorm": keys.has("blk.0.attn_q_norm.weight"),
    }
    size = config["hidden_size"] // config["num_attention_heads"]
    return _named("StableLmForCausalLM", config | rope(keys, size))


def _olmo2(keys: Keys) -> Config:
    config = llama_like(keys)
    del config["head_dim"]
    return _named("Olmo2ForCausalLM", config)


def _granite(keys: Keys) -> Config:
    config = llama_like(keys)
    del config["head_dim"]
    multipliers = {
        "attention_multiplier": keys.number("attention.scale"),
        "embedding_multiplier": keys.number("embedding_scale", 1.0),
        "residual_multiplier": keys.number("residual_scale", 1.0),
        "logits_scaling": keys.number("logit_scale", 1.0),
    }
    return _named("GraniteForCausalLM", config | multipliers)


def _command_r(keys: Keys) -> Config:
    config = common(keys) | {
        "intermediate_size": keys.integer("feed_forward_length"),
        "layer_norm_eps": keys.number("attention.layer_norm_epsilon"),
        "hidden_act": "silu",
        "logit_scale": keys.number("logit_scale"),
        "use_qk_norm": keys.has("blk.0.attn_q_norm.weight"),
    }
    size = config["hidden_size"] // config["num_attention_heads"]
    return _named("CohereForCausalLM", config | rope(keys, size))


@dataclass(frozen=True, slots=True)
class Architecture:
    """How one value of general.architecture is read."""

    read: Callable[[Keys], Config]
    naming: Naming


ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture(_llama, names.TURNED),
    "smollm3": Architecture(_smollm3, names.TURNED),
    "qwen2": Architecture(_qwen2, names.PLAIN),
    "qwen3": Architecture(_qwen3, names.PLAIN),
    "qwen2moe": Architecture(_qwen2_moe, names.QWEN_MIXTURE),
    "qwen3moe": Architecture(_qwen3_moe, names.QWEN_MIXTURE),
    "gemma": Architecture(_gemma, names.GEMMA),
    "gemma2": Architecture(_gemma2, names.GEMMA_SANDWICH),
    "gemma3": Architecture(_gemma3, names.GEMMA_SANDWICH),
    "phi2": Architecture(_phi2, names.PHI2),
    "phi3": Architecture(_phi3, names.PHI3),
    "gpt2": Architecture(_gpt2, names.GPT2),
    "gptneox": Architecture(_gpt_neox, names.GPT_NEOX),
    "starcoder2": Architecture(_starcoder2, names.STARCODER2),
    "stablelm": Architecture(_stablelm, names.STABLELM),
    "olmo2": Architecture(_olmo2, names.OLMO2),
    "granite": Architecture(_granite, names.TURNED),
    "command-r": Architecture(_command_r, names.PLAIN),
}
