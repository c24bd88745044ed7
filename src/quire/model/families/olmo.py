"""OLMo 1 to 3, its mixtures, and Exaone 4. From OLMo 2 on, norms are on what attention and MLP give."""

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
    read_moe,
    windows_of,
)
from quire.model.families.names import LLAMA_NAMES
from quire.model.families.rope import expect_newer_name, read_layer_ropes
from quire.model.parts.decoder import DecoderConfig

POST_NORM_NAMES = LLAMA_NAMES.changed(
    {"attention_post_norm": "post_attention_layernorm", "mlp_post_norm": "post_feedforward_layernorm"}
)


def read_olmo(config: ConfigReader) -> DecoderConfig:
    """Groeneveld et al. 2024, arXiv:2402.00838: LayerNorms without weights."""
    clip = config.optional_number("clip_qkv") or None
    return read_decoder(
        config, **biases(config), norm_kind="layer", norm_weight=False, norm_eps=1e-5, attention_clip=clip
    )


def read_olmoe(config: ConfigReader) -> DecoderConfig:
    """Muennighoff et al. 2024, arXiv:2409.02060."""
    clip = config.optional_number("clip_qkv") or None
    moe = read_moe(config, inner="intermediate_size", renormalize=config.boolean("norm_topk_prob"))
    return read_decoder(config, **biases(config), qk_norm="all_heads", attention_clip=clip, moe=moe)


def read_flex_olmo(config: ConfigReader) -> DecoderConfig:
    """Shi et al. 2025, arXiv:2507.07024."""
    moe = read_moe(config, inner="intermediate_size", renormalize=config.boolean("norm_topk_prob"))
    return read_olmo2(config, moe=moe)


def read_olmo2(config: ConfigReader, **fields: Any) -> DecoderConfig:
    """OLMo Team 2024, arXiv:2501.00656."""
    return read_decoder(config, **biases(config), placement="post", qk_norm="all_heads", **fields)


def read_olmo3(config: ConfigReader) -> DecoderConfig:
    """OLMo 2 with three sliding layers to one that is not; only that one's rope is scaled."""
    kinds = layer_kinds(config, alternate(num_layers(config), 4))
    expect_newer_name(config)
    if config.get("rope_scaling") is not None or config.get("rope_parameters") is None:
        # transformers gives the sliding layers this one, whatever is said
        config.expect("rope_theta", 5e5, None)
    ropes = read_layer_ropes(config, head_size(config), kinds)
    return read_olmo2(config, **ropes, scores_window=windows_of(config, kinds))


def read_exaone4(config: ConfigReader) -> DecoderConfig:
    """LG AI Research 2025, arXiv:2507.11407. If some layers slide, the others have no positions."""
    config.skip("_num_mtp_layers num_nextn_predict_layers mtp_loss_scaling_factor mtp_share_layers")  # of 4.5
    kinds, slides = exaone_layers(config)
    turned, windows = [kind == SLIDING for kind in kinds] if slides else None, windows_of(config, kinds)
    return read_decoder(config, placement="post", qk_norm="head", scores_window=windows, turned=turned)


def exaone_layers(config: ConfigReader) -> tuple[list[str], bool]:
    """Read the kind of each layer, and whether any may slide."""
    layers, slides = num_layers(config), config.get("sliding_window") is not None
    default = [FULL] * layers
    if slides and config.get("layer_types") is None:
        default = alternate(layers, config.integer("sliding_window_pattern"))
    config.skip("sliding_window_pattern")
    return layer_kinds(config, default), slides


OLMO2 = {"max_position_embeddings": 2048, "rms_norm_eps": 1e-5}
EXPERTS = {"num_experts": "num_experts num_local_experts"}
FAMILIES = {
    "OlmoForCausalLM": Family("OLMo 1", read_olmo, defaults={"max_position_embeddings": 2048}),
    "OlmoeForCausalLM": Family(
        "OLMoE 1B-7B",
        read_olmoe,
        defaults={
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "num_experts": 64,
            "num_experts_per_tok": 8,
            "norm_topk_prob": False,
        },
        spellings=EXPERTS,
    ),
    "FlexOlmoForCausalLM": Family(
        "FlexOlmo 7x7B",
        read_flex_olmo,
        POST_NORM_NAMES,
        {
            "max_position_embeddings": 4096,
            "rope_theta": 5e5,
            "num_experts": 7,
            "num_experts_per_tok": 5,
            "norm_topk_prob": False,
        },
        EXPERTS,
    ),
    "Olmo2ForCausalLM": Family("OLMo 2", read_olmo2, POST_NORM_NAMES, OLMO2),
    "Olmo3ForCausalLM": Family(
        "OLMo 3", read_olmo3, POST_NORM_NAMES, {**OLMO2, "sliding_window": 4096, "rope_theta": 5e5}
    ),
    "Exaone4ForCausalLM": Family(
        "Exaone 4.0",
        read_exaone4,
        POST_NORM_NAMES,
        {**OLMO2, "num_key_value_heads": 32, "sliding_window": 4096, "sliding_window_pattern": 4},
    ),
}
