"""Cohere's Command models: one LayerNorm for attention and MLP, neighbouring rotary pairs, scaled logits."""

from __future__ import annotations

from typing import Any

from quire.model.families.config import ConfigReader
from quire.model.families.family import (
    SLIDING,
    Family,
    alternate,
    biases,
    layer_kinds,
    num_layers,
    read_decoder,
    rotate_some,
    windows_of,
)
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


def read_cohere(config: ConfigReader, **fields: Any) -> ArchSpec:
    qk_norm = "own_head" if config.boolean("use_qk_norm", False) else None
    scale = config.number("logit_scale")
    return read_decoder(
        config,
        **biases(config),
        placement="parallel",
        norm="layer",
        qk_norm=qk_norm,
        logit_scale=scale,
        **fields,
    )


def read_cohere2(config: ConfigReader) -> ArchSpec:
    """Three sliding layers, then one without positions."""
    for key, value in FIXED:
        config.expect(key, value)
    config.expect("use_qk_norm", False)
    config.skip("use_parallel_embedding")  # how training was spread
    kinds = layer_kinds(config, alternate(num_layers(config), config.integer("sliding_window_pattern", 4)))
    spec = read_cohere(config, windows=windows_of(config, kinds))
    return rotate_some(spec, [kind == SLIDING for kind in kinds])


COHERE = {
    "logit_scale": 0.0625,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}
EPS = {"rms_norm_eps": "layer_norm_eps"}
FAMILIES = {
    "CohereForCausalLM": Family(
        "cohere",
        "Command R, Command R+, Aya 23",
        read_cohere,
        COHERE_NAMES,
        {**COHERE, "rope_theta": 5e5},
        EPS,
    ),
    "Cohere2ForCausalLM": Family(
        "cohere2",
        "Command R7B, Command A",
        read_cohere2,
        COHERE_NAMES,
        {**COHERE, "sliding_window": 4096},
        {**EPS, "sliding_window_pattern": "sliding_window_pattern _sliding_window_pattern layer_switch"},
    ),
}
