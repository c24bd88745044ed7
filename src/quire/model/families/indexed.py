"""Latent attention that chooses its keys by an indexer: DeepSeek-V3.2, GLM-5, Hunyuan-4, Mistral-Large-4."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from quire.model.families.config import ConfigReader
from quire.model.families.deepseek import (
    MTP,
    NOTHING,
    ROUTED,
    deepseek_names,
    read_deepseek_v3,
    read_latent,
    read_routed,
)
from quire.model.families.family import Family, layer_kinds, listed_layers, num_layers
from quire.model.families.gated_delta import STACKED
from quire.model.families.names import TensorNames
from quire.model.families.rope import read_rope
from quire.model.parts.bounds import MAX_HEAD_DIM, MAX_HEADS, MAX_STREAMS
from quire.model.parts.decoder import DecoderConfig
from quire.model.parts.indexer import IndexerConfig, KeysConfig
from quire.model.parts.norm import NormConfig
from quire.model.parts.rope import RopeSpec
from quire.model.parts.streams import HyperConfig, StreamEndsConfig

OWN, SHARED = "full", "shared"
INDEXED = "indexed_attention", "deepseek_sparse_attention"  # now, and before
INDEXER_NAMES = {
    "indexer.q": "self_attn.indexer.wq_b",
    "indexer.k": "self_attn.indexer.wk",
    "indexer.k_norm": "self_attn.indexer.k_norm",
    "indexer.weights": "self_attn.indexer.weights_proj",
}
PATTERN = "index_topk_pattern"
HY_V4_NAMES = {
    **INDEXER_NAMES,
    "mixture.shared": "mlp.shared_experts.",
    "interleaved": False,
    "index_last": True,
    "attention.sinks": "self_attn.learnable_sink_param",
    "attention.gate": "self_attn.linear_gate",
    "mlp.gate": "mlp.linear_gate",
    "mixture.shared.gate.apart": "linear_gate",
    "attention_streams": "hc_pre.hc_attn_layer.hc_",
    "mlp_streams": "hc_pre.hc_mlp_layer.hc_",
    "streams": "model.hc_pre.hc_head.hc_head_",
    "ignored": (r"model\.mtp_layers\..*",),
    "spellings": {
        "mlp.gate": "mlp.gate_proj",
        "mixture.shared.gate.apart": "gate_proj",
        "streams": "model.hc_head.hc_pre.hc_head_",
    },
    **STACKED,
}
MISTRAL_NAMES = TensorNames(
    {
        "embedding": "tok_embeddings",
        "norm": "norm",
        "head": "output",
        "rope": "lerope",
        "attention_norm": "attention_norm",
        "attention.q": "attention.wq",
        "attention.kv_down": "attention.wkv_a_with_mqa",
        "attention.kv_norm": "attention.kv_a_norm",
        "attention.kv_up": "attention.wkv_b",
        "attention.out": "attention.wo",
        "attention.growths": "attention.ssmax_scaling.s",
        "attention.bases": "attention.ssmax_scaling.b",
        "indexer.growths": "attention.indexer.ssmax_scaling.s",
        "indexer.bases": "attention.indexer.ssmax_scaling.b",
        **{path: name.replace("self_attn", "attention") for path, name in INDEXER_NAMES.items()},
        "indexer.input_norm": "attention.indexer.q_input_norm",
        "mlp_norm": "ffn_norm",
        "mlp.gate": "feed_forward.w1",
        "mlp.up": "feed_forward.w3",
        "mlp.down": "feed_forward.w2",
        "mixture.router": "gate",
        "mixture.experts": "experts.{e}.",
        "mixture.expert.gate": "w1",
        "mixture.expert.up": "w3",
        "mixture.expert.down": "w2",
        "mixture.shared": "shared_experts.",
    },
    layer="layers.{i}.",
    base="",
    interleaved=True,
    index_interleaved=True,
    ignored=(r"mtp_dspark\..*", r"(pre_mm_projector_norm|vision_language_adapter)\..*"),
)
STILL = RopeSpec("proportional", 10000.0, 2)


def read_deepseek_v32(config: ConfigReader) -> DecoderConfig:
    """DeepSeek-AI 2025, arXiv:2512.02556. Attention turns neighbouring elements, the indexer halves."""
    return _read_v3(config, [OWN] * num_layers(config), False)


def read_glm_moe_dsa(config: ConfigReader) -> DecoderConfig:
    """Zhipu AI 2026. From GLM-5.2 on some layers see the keys that the indexer of an earlier one chose."""
    return _read_v3(config, indexer_types(config), True)


def _read_v3(config: ConfigReader, types: Sequence[str], interleaved: bool) -> DecoderConfig:
    config.expect_all({"rope_interleave": True, "indexer_rope_interleave": interleaved, "mlp_bias": False})
    return read_deepseek_v3(config, 3, read_indexer(config, types, config.integer("q_lora_rank")))


def read_hy_v4_vl(config: ConfigReader) -> DecoderConfig:
    """Hunyuan-4 inside a model that sees, which turns pairs, and norms latents with the config's epsilon."""
    if (rope := config.section("rope_parameters")) is not None:
        rope.skip("mrope_section")  # a text's positions are the same on all axes
    return read_hy_v4(config, {"norm": NormConfig("rms", config.number("rms_norm_eps"))})


def read_hy_v4(config: ConfigReader, latent: Mapping[str, Any] = NOTHING) -> DecoderConfig:
    """Tencent 2026: gates and sinks in attention, and several residual streams, each of which stays itself."""
    layers, streams = num_layers(config), config.integer("hc_mult", high=MAX_STREAMS)
    config.expect("hidden_act", "silu")
    config.skip("num_key_value_heads learnable_sink_init")  # all heads have keys of their own
    norm, eps = config.number("rms_norm_eps"), config.number("hc_eps")
    about = streams, NormConfig("rms", norm, weight=False), eps
    types = index_types(config, [SHARED if i % 4 != 1 and i else OWN for i in range(layers)])
    return read_deepseek_v3(
        config.derived({"num_key_value_heads": config.integer("num_attention_heads")}),
        1,
        read_indexer(config, types, config.integer("q_lora_rank"), norm) | {"gate": "elements", **latent},
        {
            "activation": "clamped_silu",
            "scores_sinks": True,
            "streams": HyperConfig(*about, magnitude=config.number("hc_magnitude"), floor=eps),
            "additions": StreamEndsConfig(streams, HyperConfig(*about, joins=False)),
        },
        limit=config.positive("swiglu_limit"),
    )


def read_mistral_large4(config: ConfigReader) -> DecoderConfig:
    """Mistral AI 2026: layers without positions, frequencies that are learned, and latents that layers share.

    Queries, which no latent makes, grow with the logarithm of their position.
    """
    config.expect("q_lora_rank", None)
    config.expect("norm_topk_prob", True)
    if config.given("rope_parameters") is None:
        raise config.wrong("rope_parameters", None, "given")
    nope, rotated = config.integer("qk_nope_head_dim"), config.integer("qk_rope_head_dim")
    rope = read_rope(config, rotated, config.integer("max_position_embeddings"))
    turned = layer_kinds(
        config, [int(i % 4 != 3) for i in range(num_layers(config))], (0, 1), "no_rope_layers"
    )
    norm, hidden = NormConfig("layer", 1e-6, bias=True), config.integer("hidden_size")
    latent = {
        **read_indexer(config, indexer_types(config), hidden, input_norm=norm, position_scale=True),
        "nope_dim": [nope if turns else nope + rotated for turns in turned],
        "rope_dim": [rotated if turns else 0 for turns in turned],
        "norm": NormConfig("rms", config.number("rms_norm_eps")),
        "position_scale": True,
        "learned_rope": [bool(turns) for turns in turned],
        "back": _latents_back(config, turned),
    }
    return read_latent(
        config,
        latent=latent,
        moe=read_routed(config, 1, scoring="softmax", group_sum=True, renormalize=True),
        layer_ropes=[rope if turns else STILL for turns in turned],
        head_cap=config.positive("final_logit_softcapping"),
    )


def _latents_back(config: ConfigReader, turned: Sequence[object]) -> list[int]:
    """Read the distance of the layer whose latents each layer reads."""
    key, layers = "kv_source_layers", num_layers(config)
    found = listed_layers(config, key, range(layers))
    if len(found) != layers or any(
        source > i or found[source] != source or turned[source] != turned[i] for i, source in enumerate(found)
    ):
        raise config.wrong(key, found, "for each layer itself, or an earlier one like it that reads its own")
    return [i - source for i, source in enumerate(found)]


def indexer_types(config: ConfigReader) -> list[str]:
    """Read which layers have an indexer: from a list, from a pattern of F and S, or at a distance."""
    layers, pattern = num_layers(config), config.get(PATTERN)
    every = max(1, config.count("index_topk_freq", 1))
    offset = config.count("index_skip_topk_offset", 2)
    said = [OWN if max(0, i - offset + 1) % every == 0 else SHARED for i in range(layers)]
    if isinstance(pattern, str):
        pattern = [{"F": OWN, "S": SHARED}.get(letter) for letter in pattern]
    return index_types(config, layer_kinds(config.derived({PATTERN: pattern}), said, (OWN, SHARED), PATTERN))


def index_types(config: ConfigReader, said: Sequence[str]) -> list[str]:
    """Read which layers have an indexer, or take what is `said`."""
    types = layer_kinds(config, said, (OWN, SHARED), "indexer_types")
    if types[0] != OWN:
        raise config.wrong("indexer_types", types, f"{OWN} in the first layer")
    return types


def read_indexer(
    config: ConfigReader, types: Sequence[str], width: int, eps: float = 1e-6, **fields: Any
) -> dict[str, Any]:
    """Read the fields of latent attention. Queries of indexers have `width` inputs; the family sets other `fields`."""
    layer_kinds(config, [INDEXED[0]] * num_layers(config), INDEXED)
    config.skip("index_share_for_mtp_iteration moe_router_dtype")
    heads, dim = index_heads(config, config.integer("qk_rope_head_dim"))
    hidden = config.integer("hidden_size")
    keys, top_k = KeysConfig(dim, NormConfig("layer", eps, bias=True)), config.integer("index_topk")
    indexer = IndexerConfig(hidden, heads, keys, top_k, width, **fields)
    return {
        "indexer": [indexer if kind == OWN else None for kind in types],
        "shares": [kind == SHARED for kind in types],
    }


def index_heads(config: ConfigReader, turned: int) -> tuple[int, int]:
    """Read the number of an indexer's heads, and their size, of which `turned` elements turn."""
    dim = config.integer("index_head_dim", high=MAX_HEAD_DIM)
    if dim < turned:
        raise config.wrong("index_head_dim", dim, f"at least qk_rope_head_dim ({turned})")
    return config.integer("index_n_heads", high=MAX_HEADS), dim


SPELLINGS = {**MTP, "n_routed_experts": "n_routed_experts num_local_experts num_experts"}
FAMILIES = {
    "DeepseekV32ForCausalLM": Family(
        "DeepSeek-V3.2",
        read_deepseek_v32,
        partial(deepseek_names, changes=INDEXER_NAMES),
        {},
        SPELLINGS,
        further=1,
    ),
    "GlmMoeDsaForCausalLM": Family(
        "GLM-5, 5.1, 5.2, 5.3",
        read_glm_moe_dsa,
        partial(deepseek_names, changes={**INDEXER_NAMES, "index_interleaved": True}),
        {},
        SPELLINGS,
        further=1,
    ),
    "HYV4ForCausalLM": Family("Hunyuan-4", read_hy_v4, HY_V4_NAMES, {}, ROUTED),
    "HYV4VLTextForCausalLM": Family(
        "Hunyuan-4 VL",
        read_hy_v4_vl,
        {**HY_V4_NAMES, "interleaved": True, "index_interleaved": True},
        {},
        ROUTED,
    ),
    "MistralLarge4ForCausalLM": Family("Mistral-Large-4", read_mistral_large4, MISTRAL_NAMES, {}, ROUTED),
}
