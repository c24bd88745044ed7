"""Cohere's Command R and its kin: one LayerNorm for attention and MLP, neighbouring rotary pairs, scaled logits."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from quire.model.families.config import ConfigReader
from quire.model.families.llama import SLIDING, Keys, alternate, layer_kinds, llama_like, windows_of
from quire.model.families.names import TensorNames
from quire.model.spec import ArchSpec

COHERE_NAMES = TensorNames(interleaved=True)
# What configs of the second generation say beside the fields that decide.
FIXED = (
    ("use_gated_activation", True),
    ("use_parallel_block", True),
    ("use_embedding_sharing", True),
    ("position_embedding_type", "rope_gptj"),
    ("order_of_interleaved_layers", "local_attn_first"),
    ("rotary_pct", 1.0),
)


def read_cohere(config: ConfigReader) -> ArchSpec:
    """Command R, R+ and Aya 23."""
    return _cohere(
        config,
        "CohereForCausalLM",
        default_theta=500000.0,
        qk_norm="own_head" if config.boolean("use_qk_norm", False) else None,
    )


def read_cohere2(config: ConfigReader) -> ArchSpec:
    """Command R7B and A: three sliding layers, then one without positions."""
    for key, value in FIXED:
        config.expect(key, value)
    config.expect("use_qk_norm", False)
    config.get("use_parallel_embedding")  # how training was spread
    layers = config.integer("num_hidden_layers", high=4096)
    pattern = config.integer("sliding_window_pattern", config.integer("layer_switch", 4))
    kinds = layer_kinds(config, layers, alternate(layers, pattern))
    spec = _cohere(config, "Cohere2ForCausalLM", windows=windows_of(config, kinds, 4096))
    return replace(spec, layer_ropes=tuple(spec.rope if kind == SLIDING else None for kind in kinds))


def _cohere(config: ConfigReader, architecture: str, **fields: Any) -> ArchSpec:
    bias = config.boolean("attention_bias", False)
    return llama_like(
        config,
        architecture,
        keys=Keys(eps="layer_norm_eps"),
        default_max_position=8192,
        default_eps=1e-5,
        default_tied=True,
        placement="parallel",
        norm="layer",
        qkv_bias=bias,
        o_bias=bias,
        logit_scale=config.number("logit_scale", 0.0625),
        **fields,
    )
