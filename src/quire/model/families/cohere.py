"""Cohere's Command models: one LayerNorm for attention and MLP, neighbouring rotary pairs, scaled logits."""

from __future__ import annotations

from typing import Any

from quire.model.families.config import ConfigReader
from quire.model.families.family import (
    DENSE,
    SLIDING,
    SPARSE,
    Family,
    alternate,
    biases,
    layer_kinds,
    num_layers,
    read_decoder,
    read_moe,
    windows_of,
)
from quire.model.families.names import LLAMA_NAMES
from quire.model.parts.decoder import DecoderConfig

COHERE_NAMES = LLAMA_NAMES.changed({"interleaved": True})
# FIXED keys stand in configs of the second generation beside the fields that decide.
FIXED = {
    "use_gated_activation": True,
    "use_parallel_block": True,
    "use_embedding_sharing": True,
    "position_embedding_type": "rope_gptj",
    "order_of_interleaved_layers": "local_attn_first",
    "rotary_pct": 1.0,
}


def read_cohere(config: ConfigReader, **fields: Any) -> DecoderConfig:
    qk_norm = "own_head" if config.boolean("use_qk_norm", False) else None
    scale = config.number("logit_scale")
    return read_decoder(
        config,
        **biases(config),
        placement="parallel",
        norm_kind="layer",
        qk_norm=qk_norm,
        head_scale=scale,
        **fields,
    )


def read_cohere2(config: ConfigReader) -> DecoderConfig:
    """Three sliding layers, then one without positions."""
    config.expect_all(FIXED)
    config.expect("use_qk_norm", False)
    config.skip("use_parallel_embedding")  # how training was spread
    pattern = config.integer("sliding_window_pattern", 4)
    if config.get("layer_types") is None:
        # transformers writes this name beside layer_types, and reads it from nowhere.
        config.expect("_sliding_window_pattern", pattern)
    else:
        config.skip("_sliding_window_pattern")
    kinds = layer_kinds(config, alternate(num_layers(config), pattern))
    turned = [kind == SLIDING for kind in kinds]
    return read_cohere(config, scores_window=windows_of(config, kinds), turned=turned)


def read_cohere2_moe(config: ConfigReader) -> DecoderConfig:
    """A mixture in the layers after the first dense ones."""
    config.expect_all(FIXED)
    # The model's code reads the newer name alone.
    config.expect("rope_scaling", None, config.get("rope_parameters"))
    config.expect("layer_norm_only", None)
    config.skip("use_parallel_embedding")
    layers, dense = num_layers(config), config.count("first_k_dense_replace", 0)
    pattern = config.integer("sliding_window_pattern")
    prefix = config.integer("prefix_dense_sliding_window_pattern")
    default = alternate(dense, prefix) + alternate(layers - dense, pattern)
    kinds = layer_kinds(config, default)
    sparse = layer_kinds(
        config, [DENSE] * dense + [SPARSE] * (layers - dense), (DENSE, SPARSE), "mlp_layer_types"
    )
    inner, function = config.integer("intermediate_size"), config.get("expert_selection_fn")
    if function not in ("softmax", "sigmoid"):
        raise config.wrong("expert_selection_fn", function, "softmax or sigmoid")
    shared, mean = config.count("num_shared_experts"), config.get("shared_expert_combination_strategy")
    if mean not in ("sum", "average"):
        raise config.wrong("shared_expert_combination_strategy", mean, "sum or average")
    renormalize = config.boolean("norm_topk_prob")
    how = (
        {"softmax_after": True}
        if function == "softmax"
        else {"scoring": "sigmoid", "renormalize": renormalize}
    )
    moe = read_moe(
        config, layers=[k == SPARSE for k in sparse], inner="intermediate_size", shared=shared * inner, **how
    )
    if shared and mean == "average":
        moe["scale"] = 0.5
    own = config.optional_integer("prefix_dense_intermediate_size") or inner
    turned = [
        kind == SLIDING or (mlp == DENSE and prefix == 1) for kind, mlp in zip(kinds, sparse, strict=True)
    ]
    windows = windows_of(config, kinds)
    return read_cohere(config, scores_window=windows, turned=turned, moe=moe, intermediate_size=own)


COHERE = {
    "logit_scale": 0.0625,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}
EPS = {"rms_norm_eps": "layer_norm_eps"}
FAMILIES = {
    "CohereForCausalLM": Family(
        "Command R, Command R+, Aya 23", read_cohere, COHERE_NAMES, {**COHERE, "rope_theta": 5e5}, EPS
    ),
    "Cohere2ForCausalLM": Family(
        "Command R7B, Command A",
        read_cohere2,
        COHERE_NAMES,
        {**COHERE, "sliding_window": 4096},
        {**EPS, "sliding_window_pattern": "sliding_window_pattern layer_switch"},
    ),
    "Cohere2MoeForCausalLM": Family(
        "Command A+ (mixture)",
        read_cohere2_moe,
        COHERE_NAMES.changed({"mixture.shared": "mlp.shared_experts."}),
        {
            **COHERE,
            "head_dim": 128,
            "sliding_window": 4096,
            "sliding_window_pattern": 4,
            "prefix_dense_sliding_window_pattern": 1,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "num_shared_experts": 0,
            "shared_expert_combination_strategy": "average",
            "expert_selection_fn": "softmax",
            "norm_topk_prob": True,
        },
        {**EPS, "layer_norm_only": "rms_norm_eps"},
    ),
}
