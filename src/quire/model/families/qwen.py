"""Qwen2 (biases on q, k, v) and Qwen3 (norms on q and k), dense and mixtures; both may slide on some layers."""

from __future__ import annotations

from quire.devices.protocol import Routing
from quire.model.families.config import ConfigReader
from quire.model.families.llama import llama_like
from quire.model.spec import ArchSpec, MoESpec

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


def read_qwen2_moe(config: ConfigReader) -> ArchSpec:
    """Qwen1.5-MoE and Qwen2-MoE: a shared expert beside the routed ones, with a gate."""
    experts = config.integer("num_experts", 60)
    routing = Routing(
        experts,
        config.integer("num_experts_per_tok", 4, high=experts),
        renormalize=config.boolean("norm_topk_prob", False),
        shared=True,
        shared_gate=True,
    )
    if config.boolean("use_sliding_window", False) and config.get("layer_types") is None:
        raise config.wrong("layer_types", None, "given where use_sliding_window is true")
    return llama_like(
        config,
        "Qwen2MoeForCausalLM",
        default_max_position=32768,
        default_kv_heads=16,
        default_inner=5632,
        qkv_bias=config.boolean("qkv_bias", True),
        windows=layer_windows(config),
        moe=MoESpec(
            routing,
            config.integer("moe_intermediate_size", 1408),
            sparse_layers(config),
            shared_intermediate_size=config.integer("shared_expert_intermediate_size", 5632),
        ),
    )


def read_qwen3_moe(config: ConfigReader) -> ArchSpec:
    """Qwen3 mixtures. Yang et al. 2025, arXiv:2505.09388."""
    bias = config.boolean("attention_bias", False)
    layers, slides = (
        config.integer("num_hidden_layers", high=4096),
        config.boolean("use_sliding_window", False),
    )
    window = config.count("sliding_window", 4096) or None
    config.get("max_window_layers")  # written by all, read by none: the window is on every layer
    experts = config.integer("num_local_experts", config.integer("num_experts", 128))
    routing = Routing(
        experts,
        config.integer("num_experts_per_tok", 8, high=experts),
        renormalize=config.boolean("norm_topk_prob", False),
    )
    return llama_like(
        config,
        "Qwen3MoeForCausalLM",
        default_max_position=32768,
        default_kv_heads=4,
        qkv_bias=bias,
        o_bias=bias,
        qk_norm="head",
        windows=(window if slides else None,) * layers,
        moe=MoESpec(routing, config.integer("moe_intermediate_size", 768), sparse_layers(config)),
    )


def sparse_layers(config: ConfigReader) -> tuple[bool, ...]:
    """Every decoder_sparse_step-th layer is a mixture, but for those in mlp_only_layers."""
    layers, step = config.integer("num_hidden_layers", high=4096), config.integer("decoder_sparse_step", 1)
    dense = config.get("mlp_only_layers") or []
    if not isinstance(dense, list) or any(type(i) is not int for i in dense):
        raise config.wrong("mlp_only_layers", dense, "a list of layers")
    return tuple((i + 1) % step == 0 and i not in dense for i in range(layers))


def layer_windows(config: ConfigReader) -> tuple[int | None, ...]:
    """layer_types where given, else layers from max_window_layers on slide if use_sliding_window."""
    layers = config.integer("num_hidden_layers", high=4096)
    slides = config.boolean("use_sliding_window", False)
    window = config.count("sliding_window", 4096) or None
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
