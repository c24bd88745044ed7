"""Granite: Llama with multipliers, dense, as mixtures, and with sliding layers; and HyperCLOVA X, which adds norms."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from msgspec.structs import replace

from quire.model.families.config import ConfigReader
from quire.model.families.family import (
    FULL,
    SLIDING,
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
from quire.model.families.names import LLAMA_NAMES
from quire.model.families.rope import read_rope
from quire.model.parts.decoder import DecoderConfig


def read_granite(config: ConfigReader, **fields: Any) -> DecoderConfig:
    scaling = config.number("logits_scaling")
    if scaling == 0:
        raise config.wrong("logits_scaling", scaling, "greater than 0")
    bias = config.boolean("mlp_bias", False)
    if "scores_scale" not in fields:
        fields["scores_scale"] = config.number("attention_multiplier")
    given = {
        "embedding_scale": config.number("embedding_multiplier"),
        "multiplier": config.number("residual_multiplier"),
        "head_scale": 1.0 / scaling,
        **fields,
    }
    return read_decoder(config, **biases(config), mlp_bias=bias, **given)


def read_granite_moe(config: ConfigReader, **fields: Any) -> DecoderConfig:
    moe = read_moe(
        config,
        inner="intermediate_size",
        experts="num_local_experts",
        shared=config.count("shared_intermediate_size", 0),
        softmax_after=True,
    )
    return read_granite(config, moe=moe, **fields)


def read_granite_swa(
    config: ConfigReader, read: Callable[..., DecoderConfig] = read_granite
) -> DecoderConfig:
    """Every layer has sinks and a rope base of its own; base 0 is a layer without positions."""
    kinds = layer_kinds(config, [FULL if i % 4 == 0 else SLIDING for i in range(num_layers(config))])
    fields = {"scores_window": windows_of(config, kinds), "scores_sinks": True}
    if config.get("layer_rope_theta") is None:
        return read(config, **fields)
    thetas = read_list(config, "layer_rope_theta", [0] * len(kinds), _is_theta, "numbers above 1, or 0")
    rope = read_rope(config, head_size(config), config.integer("max_position_embeddings"))
    ropes = [replace(rope, theta=float(theta)) if theta else None for theta in thetas]
    return read(config, rope=rope, layer_ropes=ropes, **fields)


def _is_theta(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and (value == 0 or value > 1)


def read_hyperclovax(config: ConfigReader) -> DecoderConfig:
    """Logits are multiplied by logits_scaling here, not divided."""
    scale = config.optional_number("attention_multiplier")
    return read_granite(
        config,
        scores_scale=head_size(config) ** -0.5 if scale is None else scale,
        head_scale=config.number("logits_scaling"),
        placement="sandwich" if config.boolean("use_post_norm") else "pre",
    )


DEFAULTS = {
    "max_position_embeddings": 2048,
    "embedding_multiplier": 1.0,
    "logits_scaling": 1.0,
    "residual_multiplier": 1.0,
    "attention_multiplier": 1.0,
}
MOE = {**DEFAULTS, "num_local_experts": 8, "num_experts_per_tok": 2}
MOE_NAMES = LLAMA_NAMES.changed(
    {
        "mixture.router": "block_sparse_moe.router.layer",
        "mixture.experts": "block_sparse_moe.",
        "mixture.expert.up": "input_linear.weight",
        "mixture.expert.down": "output_linear.weight",
        "expert_stack": "rows",
        "expert_halves": True,
        "mixture.shared": "shared_mlp.",
        "mixture.shared.gate_up": "input_linear",
        "mixture.shared.down": "output_linear",
    }
)
FAMILIES = {
    "GraniteForCausalLM": Family("Granite 3", read_granite, defaults=DEFAULTS),
    "GraniteSWAForCausalLM": Family(
        "Granite with sliding layers",
        read_granite_swa,
        defaults={
            **DEFAULTS,
            "num_key_value_heads": 4,
            "max_position_embeddings": 8192,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": True,
            "sliding_window": 128,
        },
    ),
    "GraniteMoeForCausalLM": Family("Granite 3 MoE (1B-A400M, 3B-A800M)", read_granite_moe, MOE_NAMES, MOE),
    "GraniteMoeSharedForCausalLM": Family(
        "Granite MoE with a shared expert", read_granite_moe, MOE_NAMES, MOE
    ),
    "GraniteMoeSWAForCausalLM": Family(
        "Granite MoE with sliding layers",
        partial(read_granite_swa, read=read_granite_moe),
        MOE_NAMES.changed(
            {
                "mixture.router": "block_sparse_moe.router",
                "mixture.experts": "block_sparse_moe.experts.",
                "mixture.expert.up": "gate_up_proj",
                "mixture.expert.down": "down_proj",
            }
        ),
        {**MOE, "sliding_window": 128},
    ),
    "HyperCLOVAXForCausalLM": Family(
        "HyperCLOVA X SEED",
        read_hyperclovax,
        {"attention_post_norm": "post_norm1", "mlp_post_norm": "post_norm2"},
        {**DEFAULTS, "attention_multiplier": None, "use_post_norm": True},
    ),
}
