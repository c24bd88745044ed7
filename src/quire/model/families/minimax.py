"""MiniMax-01 and M1 (MiniMax 2025, arXiv:2501.08313): lightning attention, and attention in some layers."""

from __future__ import annotations

from quire.model.families.config import ConfigReader
from quire.model.families.family import (
    FULL,
    Family,
    head_size,
    layer_kinds,
    num_layers,
    read_activation,
    read_decoder,
    read_moe,
)
from quire.model.families.mistral import MIXTRAL_NAMES
from quire.model.parts.decoder import DecoderConfig
from quire.model.parts.norm import NormConfig

LINEAR, LIGHTNING = "linear_attention", "lightning"
BUFFERS = r"model\.layers\.\d+\.self_attn\.(slope_rate|(query|key|diagonal)_decay)"


def read_minimax(config: ConfigReader) -> DecoderConfig:
    """Branches read and join the normed stream, each with a factor. Published configs name the rotated part of a head.

    transformers overlooks that part's key; the weights were made with it.
    """
    config.expect_all({"postnorm": True, "shared_intermediate_size": 0})
    kinds, size, heads = _kinds(config), head_size(config), config.integer("num_attention_heads")
    rotated = config.integer("rotary_dim", size, high=size)
    if rotated % 2:
        raise config.wrong("rotary_dim", rotated, "even")

    def factor(name: str) -> float:
        return config.positive(f"{name}_factor")

    lightning = {
        "num_heads": heads,
        "head_dim": size,
        "decay": [1.0 - i / (len(kinds) - 1 + 1e-5) + 1e-5 for i in range(len(kinds))],
        "norm": NormConfig("rms", 1e-6),
        "activation": read_activation(config),
        "scale": factor("linear_attn_beta"),
    }
    mixers = {LINEAR: factor("linear_attn_alpha"), FULL: factor("full_attn_alpha")}
    mlp = factor("mlp_alpha")
    return read_decoder(
        config,
        rotated=rotated,
        keeps=[(mixers[kind], mlp) for kind in kinds],
        kinds=[LIGHTNING if kind == LINEAR else "attention" for kind in kinds],
        mixers={LIGHTNING: lightning},
        attention_value_scale=factor("full_attn_beta"),
        scores_window=config.optional_integer("sliding_window"),
        moe=read_moe(config, inner="intermediate_size", renormalize=True, scale=factor("mlp_beta")),
    )


def _kinds(config: ConfigReader) -> list[str]:
    """Read the kinds of layers by name, or as 0 (lightning) and 1; by default they alternate."""
    default = [LINEAR if i % 2 else FULL for i in range(num_layers(config))]
    if config.get("attn_type_list") is None:
        return layer_kinds(config, default, (FULL, LINEAR))
    attends = layer_kinds(config, default, (0, 1), "attn_type_list")
    config.expect("layer_types", None)
    return [FULL if kind else LINEAR for kind in attends]


FACTORS = {"linear_attn": "linear_attention", "full_attn": "full_attention", "mlp": "mlp"}
FAMILIES = {
    "MiniMaxForCausalLM": Family(
        "MiniMax-Text-01, MiniMax-M1",
        read_minimax,
        MIXTRAL_NAMES.changed(
            {
                "lightning.qkv": "self_attn.qkv_proj",
                "lightning.gate": "self_attn.output_gate",
                "lightning.norm": "self_attn.norm",
                "lightning.out": "self_attn.out_proj",
                "ignored": (*MIXTRAL_NAMES.ignored, BUFFERS),
            }
        ),
        {
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            **{f"{name}_{kind}_factor": 1 for name in FACTORS for kind in ("alpha", "beta")},
        },
        {
            "num_experts": "num_local_experts num_experts",
            **{
                f"{name}_{kind}_factor": f"{name}_{kind}_factor layernorm_{older}_{kind}"
                for name, older in FACTORS.items()
                for kind in ("alpha", "beta")
            },
        },
        "block_size shared_moe_mode",
    )
}
