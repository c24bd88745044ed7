"""Qwen2 (biases on q, k, v) and Qwen3 (norms on q and k), dense and mixtures; both may slide on some layers."""

from __future__ import annotations

from quire.model.families.config import ConfigReader
from quire.model.families.family import (
    FULL,
    SLIDING,
    Family,
    biases,
    layer_kinds,
    num_layers,
    read_decoder,
    read_moe,
)
from quire.model.families.names import LLAMA_NAMES
from quire.model.parts.decoder import DecoderConfig


def read_qwen2(config: ConfigReader) -> DecoderConfig:
    return read_decoder(config, attention_qkv_bias=True, scores_window=layer_windows(config))


def read_mimo(config: ConfigReader) -> DecoderConfig:
    """Qwen2 with layers that predict further tokens, which are left out."""
    config.expect("attention_bias", True)
    config.expect("use_mrope", False, None)
    config.count("num_nextn_predict_layers", 0)
    return read_qwen2(config)


def read_qwen3(config: ConfigReader) -> DecoderConfig:
    """Yang et al. 2025, arXiv:2505.09388."""
    return read_decoder(config, **biases(config), qk_norm="head", scores_window=layer_windows(config))


def read_qwen2_moe(config: ConfigReader) -> DecoderConfig:
    """A shared expert beside the routed ones, with a gate."""
    if config.boolean("use_sliding_window", False) and config.get("layer_types") is None:
        raise config.wrong("layer_types", None, "given where use_sliding_window is true")
    moe = read_moe(
        config,
        layers=sparse_layers(config),
        shared=config.integer("shared_expert_intermediate_size"),
        renormalize=config.boolean("norm_topk_prob"),
        shared_gate=True,
    )
    bias = config.boolean("qkv_bias")
    return read_decoder(config, attention_qkv_bias=bias, scores_window=layer_windows(config), moe=moe)


def read_qwen3_moe(config: ConfigReader) -> DecoderConfig:
    """Yang et al. 2025, arXiv:2505.09388. The window, if any, is on every layer."""
    config.skip("max_window_layers")
    config.expect_all({"qkv_bias": False, "use_qk_norm": True, "shared_expert_intermediate_size": 0})
    slides, window = config.boolean("use_sliding_window", False), config.optional_integer("sliding_window")
    moe = read_moe(config, layers=sparse_layers(config), renormalize=config.boolean("norm_topk_prob"))
    return read_decoder(
        config, **biases(config), qk_norm="head", scores_window=window if slides else None, moe=moe
    )


def sparse_layers(config: ConfigReader, default: tuple[int, ...] = ()) -> list[bool]:
    """List the mixture's layers: every decoder_sparse_step-th, except those in mlp_only_layers."""
    layers, step = num_layers(config), config.integer("decoder_sparse_step")
    given = config.get("mlp_only_layers")
    dense = list(default) if given is None else given
    if not isinstance(dense, list) or any(type(i) is not int for i in dense):
        raise config.wrong("mlp_only_layers", dense, "a list of layers")
    return [(i + 1) % step == 0 and i not in dense for i in range(layers)]


def layer_windows(config: ConfigReader) -> list[int | None]:
    """Read windows by layer_types; without them, use_sliding_window makes layers from max_window_layers on slide."""
    layers, slides = num_layers(config), config.boolean("use_sliding_window", False)
    window, first = config.optional_integer("sliding_window", low=0), config.count("max_window_layers")
    if not slides or window == 0:
        window = None
    default = [SLIDING if window is not None and i >= first else FULL for i in range(layers)]
    kinds = layer_kinds(config, default)
    if SLIDING in kinds and not slides:
        raise config.wrong("use_sliding_window", slides, "true where layer_types has sliding_attention")
    return [window if kind == SLIDING else None for kind in kinds]


QWEN = {
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
MOE = {"decoder_sparse_step": 1, "norm_topk_prob": False}
FAMILIES = {
    "Qwen2ForCausalLM": Family("Qwen2, Qwen2.5", read_qwen2, defaults=QWEN),
    "MiMoForCausalLM": Family(
        "MiMo-7B",
        read_mimo,
        {"ignored": (*LLAMA_NAMES.ignored, r"model\.mtp_layers\..*")},
        {**QWEN, "attention_bias": True, "num_nextn_predict_layers": 0},
    ),
    "Qwen2MoeForCausalLM": Family(
        "Qwen1.5-MoE, Qwen2-57B-A14B",
        read_qwen2_moe,
        defaults={
            **QWEN,
            **MOE,
            "num_key_value_heads": 16,
            "intermediate_size": 5632,
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
            "num_experts_per_tok": 4,
            "num_experts": 60,
            "qkv_bias": True,
        },
    ),
    "Qwen3ForCausalLM": Family("Qwen3", read_qwen3, defaults={**QWEN, "head_dim": 128}),
    "Qwen3MoeForCausalLM": Family(
        "Qwen3-30B-A3B, Qwen3-235B-A22B",
        read_qwen3_moe,
        defaults={
            **MOE,
            "num_key_value_heads": 4,
            "max_position_embeddings": 32768,
            "sliding_window": 4096,
            "moe_intermediate_size": 768,
            "num_experts_per_tok": 8,
            "num_experts": 128,
        },
        spellings={"num_experts": "num_experts num_local_experts"},
    ),
}
