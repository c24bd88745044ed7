"""Qwen2 (biases on q, k, v) and Qwen3 (norms on q and k); both may slide on some layers."""

from __future__ import annotations

from quire.model.families.config import ConfigReader
from quire.model.families.llama import llama_like
from quire.model.spec import ArchSpec

KINDS = ("full_attention", "sliding_attention")


def read_qwen2(config: ConfigReader) -> ArchSpec:
    """Qwen2 and Qwen2.5, dense."""
    return llama_like(
        config,
        "Qwen2ForCausalLM",
        default_max_position=32768,
        default_kv_heads=32,
        qkv_bias=True,
        windows=layer_windows(config),
    )


def read_qwen3(config: ConfigReader) -> ArchSpec:
    """Qwen3, dense. Yang et al. 2025, arXiv:2505.09388."""
    bias = config.boolean("attention_bias", False)
    return llama_like(
        config,
        "Qwen3ForCausalLM",
        default_max_position=32768,
        default_kv_heads=32,
        default_head_dim=128,
        qkv_bias=bias,
        o_bias=bias,
        qk_norm="head",
        windows=layer_windows(config),
    )


def layer_windows(config: ConfigReader) -> tuple[int | None, ...]:
    """layer_types where given, else layers from max_window_layers on slide if use_sliding_window."""
    layers = config.integer("num_hidden_layers", high=4096)
    slides = config.boolean("use_sliding_window", False)
    window = config.integer("sliding_window", 4096)
    first = config.get("max_window_layers")
    first = 28 if first is None else first
    if isinstance(first, bool) or not isinstance(first, int) or first < 0:
        raise config.wrong("max_window_layers", first, "an integer >= 0")
    kinds = config.get("layer_types")
    if kinds is None:
        return tuple(window if slides and i >= first else None for i in range(layers))
    if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in KINDS for kind in kinds):
        raise config.wrong("layer_types", kinds, f"{layers} entries, each one of {', '.join(KINDS)}")
    if KINDS[1] in kinds and not slides:
        raise config.wrong("use_sliding_window", slides, "true where layer_types has sliding_attention")
    return tuple(window if kind == KINDS[1] else None for kind in kinds)
