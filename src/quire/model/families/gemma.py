"""Gemma 1, 2 and 3 (text): scaled embeddings, norms that add one to their weights, GeGLU, a tied head."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from quire.model.families.config import ConfigReader
from quire.model.families.llama import FULL, Keys, alternate, layer_kinds, llama_like, windows_of
from quire.model.families.names import TensorNames
from quire.model.families.rope import read_layer_ropes
from quire.model.spec import ArchSpec

GEMMA_NAMES = TensorNames(norm_offset=1.0)
SANDWICH_NAMES = TensorNames(
    norm_offset=1.0,
    attention_post_norm="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    mlp_post_norm="post_feedforward_layernorm",
)
NEWER = Keys(activation="hidden_activation")


def read_gemma(config: ConfigReader) -> ArchSpec:
    """Gemma Team 2024, arXiv:2403.08295. An activation of "gelu" means its tanh form here, as it was trained."""
    spec = _gemma(config, "GemmaForCausalLM", Keys(), default_kv_heads=16)
    newer = config.get("hidden_activation")
    if newer not in (None, "gelu", "gelu_pytorch_tanh"):
        raise config.wrong("hidden_activation", newer, "gelu_pytorch_tanh")
    return replace(spec, activation="gelu_tanh") if spec.activation == "gelu" else spec


def read_gemma2(config: ConfigReader) -> ArchSpec:
    """Gemma Team 2024, arXiv:2408.00118: norms on both sides, soft-caps, every other layer slides."""
    layers = config.integer("num_hidden_layers", high=4096)
    config.expect("sliding_window_size", config.get("sliding_window"))
    config.get("hidden_act")  # the older key, which hidden_activation overrides
    return _gemma(
        config,
        "Gemma2ForCausalLM",
        NEWER,
        default_kv_heads=4,
        placement="sandwich",
        windows=windows_of(config, layer_kinds(config, layers, alternate(layers, 2)), 4096),
        attention_scale=config.number("query_pre_attn_scalar", 256) ** -0.5,
        attention_cap=_cap(config, "attn_logit_softcapping", 50.0),
        logit_cap=_cap(config, "final_logit_softcapping", 30.0),
    )


def read_gemma3(config: ConfigReader) -> ArchSpec:
    """Gemma Team 2025, arXiv:2503.19786: five layers slide, with a rope of their own, then one does not."""
    layers, head_dim = config.integer("num_hidden_layers", high=4096), config.integer("head_dim", 256)
    pattern = config.integer("sliding_window_pattern", config.integer("_sliding_window_pattern", 6))
    kinds = layer_kinds(config, layers, alternate(layers, pattern))
    config.get("hidden_act")
    config.expect("attn_logit_softcapping", None)
    thetas = {
        FULL: config.number("rope_theta", 1e6),
        "sliding_attention": config.number("rope_local_base_freq", 1e4),
    }
    max_position = config.integer("max_position_embeddings", 131072)
    ropes = read_layer_ropes(config, head_dim, max_position, [*kinds, FULL], thetas)
    return _gemma(
        config,
        "Gemma3ForCausalLM",
        NEWER,
        default_kv_heads=4,
        default_vocab=262208,
        placement="sandwich",
        qk_norm="head",
        rope=ropes[-1],
        layer_ropes=ropes[:-1],
        windows=windows_of(config, kinds, 4096),
        attention_scale=config.number("query_pre_attn_scalar", 256) ** -0.5,
        logit_cap=_cap(config, "final_logit_softcapping", None),
    )


def _gemma(config: ConfigReader, architecture: str, keys: Keys, **fields: Any) -> ArchSpec:
    config.expect("use_bidirectional_attention", False)
    bias = config.boolean("attention_bias", False)
    return llama_like(
        config,
        architecture,
        keys=keys,
        default_max_position=8192,
        default_head_dim=256,
        default_tied=True,
        default_activation="gelu_pytorch_tanh",
        qkv_bias=bias,
        o_bias=bias,
        embedding_scale=config.integer("hidden_size") ** 0.5,
        **fields,
    )


def _cap(config: ConfigReader, key: str, default: float | None) -> float | None:
    """A soft-cap; null is none, an absent key the family's own."""
    value = config.optional_number(key) if config.has(key) else default
    if value == 0:
        raise config.wrong(key, value, "greater than 0, or null")
    return value
