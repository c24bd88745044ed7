"""Kimi-Linear (Moonshot AI 2025, arXiv:2510.26692): Kimi Delta Attention, and latent attention without positions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from quire.model.families.config import ConfigReader
from quire.model.families.family import FULL, Family, layer_kinds, num_layers, read_decoder, sparse_after
from quire.model.families.gated_delta import DELTA, LINEAR, delta_names, kda
from quire.model.families.mixtures import v3_moe
from quire.model.families.names import LLAMA_NAMES
from quire.model.parts.decoder import DecoderConfig
from quire.model.parts.norm import NormConfig
from quire.model.parts.rope import RopeSpec

KDA_NAMES = {
    **delta_names("self_attn"),
    "delta.steps_down": "self_attn.f_a_proj",
    "delta.steps": "self_attn.f_b_proj",
    "delta.gate_down": "self_attn.g_a_proj",
    "delta.gate": "self_attn.g_b_proj",
}
NAMES = LLAMA_NAMES.changed(
    {
        **KDA_NAMES,
        "rates_axes": True,
        "mixture.router": "block_sparse_moe.gate",
        "mixture.correction": "block_sparse_moe.gate.e_score_correction_bias",
        "mixture.experts": "block_sparse_moe.experts.{e}.",
        "mixture.expert.gate": "w1",
        "mixture.expert.up": "w3",
        "mixture.expert.down": "w2",
        "mixture.shared": "block_sparse_moe.shared_experts.",
        "plain_shared": True,
        "spellings": {f"mlp.{name}": f"block_sparse_moe.{name}_proj" for name in ("gate", "up", "down")},
    }
)


def read_kimi_linear(config: ConfigReader) -> DecoderConfig:
    """Elements of a key that would be rotated are as they are, and shared by all heads."""
    config.expect_all(
        {
            "mla_use_nope": True,
            "moe_router_activation_func": "sigmoid",
            "use_grouped_topk": True,
            "moe_layer_freq": 1,
            "attention_bias": False,
        }
    )
    config.skip("head_dim rope_theta rope_scaling rope_parameters num_nextn_predict_layers qk_head_dim")
    inner = config.section("linear_attn_config") or ConfigReader({}, config.where)
    kinds, shared = _kinds(config, inner), config.integer("qk_rope_head_dim")
    rope = RopeSpec("proportional", 10000.0, shared)
    latent = {"rope_dim": shared, "norm": NormConfig("rms", 1e-6)}
    moe = v3_moe(config, sparse_after(config))
    return read_kda(config, inner, kinds, 32, 0.0, latent, layer_ropes=rope, moe=moe)


def read_kda(
    config: ConfigReader,
    inner: ConfigReader,
    kinds: Sequence[str],
    heads: int,
    bound: float,
    latent: Mapping[str, Any],
    **fields: Any,
) -> DecoderConfig:
    """Read Kimi Delta Attention, by default of `heads` heads, and latent attention without positions."""
    count = config.integer("num_attention_heads")
    config.expect("num_key_value_heads", count, None)
    nope = config.integer("qk_nope_head_dim")
    latent = {
        "q_rank": config.optional_integer("q_lora_rank"),
        "kv_rank": config.integer("kv_lora_rank"),
        "nope_dim": nope,
        "value_dim": config.integer("v_head_dim"),
        **latent,
    }
    size = inner.integer("head_dim", config.optional_integer("linear_head_dim") or 128)
    own = inner.integer("num_heads", config.optional_integer("linear_num_heads") or heads)
    taps = inner.integer(
        "short_conv_kernel_size", config.optional_integer("linear_conv_kernel_dim") or 4, low=2, high=64
    )
    rule = kda(own, size, taps, config.number("rms_norm_eps", 1e-6), rank=size, bound=bound)
    return read_decoder(
        config,
        num_kv_heads=count,
        head_dim=nope + latent["rope_dim"],
        rotated=0,
        kinds=[DELTA if kind == LINEAR else "latent" for kind in kinds],
        mixers={DELTA: rule, "latent": latent},
        **fields,
    )


def _kinds(config: ConfigReader, inner: ConfigReader) -> list[str]:
    """Read the kinds of layers from lists of layers, counted from 1, or from layer_types."""
    layers = num_layers(config)
    lists = {kind: inner.get(key) for kind, key in ((LINEAR, "kda_layers"), (FULL, "full_attn_layers"))}
    default = [FULL if i and i % 4 == 0 else LINEAR for i in range(layers)]
    if None in lists.values():
        return layer_kinds(config, default, (FULL, LINEAR))
    found: list[tuple[Any, str]] = []
    for kind, given in lists.items():
        found += [(i, kind) for i in (given if isinstance(given, list) else [given])]
    numbers = [i for i, _ in found]
    if any(type(i) is not int for i in numbers) or sorted(numbers) != list(range(1, layers + 1)):
        raise inner.wrong(
            "kda_layers", lists[LINEAR], f"with full_attn_layers each layer from 1 to {layers} once"
        )
    return layer_kinds(config, [kind for _, kind in sorted(found)], (FULL, LINEAR))


FAMILIES = {
    "KimiLinearForCausalLM": Family(
        "Kimi-Linear-48B-A3B",
        read_kimi_linear,
        NAMES,
        {
            "max_position_embeddings": 1048576,
            "rms_norm_eps": 1e-5,
            "q_lora_rank": None,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": True,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 2.446,
        },
        {
            "max_position_embeddings": "max_position_embeddings model_max_length",
            "norm_topk_prob": "norm_topk_prob moe_renormalize",
            "n_group": "n_group num_expert_group",
            "n_routed_experts": "num_experts num_local_experts",
            "num_experts_per_tok": "num_experts_per_tok num_experts_per_token",
            "n_shared_experts": "n_shared_experts num_shared_experts",
        },
        further=1,
    )
}
