"""Step 3.5 and 3.7: sliding layers with heads of their own, gated heads, experts in three stacked tensors."""

from __future__ import annotations

from typing import Any

from quire.model.families.config import MOST, ConfigReader
from quire.model.families.family import (
    DENSE,
    FULL,
    SLIDING,
    SPARSE,
    Family,
    biases,
    head_size,
    layer_kinds,
    num_layers,
    read_decoder,
    read_list,
    read_moe,
    windows_of,
)
from quire.model.families.names import LLAMA_NAMES, TensorNames
from quire.model.families.rope import kind_dims, read_layer_ropes
from quire.model.parts.decoder import DecoderConfig


def read_step(config: ConfigReader) -> DecoderConfig:
    """StepFun 2026. The published lists by layer go on with the layers that predict further tokens."""
    layers, size = num_layers(config), head_size(config)
    extra = config.count("num_nextn_predict_layers")
    kinds = layer_kinds(_cut(config, "layer_types", layers, extra), [FULL] * layers)
    near, near_kv = _sliding_heads(config)
    heads, kv = config.integer("num_attention_heads"), config.integer("num_key_value_heads")
    limits, shared_limits = (
        _limits(config, key, layers, extra) for key in ("swiglu_limits", "swiglu_limits_shared")
    )
    config.expect_all({"scoring_func": "sigmoid", "n_shared_experts": 1})
    config.expect_all({"use_moe_router_bias": True, "use_head_wise_attn_gate": True})
    config.skip("mtp_layer_types mtp_mlp_layer_types")
    scale = config.optional_number("query_pre_attn_scalar")
    dims = kind_dims(config, size, {FULL: 1.0, SLIDING: 1.0})
    ropes = read_layer_ropes(config, dims, kinds)
    moe = read_moe(
        config,
        layers=_sparse(config, layers),
        shared=config.integer("share_expert_dim"),
        correction=True,
        scoring="sigmoid",
        renormalize=True,
        scale=config.number("moe_router_scaling_factor"),
    )
    return read_decoder(
        config,
        **biases(config),
        mlp_bias=config.boolean("mlp_bias", False),
        num_heads=[near if kind == SLIDING else heads for kind in kinds],
        num_kv_heads=[near_kv if kind == SLIDING else kv for kind in kinds],
        qk_norm="head",
        attention_gate="heads",
        scores_scale=(scale or size) ** -0.5,
        **ropes,
        scores_window=windows_of(config, kinds),
        moe={**moe, "limit": limits, "shared_limit": shared_limits},
        mlp_limit=shared_limits,
    )


def _limits(config: ConfigReader, key: str, layers: int, extra: int) -> list[float]:
    """Read bounds of gated products by layer, where null and 0 are none."""

    def fits(limit: Any) -> bool:
        return limit is None or (type(limit) in (int, float) and 0 <= limit <= MOST)

    cut = _cut(config, key, layers, extra)
    return [float(x or 0.0) for x in read_list(cut, key, [None] * layers, fits, "numbers from 0 on, or null")]


def _sliding_heads(config: ConfigReader) -> tuple[int, int]:
    """Read the heads, and key/value heads, of layers that slide."""
    heads, kv = config.integer("num_attention_heads"), config.integer("num_key_value_heads")
    own = config.optional_integer("num_sliding_attention_heads")
    other = config.section("attention_other_setting")
    if other is None:
        return own or heads, kv
    other.expect("attention_type", SLIDING)
    other.expect("head_dim", head_size(config), None)
    return other.integer("num_attention_heads", heads), other.integer("num_attention_groups", kv)


def _cut(config: ConfigReader, key: str, layers: int, extra: int) -> ConfigReader:
    """Leave out the entries of a list that are for the `extra` layers after the last."""
    found = config.get(key)
    whole = isinstance(found, list) and len(found) == layers + extra
    return config.derived({key: found[:layers] if whole else found})


def _sparse(config: ConfigReader, layers: int) -> list[bool]:
    """List the mixture's layers: by kind, by a list of their numbers, or all after the first dense ones."""
    numbers, first = config.get("moe_layers_enum"), config.count("first_k_dense_replace")
    if isinstance(numbers, str):
        numbers = [int(part) for part in numbers.split(",") if part.strip().isdigit()]
    if numbers is None:
        numbers = list(range(first, layers))
    if not isinstance(numbers, list) or any(type(number) is not int for number in numbers):
        raise config.wrong("moe_layers_enum", numbers, "numbers of layers")
    default = [SPARSE if i in numbers else DENSE for i in range(layers)]
    return [kind == SPARSE for kind in layer_kinds(config, default, (DENSE, SPARSE), "mlp_layer_types")]


def step_names(spec: DecoderConfig, config: ConfigReader) -> TensorNames:
    """Leave out the layers after the last, which predict further tokens."""
    further = config.count("num_nextn_predict_layers")
    return LLAMA_NAMES.without_layers(spec.num_layers, further).changed(
        {
            "norm_offset": 1.0,
            "attention.gate": "self_attn.g_proj",
            "mixture.router": "moe.gate",
            "mixture.correction": "moe.router_bias",
            "mixture.experts": "moe.",
            "expert_stack": "rows",
            "mixture.expert.gate_apart": "gate_proj.weight",
            "mixture.expert.up": "up_proj.weight",
            "mixture.expert.down": "down_proj.weight",
            "mixture.shared": "share_expert.",
        }
    )


FAMILIES = {
    "Step3p5ForCausalLM": Family(
        "Step 3.5, 3.7 Flash",
        read_step,
        step_names,
        {
            "num_key_value_heads": 8,
            "max_position_embeddings": 128000,
            "rms_norm_eps": 1e-5,
            "num_experts": 288,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 1280,
            "share_expert_dim": 1280,
            "moe_router_scaling_factor": 1.0,
            "num_nextn_predict_layers": 0,
            "first_k_dense_replace": 3,
        },
        {
            "num_key_value_heads": "num_key_value_heads num_attention_groups",
            "num_experts": "num_experts n_routed_experts num_local_experts moe_num_experts",
            "num_experts_per_tok": "num_experts_per_tok moe_top_k",
            "share_expert_dim": "share_expert_dim share_expert_dims",
            "num_nextn_predict_layers": "num_nextn_predict_layers num_mtp_layers",
        },
    )
}
