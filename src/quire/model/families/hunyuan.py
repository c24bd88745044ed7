"""Hunyuan: norms of queries and keys after they are rotated; dense and mixtures."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from quire.model.families.config import ConfigReader
from quire.model.families.family import Family, biases, head_size, read_decoder, read_moe, sparse_after
from quire.model.families.names import LLAMA_NAMES
from quire.model.families.rope import read_rope
from quire.model.parts.decoder import DecoderConfig

HUNYUAN_NAMES = LLAMA_NAMES.changed(
    {
        "attention.q_norm": "self_attn.query_layernorm",
        "attention.k_norm": "self_attn.key_layernorm",
        "mixture.router": "mlp.gate.wg",
        "mixture.shared": "mlp.shared_mlp.",
    }
)


def read_hunyuan(config: ConfigReader, **fields: Any) -> DecoderConfig:
    """A "dynamic" rope with `alpha` is a default one with a larger base."""
    size = head_size(config)
    rope = read_rope(config, size, config.integer("max_position_embeddings"))
    inner = config.section("rope_scaling") or config.section("rope_parameters")
    alpha = inner.optional_number("alpha") if inner is not None and rope.kind == "dynamic" else None
    if alpha:
        rope = replace(rope, kind="default", theta=rope.theta * alpha ** (size / (size - 2)))
        inner.skip("beta_fast beta_slow mscale mscale_all_dim")  # type: ignore[union-attr]
    return read_decoder(
        config, **biases(config), qk_norm="head", qk_norm_after_rope=True, rope=rope, **fields
    )


def read_hunyuan_moe(config: ConfigReader) -> DecoderConfig:
    """Tencent 2025, Hunyuan-A13B: a shared expert in every layer."""
    for key in ("num_experts", "num_experts_per_tok"):
        value = config.get(key)
        if isinstance(value, list):
            raise config.wrong(key, value, "one number for all layers")
    inner = config.integer("intermediate_size")
    return read_hunyuan(
        config, moe=read_moe(config, inner="intermediate_size", shared=inner, renormalize=True)
    )


def read_hunyuan_v3(config: ConfigReader) -> DecoderConfig:
    """By default the first layer is dense; norms of queries and keys are before the rope here."""
    config.skip("enable_moe_fp32_combine")  # sums are float32 always
    moe = read_moe(
        config,
        layers=sparse_after(config, "", 1),
        shared=config.count("num_shared_experts") * config.integer("moe_intermediate_size"),
        correction=True,
        scoring="sigmoid",
        renormalize=True,
        scale=config.number("router_scaling_factor"),
    )
    config.expect("mlp_bias", False, None)
    return read_decoder(config, **biases(config), qk_norm="head", moe=moe)


DEFAULTS = {"max_position_embeddings": 2048, "rms_norm_eps": 1e-5}
FAMILIES = {
    "HunYuanDenseV1ForCausalLM": Family(
        "Hunyuan 0.5B to 7B", read_hunyuan, HUNYUAN_NAMES, DEFAULTS, unused="eod_token_id"
    ),
    "HunYuanMoEV1ForCausalLM": Family(
        "Hunyuan-A13B",
        read_hunyuan_moe,
        HUNYUAN_NAMES,
        {**DEFAULTS, "num_experts": 1, "num_experts_per_tok": 1},
        {
            "num_experts_per_tok": "moe_topk num_experts_per_tok",
            "num_experts": "num_experts num_local_experts",
        },
        unused="eod_token_id",
    ),
    "HYV3ForCausalLM": Family(
        "Hunyuan 3",
        read_hunyuan_v3,
        {
            "mixture.router": "mlp.router.gate",
            "mixture.correction": "mlp.expert_bias",
            "mixture.shared": "mlp.shared_mlp.",
        },
        {
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 11158840.0,
            "num_experts": 192,
            "num_experts_per_tok": 8,
            "num_shared_experts": 1,
            "moe_intermediate_size": 1536,
            "router_scaling_factor": 2.826,
        },
        {"num_experts": "num_experts num_local_experts"},
    ),
}
