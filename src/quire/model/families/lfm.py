"""LFM2, LFM2-MoE and LFM3 (Liquid AI 2025, arXiv:2511.23404): gated short convolutions beside attention."""

from __future__ import annotations

from typing import Any

from quire.errors import ModelError
from quire.model.families.config import ConfigReader
from quire.model.families.family import (
    FULL,
    SLIDING,
    Family,
    head_size,
    layer_kinds,
    listed_layers,
    num_layers,
    read_decoder,
    read_moe,
    sparse_after,
    windows_of,
)
from quire.model.families.names import LLAMA_NAMES
from quire.model.families.rope import read_layer_ropes
from quire.model.parts.decoder import DecoderConfig

CONV, CONVOLUTION = "conv", "convolution"
LFM_NAMES = LLAMA_NAMES.changed(
    {
        "norm": "model.embedding_norm",
        "attention_norm": "operator_norm",
        "attention.q_norm": "self_attn.q_layernorm",
        "attention.k_norm": "self_attn.k_layernorm",
        "attention.out": "self_attn.out_proj",
        "convolution.in": "conv.in_proj",
        "convolution.taps": "conv.conv",
        "convolution.out": "conv.out_proj",
        "mlp_norm": "ffn_norm",
        "mlp.gate": "feed_forward.w1",
        "mlp.up": "feed_forward.w3",
        "mlp.down": "feed_forward.w2",
        "mixture.router": "feed_forward.gate",
        "mixture.correction": "feed_forward.expert_bias",
        "mixture.experts": "feed_forward.experts.{e}.",
        "mixture.expert.gate": "w1",
        "mixture.expert.up": "w3",
        "mixture.expert.down": "w2",
    }
)


def _read(config: ConfigReader, kinds: list[str], **fields: Any) -> DecoderConfig:
    """Read what all have. tie_embedding prevails over tie_word_embeddings."""
    tied = config.boolean("tie_word_embeddings")
    return read_decoder(
        config,
        norm_eps=config.number("norm_eps"),
        activation="silu",
        head_tied=config.boolean("tie_embedding", tied),
        qk_norm="head",
        kinds=[CONVOLUTION if kind == CONV else "attention" for kind in kinds],
        mixers={
            CONVOLUTION: {
                "taps": config.integer("conv_L_cache", low=2, high=64),
                "bias": config.boolean("conv_bias"),
            }
        },
        **fields,
    )


def read_lfm2(config: ConfigReader) -> DecoderConfig:
    """Older files list the layers with attention (full_attn_idxs) in place of the kinds of all."""
    layers = range(num_layers(config))
    attends = listed_layers(config, "full_attn_idxs", layers)
    kinds = layer_kinds(config, [FULL if i in attends else CONV for i in layers], (FULL, CONV))
    return _read(config, kinds, intermediate_size=_inner_size(config))


def _inner_size(config: ConfigReader) -> int:
    """Compute the width of the MLP: 2/3 of the config's, times a factor, rounded up to a multiple."""
    size = config.integer("intermediate_size")
    size = config.optional_integer("block_ff_dim") or size
    factor, multiple = config.optional_number("block_ffn_dim_multiplier"), config.integer("block_multiple_of")
    if not config.boolean("block_auto_adjust_ff_dim"):
        return size
    size = int(2 * size / 3)
    if factor is not None:
        size = multiple * -(-int(factor * size) // multiple)
    if size < 1:
        raise config.wrong("block_ffn_dim_multiplier", factor, "such that the MLP has a width")
    return size


def read_lfm2_moe(config: ConfigReader) -> DecoderConfig:
    """Experts are chosen by a sigmoid, and a bias that counts for the choice alone."""
    layers = num_layers(config)
    if config.get("layer_types") is None:
        raise ModelError(f"{config.where}: layer_types is missing")
    moe = read_moe(
        config,
        layers=sparse_after(config, "num_dense_layers"),
        correction=config.boolean("use_expert_bias"),
        scoring="sigmoid",
        renormalize=config.boolean("norm_topk_prob"),
        floor=1e-6,
        scale=config.number("routed_scaling_factor", 1.0),
    )
    return _read(config, layer_kinds(config, [FULL] * layers, (FULL, CONV)), moe=moe)


def read_lfm3(config: ConfigReader) -> DecoderConfig:
    """Windows, a gate of each head, norms after mixers and MLPs, and a rope for each kind of attention."""
    default = [
        FULL if i % 4 == 2 else SLIDING if i % 4 == 0 and i else CONV for i in range(num_layers(config))
    ]
    kinds = layer_kinds(config, default, (FULL, SLIDING, CONV))
    turned = [SLIDING if kind == SLIDING else FULL for kind in kinds]
    ropes = read_layer_ropes(config, head_size(config), turned)
    gate = config.boolean("use_attention_gate")
    return _read(
        config,
        kinds,
        **ropes,
        scores_window=windows_of(config, kinds),
        placement="sandwich" if config.boolean("use_sandwich_norm") else "pre",
        attention_gate="heads" if gate else None,
    )


LFM = {"num_key_value_heads": 8, "max_position_embeddings": 128000, "norm_eps": 1e-5, "conv_bias": False,
       "conv_L_cache": 3, "tie_word_embeddings": True, "rope_theta": 1e6}  # fmt: skip
UNUSED = (
    "block_dim block_mlp_init_scale block_norm_eps block_out_init_scale block_use_swiglu block_use_xavier_init "
    "conv_dim conv_dim_out conv_use_xavier_init num_heads use_pos_enc"
)
FAMILIES = {
    "Lfm2ForCausalLM": Family(
        "LFM2, LFM2.5 (350M to 2.6B)",
        read_lfm2,
        LFM_NAMES,
        {**LFM, "block_multiple_of": 256, "block_ffn_dim_multiplier": 1.0, "block_auto_adjust_ff_dim": True},
        unused=UNUSED,
    ),
    "Lfm2MoeForCausalLM": Family(
        "LFM2-8B-A1B",
        read_lfm2_moe,
        LFM_NAMES,
        {
            **LFM,
            "moe_intermediate_size": 1792,
            "num_dense_layers": 2,
            "num_experts": 32,
            "num_experts_per_tok": 4,
            "use_expert_bias": True,
            "norm_topk_prob": True,
        },
        unused=UNUSED,
    ),
    "Lfm3ForCausalLM": Family(
        "LFM3",
        read_lfm3,
        LFM_NAMES.changed(
            {
                "attention.q_norm": "self_attn.q_norm",
                "attention.k_norm": "self_attn.k_norm",
                "attention.out": "self_attn.o_proj",
                "attention_post_norm": "post_operator_norm",
                "mlp_post_norm": "post_ffn_norm",
            }
        ),
        {
            **LFM,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "sliding_window": 256,
            "conv_L_cache": 7,
            "use_sandwich_norm": True,
            "use_attention_gate": True,
            "rope_parameters": {
                SLIDING: {"rope_type": "default", "rope_theta": 1e4},
                FULL: {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
            },
        },
    ),
}
