"""MiniMax-M3: attention over chosen blocks of keys, clamped SwiGLU, mixtures with a shared expert."""

from __future__ import annotations

from typing import Any

from quire.model.families.config import ConfigReader
from quire.model.families.family import (
    DENSE,
    FULL,
    SPARSE,
    Family,
    head_size,
    layer_kinds,
    num_layers,
    read_decoder,
    read_moe,
    sparse_after,
)
from quire.model.families.gated_delta import STACKED
from quire.model.families.mistral import MIXTRAL_NAMES
from quire.model.families.names import LLAMA_NAMES
from quire.model.families.rope import rotary_dim
from quire.model.parts.bounds import MAX_HEAD_DIM, MAX_REACH
from quire.model.parts.decoder import DecoderConfig
from quire.model.parts.indexer import IndexerConfig, KeysConfig
from quire.model.parts.norm import NormConfig

CHOSEN = "minimax_m3_sparse"
# The keys of a sparse_attention_config, and those that transformers' class has beside the others.
INDEX = {
    "sparse_num_index_heads": "index_n_heads",
    "sparse_index_dim": "index_head_dim",
    "sparse_block_size": "index_block_size",
    "sparse_topk_blocks": "index_topk_blocks",
    "sparse_local_block": "index_local_blocks",
}
SIGMOID: dict[str, Any] = {"correction": True, "scoring": "sigmoid", "renormalize": True}
COMMON = {"norm_offset": 1.0, "plain_shared": True, "ignored": (*LLAMA_NAMES.ignored, r"(.*\.)?mtp\..*")}


def index_names(prefix: str) -> dict[str, str]:
    """Name the pieces of an indexer."""
    kinds = {"q": "q_proj", "k": "k_proj", "q_norm": "q_norm", "k_norm": "k_norm"}
    return {f"indexer.{name}": prefix + module for name, module in kinds.items()}


# What the published files have, and what transformers writes for the text model alone.
NAMES = MIXTRAL_NAMES.changed(
    {
        **COMMON,
        "mixture.correction": "block_sparse_moe.e_score_correction_bias",
        "mixture.shared": "block_sparse_moe.shared_experts.",
        **index_names("self_attn.index_"),
    }
)
VL_NAMES = LLAMA_NAMES.changed(
    {
        **COMMON,
        "mixture.shared": "mlp.shared_experts.",
        "mixture.shared.gate_up": "gate_up_proj",
        **STACKED,
        "mlp.gate_up": "mlp.gate_up_proj",
        **index_names("self_attn.indexer."),
    }
)


def read_minimax_m3(config: ConfigReader) -> DecoderConfig:
    """MiniMax 2026: norms by head, of which a part turns; the first layers are dense."""
    inner = config.integer("intermediate_size")
    expected = {"qk_norm_type": "per_head", "attention_output_gate": False, "scoring_func": "sigmoid"}
    expected |= dict.fromkeys(("use_gemma_norm", "use_qk_norm", "use_routing_bias"), True)
    expected |= {"n_shared_experts": 1, "swiglu_alpha": 1.702, "moe_intermediate_size": inner}
    config.expect_all(expected, None)
    config.expect("hidden_act", "swigluoai", "silu")
    config.skip("num_mtp_modules num_nextn_predict_layers")
    size, limit = head_size(config), config.positive("swiglu_limit")
    rotated = rotary_dim(config, size)
    config.expect("rotary_dim", rotated, None)
    frequent = layer_kinds(config, [1] * num_layers(config), (0, 1), "moe_layer_freq")
    if config.get("mlp_layer_types") is None and config.given("moe_layer_freq"):
        config = config.derived({"mlp_layer_types": [SPARSE if one else DENSE for one in frequent]})
    moe = read_moe(
        config,
        layers=sparse_after(config),
        experts="num_local_experts",
        inner="intermediate_size",
        shared=config.integer("shared_intermediate_size"),
        scale=config.number("routed_scaling_factor"),
        **SIGMOID,
    )
    return read_decoder(
        config,
        rotated=rotated,
        activation="clamped_swiglu",
        qk_norm="head",
        attention_indexer=_indexers(config, rotated),
        intermediate_size=config.integer("dense_intermediate_size"),
        mlp_limit=limit,
        moe={**moe, "limit": limit, "shared_limit": limit},
    )


def _indexers(config: ConfigReader, rotated: int) -> list[IndexerConfig | None]:
    """Read the indexers of the layers that have one; each key/value head has its own choice of blocks."""
    layers, inner = num_layers(config), config.section("sparse_attention_config")
    said = [0] * layers
    if inner is not None:
        fixed = {"use_sparse_attention": True, "sparse_init_block": 0, "sparse_score_type": "max"}
        inner.expect_all(fixed, None)
        said = [int(one) for one in layer_kinds(inner, said, (0, 1), "sparse_attention_freq")]
        silent = layer_kinds(inner, said, (0, 1), "sparse_disable_index_value")
        if any(int(off) < on for off, on in zip(silent, said, strict=True)):
            raise inner.wrong("sparse_disable_index_value", silent, "1 where sparse_attention_freq is 1")
    kinds = layer_kinds(config, [CHOSEN if one else FULL for one in said], (FULL, CHOSEN))
    if CHOSEN not in kinds:
        config.skip(" ".join(INDEX.values()))
        return [None] * layers
    groups = config.optional_integer("num_key_value_heads") or config.integer("num_attention_heads")

    def size(key: str, low: int = 1, high: int = MAX_REACH) -> int:
        """Read a size from the inner object, which prevails, or under the name that it has beside the others."""
        reader, own = (config, INDEX[key]) if inner is None or not inner.given(key) else (inner, key)
        config.given(INDEX[key])
        return reader.integer(own, low=low, high=high)

    top_k, block = size("sparse_topk_blocks"), size("sparse_block_size")
    heads, dim = size("sparse_num_index_heads"), size("sparse_index_dim", rotated, MAX_HEAD_DIM)
    local = size("sparse_local_block", 0, top_k)
    if heads != groups:
        raise config.wrong("num_key_value_heads", groups, f"the number of an indexer's heads ({heads})")
    norm, hidden = NormConfig("rms", config.number("rms_norm_eps", 1e-6)), config.integer("hidden_size")
    chosen = KeysConfig(dim, norm), top_k, hidden, False, False, norm
    indexer = IndexerConfig(hidden, heads, *chosen, pool=block, groups=groups, local=local)
    return [indexer if kind == CHOSEN else None for kind in kinds]


DEFAULTS = {"num_key_value_heads": 4, "head_dim": 128, "rope_theta": 5e6}
SPELLINGS = {"num_local_experts": "num_local_experts num_experts"}
FAMILIES = {
    f"{name}ForCausalLM": Family(models, read_minimax_m3, names, DEFAULTS, SPELLINGS)
    for name, models, names in (
        ("MiniMaxM3", "MiniMax-M3 (text)", NAMES),
        ("MiniMaxM3VL", "MiniMax-M3, its text model", VL_NAMES),
    )
}
