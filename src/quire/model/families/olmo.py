"""OLMo 2 and 3, and Exaone 4: norms on what attention and MLP give instead of on what they get."""

from __future__ import annotations

from typing import Any

from quire.model.families.config import ConfigReader
from quire.model.families.family import (
    FULL,
    SLIDING,
    Family,
    alternate,
    biases,
    head_size,
    layer_kinds,
    num_layers,
    read_decoder,
    rotate_some,
    windows_of,
)
from quire.model.families.names import TensorNames
from quire.model.families.rope import read_layer_ropes
from quire.model.spec import ArchSpec

POST_NORM_NAMES = TensorNames(
    attention_post_norm="post_attention_layernorm", mlp_post_norm="post_feedforward_layernorm"
)


def read_olmo2(config: ConfigReader, **fields: Any) -> ArchSpec:
    """OLMo Team 2024, arXiv:2501.00656."""
    return read_decoder(config, **biases(config), placement="post", qk_norm="all_heads", **fields)


def read_olmo3(config: ConfigReader) -> ArchSpec:
    """OLMo 2 with three sliding layers to one that is not; only that one's rope is scaled."""
    kinds = layer_kinds(config, alternate(num_layers(config), 4))
    max_position = config.integer("max_position_embeddings")
    thetas = dict.fromkeys((FULL, SLIDING), "rope_theta")
    ropes = read_layer_ropes(config, head_size(config), max_position, [*kinds, FULL], thetas)
    return read_olmo2(config, rope=ropes[-1], layer_ropes=ropes[:-1], windows=windows_of(config, kinds))


def read_exaone4(config: ConfigReader) -> ArchSpec:
    """LG AI Research 2025, arXiv:2507.11407. If some layers slide, the others have no positions."""
    kinds, slides = exaone_layers(config)
    spec = read_decoder(config, placement="post", qk_norm="head", windows=windows_of(config, kinds))
    return rotate_some(spec, [kind == SLIDING for kind in kinds]) if slides else spec


def exaone_layers(config: ConfigReader) -> tuple[list[str], bool]:
    """The kind of each layer, and whether any may slide."""
    layers, slides = num_layers(config), config.get("sliding_window") is not None
    default = [FULL] * layers
    if slides and config.get("layer_types") is None:
        default = alternate(layers, config.integer("sliding_window_pattern"))
    config.skip("sliding_window_pattern")
    return layer_kinds(config, default), slides


OLMO2 = {"max_position_embeddings": 2048, "rms_norm_eps": 1e-5}
FAMILIES = {
    "Olmo2ForCausalLM": Family("olmo2", "OLMo 2", read_olmo2, POST_NORM_NAMES, OLMO2),
    "Olmo3ForCausalLM": Family(
        "olmo3",
        "OLMo 3",
        read_olmo3,
        POST_NORM_NAMES,
        {**OLMO2, "sliding_window": 4096, "rope_theta": 5e5},
    ),
    "Exaone4ForCausalLM": Family(
        "exaone4",
        "Exaone 4.0",
        read_exaone4,
        POST_NORM_NAMES,
        {**OLMO2, "num_key_value_heads": 32, "sliding_window": 4096, "sliding_window_pattern": 4},
    ),
}
