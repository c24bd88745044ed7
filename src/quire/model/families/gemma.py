"""Gemma 1, 2 and 3 (text): scaled embeddings, norms that add one to their weights, GeGLU, a tied head."""

from __future__ import annotations

from functools import partial
from typing import Any

from quire.model.families.config import ConfigReader
from quire.model.families.family import (
    Family,
    alternate,
    biases,
    layer_kinds,
    num_layers,
    read_activation,
    read_decoder,
    windows_of,
)
from quire.model.families.names import LLAMA_NAMES
from quire.model.families.rope import expect_newer_name, read_layer_ropes
from quire.model.parts.decoder import DecoderConfig
from quire.model.parts.layer import Placement

GEMMA_NAMES = LLAMA_NAMES.changed({"norm_offset": 1.0})
SANDWICH_NAMES = LLAMA_NAMES.changed(
    {
        "norm_offset": 1.0,
        "attention_post_norm": "post_attention_layernorm",
        "mlp_norm": "pre_feedforward_layernorm",
        "mlp_post_norm": "post_feedforward_layernorm",
    }
)


def read_gemma(config: ConfigReader) -> DecoderConfig:
    """Gemma Team 2024, arXiv:2403.08295. An activation of "gelu" means its tanh form here, as it was trained."""
    newer = config.get("hidden_activation")
    if newer not in (None, "gelu", "gelu_pytorch_tanh"):
        raise config.wrong("hidden_activation", newer, "gelu_pytorch_tanh")
    activation = read_activation(config)
    return _gemma(config, activation="gelu_tanh" if activation == "gelu" else activation)


def read_gemma2(config: ConfigReader, placement: Placement = "sandwich") -> DecoderConfig:
    """Gemma Team 2024, arXiv:2408.00118: norms on both sides, soft-caps, every other layer slides."""
    config.expect("sliding_window_size", config.get("sliding_window"))
    config.skip("hidden_act")  # the older key; hidden_activation prevails
    return _gemma(
        config,
        placement=placement,
        scores_window=windows_of(config, layer_kinds(config, alternate(num_layers(config), 2))),
        scores_scale=config.positive("query_pre_attn_scalar") ** -0.5,
        scores_cap=cap(config, "attn_logit_softcapping"),
        head_cap=cap(config, "final_logit_softcapping"),
    )


def read_gemma3(config: ConfigReader) -> DecoderConfig:
    """Gemma Team 2025, arXiv:2503.19786: five layers slide, with a rope of their own, then one does not."""
    kinds = layer_kinds(config, alternate(num_layers(config), config.integer("sliding_window_pattern", 6)))
    config.skip("hidden_act")
    config.expect("attn_logit_softcapping", None)
    expect_newer_name(config)
    ropes = read_layer_ropes(config, config.integer("head_dim"), kinds, "rope_local_base_freq")
    windows, both = windows_of(config, kinds), config.boolean("use_bidirectional_attention", False)
    if both:  # EmbeddingGemma's window counts both sides
        windows = [None if window is None else window // 2 + 1 for window in windows]
    return _gemma(
        config,
        placement="sandwich",
        qk_norm="head",
        **ropes,
        scores_window=windows,
        bidirectional=both,
        scores_scale=config.positive("query_pre_attn_scalar") ** -0.5,
        head_cap=cap(config, "final_logit_softcapping"),
    )


def _gemma(config: ConfigReader, **fields: Any) -> DecoderConfig:
    if "bidirectional" not in fields:
        config.expect("use_bidirectional_attention", False, None)
    scale = config.integer("hidden_size") ** 0.5
    return read_decoder(config, **biases(config), embedding_scale=scale, **fields)


def cap(config: ConfigReader, key: str) -> float | None:
    """Read a soft-cap; null is none."""
    value = config.optional_number(key)
    if value == 0:
        raise config.wrong(key, value, "greater than 0, or null")
    return value


GEMMA = {
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
GEMMA2 = {
    **GEMMA,
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "final_logit_softcapping": 30.0,
    "attn_logit_softcapping": 50.0,
}
NEWER = {"hidden_act": "hidden_activation"}
FAMILIES = {
    "GemmaForCausalLM": Family("Gemma 1", read_gemma, GEMMA_NAMES, {**GEMMA, "num_key_value_heads": 16}),
    "Gemma2ForCausalLM": Family("Gemma 2", read_gemma2, SANDWICH_NAMES, GEMMA2, NEWER),
    "VaultGemmaForCausalLM": Family(
        "VaultGemma 1B",
        partial(read_gemma2, placement="pre"),
        {"norm_offset": 1.0, "mlp_norm": "pre_feedforward_layernorm"},
        GEMMA2,
        NEWER,
    ),
    "Gemma3ForCausalLM": Family(
        "Gemma 3 (text: 270M, 1B), EmbeddingGemma",
        read_gemma3,
        SANDWICH_NAMES,
        {
            **GEMMA,
            "num_key_value_heads": 4,
            "vocab_size": 262208,
            "query_pre_attn_scalar": 256,
            "max_position_embeddings": 131072,
            "sliding_window": 4096,
            "rope_theta": 1e6,
            "rope_local_base_freq": 1e4,
        },
        {**NEWER, "sliding_window_pattern": "sliding_window_pattern _sliding_window_pattern"},
    ),
}
