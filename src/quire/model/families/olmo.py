"""OLMo 2 and 3, and Exaone 4: norms on what attention and MLP give instead of on what they get."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from quire.model.families.config import ConfigReader
from quire.model.families.llama import (
    FULL,
    SLIDING,
    alternate,
    head_size,
    layer_kinds,
    llama_like,
    windows_of,
)
from quire.model.families.names import TensorNames
from quire.model.families.rope import read_layer_ropes
from quire.model.spec import ArchSpec

POST_NORM_NAMES = TensorNames(
    attention_post_norm="post_attention_layernorm", mlp_post_norm="post_feedforward_layernorm"
)


def read_olmo2(config: ConfigReader) -> ArchSpec:
    """OLMo Team 2024, arXiv:2501.00656."""
    return _olmo(config, "Olmo2ForCausalLM")


def read_olmo3(config: ConfigReader) -> ArchSpec:
    """OLMo 2 with three sliding layers to one that is not; a scaled rope is that one's alone."""
    layers = config.integer("num_hidden_layers", high=4096)
    kinds = layer_kinds(config, layers, alternate(layers, 4))
    max_position = config.integer("max_position_embeddings", 2048)
    thetas = dict.fromkeys((FULL, SLIDING), config.number("rope_theta", 500000.0))
    ropes = read_layer_ropes(config, head_size(config), max_position, [*kinds, FULL], thetas)
    return _olmo(
        config,
        "Olmo3ForCausalLM",
        rope=ropes[-1],
        layer_ropes=ropes[:-1],
        windows=windows_of(config, kinds, 4096),
    )


def _olmo(config: ConfigReader, architecture: str, **fields: Any) -> ArchSpec:
    bias = config.boolean("attention_bias", False)
    return llama_like(
        config,
        architecture,
        default_max_position=2048,
        default_eps=1e-5,
        placement="post",
        qk_norm="all_heads",
        qkv_bias=bias,
        o_bias=bias,
        **fields,
    )


def read_exaone4(config: ConfigReader) -> ArchSpec:
    """LG AI Research 2025, arXiv:2507.11407. Where some layers slide, the others have no positions."""
    layers = config.integer("num_hidden_layers", high=4096)
    slides = not config.has("sliding_window") or config.get("sliding_window") is not None
    default = [FULL] * layers
    if slides and config.get("layer_types") is None:
        default = alternate(layers, config.integer("sliding_window_pattern", 4))
    config.get("sliding_window_pattern")
    kinds = layer_kinds(config, layers, default)
    spec = llama_like(
        config,
        "Exaone4ForCausalLM",
        default_max_position=2048,
        default_kv_heads=32,
        default_eps=1e-5,
        placement="post",
        qk_norm="head",
        windows=windows_of(config, kinds, 4096),
    )
    if not slides:
        return spec
    return replace(spec, layer_ropes=tuple(spec.rope if kind == SLIDING else None for kind in kinds))
