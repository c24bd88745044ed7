"""Qwen3-Next, Qwen3.5 and its successors, OLMo-hybrid: the gated delta rule, and attention in some layers."""

from __future__ import annotations

from typing import Any

from quire.model.families.config import ConfigReader
from quire.model.families.family import (
    FULL,
    Family,
    biases,
    head_size,
    layer_kinds,
    num_layers,
    read_decoder,
    read_moe,
)
from quire.model.families.names import LLAMA_NAMES
from quire.model.families.qwen import sparse_layers
from quire.model.families.rope import rotary_dim
from quire.model.parts.decoder import DecoderConfig
from quire.model.parts.norm import NormConfig

LINEAR, DELTA = "linear_attention", "delta"
GATES = {"silu": "silu", "swish": "silu", "sigmoid": "sigmoid"}
NAMES = LLAMA_NAMES.changed(
    {
        "attention.gate": "self_attn.q_proj",
        "delta.qkv": "linear_attn.in_proj_qkv",
        "delta.gate": "linear_attn.in_proj_z",
        "delta.beta": "linear_attn.in_proj_b",
        "delta.steps": "linear_attn.in_proj_a",
        "delta.steps.bias": "linear_attn.dt_bias",
        "delta.rates": "linear_attn.A_log",
        "delta.taps": "linear_attn.conv1d",
        "delta.norm": "linear_attn.norm",
        "delta.out": "linear_attn.out_proj",
        "norm_offset": 1.0,
        "ignored": (*LLAMA_NAMES.ignored, r"mtp\..*"),
        "further": "mtp.layers.{i}.",
        "further.join": "mtp.fc",
        "further.token_norm": "mtp.pre_fc_norm_embedding",
        "further.hidden_norm": "mtp.pre_fc_norm_hidden",
        "further.norm": "mtp.norm",
    }
)
STACKED = {
    "expert_stack": "rows",
    "expert_halves": True,
    "mixture.experts": "mlp.experts.",
    "mixture.expert.up": "gate_up_proj",
    "mixture.expert.down": "down_proj",
}


def delta_names(module: str) -> dict[str, str]:
    """Name the parts of the delta rule as the library fla does, whose projections are not fused."""
    return {
        **{f"delta.{name}": f"{module}.{name}_proj" for name in ("q", "k", "v")},
        **{f"delta.{name}_taps": f"{module}.{name}_conv1d" for name in ("q", "k", "v")},
        "delta.beta": f"{module}.b_proj",
        "delta.steps.bias": f"{module}.dt_bias",
        "delta.rates": f"{module}.A_log",
        "delta.norm": f"{module}.o_norm",
        "delta.out": f"{module}.o_proj",
    }


def kda(heads: int, size: int, taps: int, eps: float, **fields: Any) -> dict[str, Any]:
    """Make the fields of Kimi Delta Attention, whose keys and values are alike in number and size."""
    return {
        "key_heads": heads,
        "value_heads": heads,
        "key_dim": size,
        "value_dim": size,
        "taps": taps,
        "norm": NormConfig("rms", eps),
        "gate_activation": "sigmoid",
        "by_channel": True,
        **fields,
    }


def decay_bound(config: ConfigReader, key: str, bound: object) -> float:
    """Return the bound of decays, which is the value of `key`. ModelError: it is no number from -10000 to 0."""
    if isinstance(bound, bool) or not isinstance(bound, (int, float)) or not -1e4 <= bound <= 0:
        raise config.wrong(key, bound, "a number from -10000 to 0")
    return float(bound)


def read_delta(config: ConfigReader, kinds: list[str], eps: float, **fields: Any) -> dict[str, Any]:
    """Read what mixes tokens in layers of these kinds; the delta rule by Qwen's keys and other `fields`."""
    keys, values = config.integer("linear_num_key_heads"), config.integer("linear_num_value_heads")
    if values % keys:
        raise config.wrong("linear_num_value_heads", values, f"a multiple of linear_num_key_heads ({keys})")
    delta = {
        "key_heads": keys,
        "value_heads": values,
        "key_dim": config.integer("linear_key_head_dim"),
        "value_dim": config.integer("linear_value_head_dim"),
        "taps": config.integer("linear_conv_kernel_dim", low=2, high=64),
        "norm": NormConfig("rms", eps),
        **fields,
    }
    return {"kinds": [DELTA if kind == LINEAR else "attention" for kind in kinds], "mixers": {DELTA: delta}}


def delta_kinds(config: ConfigReader) -> list[str]:
    """Read the kinds of layers; by default each one whose number divides by full_attention_interval is attention."""
    every = config.integer("full_attention_interval")
    default = [LINEAR if (i + 1) % every else FULL for i in range(num_layers(config))]
    return layer_kinds(config, default, (FULL, LINEAR))


def read_qwen(config: ConfigReader, share: float = 0.25, **fields: Any) -> DecoderConfig:
    """Queries and keys are normed, and rotated, by default a `share` of them; heads are gated by element."""
    kinds, eps = delta_kinds(config), config.number("rms_norm_eps", 1e-6)
    config.expect_all(
        {"attn_output_gate": True, "use_sliding_window": False, "mamba_ssm_dtype": "float32"}, None
    )
    config.skip("mtp_num_hidden_layers mtp_use_dedicated_embeddings")
    gate = config.get("output_gate_type") or "silu"
    if not isinstance(gate, str) or gate not in GATES:
        raise config.wrong("output_gate_type", gate, f"one of {', '.join(GATES)}")
    return read_decoder(
        config,
        rotated=rotary_dim(config, head_size(config), share),
        **biases(config),
        qk_norm="head",
        attention_gate="elements",
        attention_gate_bias=config.boolean("attention_bias", False),
        **read_delta(config, kinds, eps, gate_activation=GATES[gate]),
        **fields,
    )


def _moe(config: ConfigReader, layers: list[bool] | None) -> dict[str, Any]:
    return read_moe(
        config,
        layers=layers,
        shared=config.integer("shared_expert_intermediate_size"),
        renormalize=config.boolean("norm_topk_prob"),
        shared_gate=True,
    )


def read_qwen3_next(config: ConfigReader) -> DecoderConfig:
    return read_qwen(config, moe=_moe(config, sparse_layers(config)))


def read_qwen3_5(config: ConfigReader, **fields: Any) -> DecoderConfig:
    """Parts of a rope belong to the axes of pictures: a text's positions are the same on all."""
    rope = config.section("rope_parameters")
    if rope is not None:
        rope.skip("mrope_section mrope_interleaved")
    config.expect("mlp_only_layers", [], None)
    return read_qwen(config, **fields)


def read_qwen3_5_moe(config: ConfigReader, **fields: Any) -> DecoderConfig:
    return read_qwen3_5(config, moe=_moe(config, None), **fields)


def read_olmo_hybrid(config: ConfigReader) -> DecoderConfig:
    """Layers of the delta rule norm what they read, layers of attention what they add; a null rope_theta is no rope."""
    layers, heads = num_layers(config), config.integer("num_attention_heads")
    default = [FULL if i % 4 == 3 else LINEAR for i in range(layers)]
    kinds = layer_kinds(config, default if FULL in default else [*default[:-1], FULL], (FULL, LINEAR))
    given: dict[str, Any] = {
        key: config.optional_integer(key) or heads
        for key in ("linear_num_key_heads", "linear_num_value_heads")
    }
    width = max(1, int(0.75 * config.integer("hidden_size") / given["linear_num_key_heads"]))
    width = config.optional_integer("linear_key_head_dim") or width
    given["linear_key_head_dim"] = width
    given["linear_value_head_dim"] = config.optional_integer("linear_value_head_dim") or 2 * width
    negative = config.boolean("linear_allow_neg_eigval")
    ropes = [config, config.section("rope_parameters"), config.section("rope_scaling")]
    unturned = [
        one for one in ropes if one is not None and one.given("rope_theta") and one.get("rope_theta") is None
    ]
    for one in unturned:
        one.skip("rope_type rope_scaling rope_parameters")
    return read_decoder(
        config,
        rotated=0 if unturned else None,
        **biases(config),
        qk_norm="all_heads",
        placement=["pre" if kind == LINEAR else "post" for kind in kinds],
        **read_delta(config.derived(given), kinds, 1e-5, beta_scale=2.0 if negative else 1.0),
    )


NEXT = {
    "num_key_value_heads": 2,
    "head_dim": 256,
    "max_position_embeddings": 32768,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
MOE = {
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "num_experts_per_tok": 10,
    "num_experts": 512,
    "norm_topk_prob": True,
}
FAMILIES = {
    "Qwen3NextForCausalLM": Family(
        "Qwen3-Next-80B-A3B",
        read_qwen3_next,
        NAMES.changed({"delta.qkvz": "linear_attn.in_proj_qkvz", "delta.ba": "linear_attn.in_proj_ba"}),
        {**NEXT, **MOE, "decoder_sparse_step": 1},
    ),
    "Qwen3_5ForCausalLM": Family(
        "Qwen3.5, 3.6, 3.8 (dense, text)", read_qwen3_5, NAMES, {**NEXT, "num_key_value_heads": 4}
    ),
    "Qwen3_5MoeForCausalLM": Family(
        "Qwen3.5, 3.6 (mixtures, text)",
        read_qwen3_5_moe,
        NAMES.changed(STACKED),
        {**NEXT, **MOE, "num_experts_per_tok": 8, "num_experts": 256},
    ),
    "OlmoHybridForCausalLM": Family(
        "OLMo-hybrid 7B",
        read_olmo_hybrid,
        {
            "attention_norm": "attention_layer_norm",
            "mlp_norm": "feedforward_layer_norm",
            "attention_post_norm": "feedforward_layer_norm",
            "mlp_post_norm": "post_feedforward_layernorm",
            "spellings": {"attention_post_norm": "post_attention_layernorm"},
            **delta_names("linear_attn"),
            "delta.gate": "linear_attn.g_proj",
            "delta.steps": "linear_attn.a_proj",
        },
        {"max_position_embeddings": 65536, "linear_conv_kernel_dim": 4, "linear_allow_neg_eigval": True},
        unused="linear_a_log_min linear_a_log_max linear_dt_min linear_dt_max linear_dt_init_floor",
    ),
}
