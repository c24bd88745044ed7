"""DeepSeek-V4 and GLM-5.3-Flash: residual streams that mix with each other, and attention to compressed keys."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from quire.model.families.config import ConfigReader
from quire.model.families.deepseek import ROUTED
from quire.model.families.family import (
    FULL,
    SLIDING,
    Family,
    layer_kinds,
    num_layers,
    read_decoder,
    read_moe,
    sparse_after,
)
from quire.model.families.gated_delta import LINEAR, decay_bound
from quire.model.families.indexed import INDEXED, INDEXER_NAMES, OWN, STILL, index_heads, indexer_types
from quire.model.families.kimi_linear import KDA_NAMES, read_kda
from quire.model.families.mixtures import v3_moe
from quire.model.families.names import LLAMA_NAMES, TensorNames
from quire.model.families.rope import PARTIAL, parse_rope, rotary_dim
from quire.model.parts.bounds import MAX_HEAD_DIM, MAX_STREAMS
from quire.model.parts.decoder import DecoderConfig
from quire.model.parts.indexer import IndexerConfig, KeysConfig
from quire.model.parts.norm import NormConfig
from quire.model.parts.rope import RopeSpec
from quire.model.parts.scores import ScoresConfig
from quire.model.parts.streams import HyperConfig, StreamEndsConfig

# Kinds of layers of DeepSeek-V4 by the published number, with the usual count of tokens of an entry.
CSA, HCA = "compressed_sparse_attention", "heavily_compressed_attention"
KINDS = {0: SLIDING, 4: CSA, 128: HCA}
HASHED, SCORED = "hash_moe", "moe"
SCORING = {"sqrtsoftplus": "root_softplus", "sigmoid": "sigmoid", "softmax": "softmax"}
# Modules of DeepSeek-V4 by path.
_V4_MODULES = (
    "embedding=model.embed_tokens norm=model.norm head=head streams=model.hc_head.hc_ attention_streams=hc_attn_ "
    "mlp_streams=hc_ffn_ attention_norm=attn_norm mlp_norm=ffn_norm attention.q_down=attn.wq_a "
    "attention.sinks=attn.attn_sink compressed.q_norm=attn.q_norm compressed.q=attn.wq_b compressed.kv=attn.wkv "
    "compressed.key_norm=attn.kv_norm compressed.low=attn.wo_a compressed.out=attn.wo_b "
    "compressed.entries.k=attn.compressor.wkv compressed.entries.gate=attn.compressor.wgate "
    "compressed.entries.k_norm=attn.compressor.norm compressed.entries.places=attn.compressor.ape "
    "indexer.q=attn.indexer.wq_b indexer.weights=attn.indexer.weights_proj indexer.k=attn.indexer.compressor.wkv "
    "indexer.gate=attn.indexer.compressor.wgate indexer.k_norm=attn.indexer.compressor.norm "
    "indexer.places=attn.indexer.compressor.ape mixture.router=ffn.gate mixture.table=ffn.gate.tid2eid "
    "mixture.correction=ffn.gate.bias mixture.experts=ffn.experts.{e}. mixture.shared=ffn.shared_experts. "
    "mixture.expert.gate=w1 mixture.expert.up=w3 mixture.expert.down=w2"
)
V4_NAMES = TensorNames(
    dict(pair.split("=") for pair in _V4_MODULES.split()),
    interleaved=True,
    index_interleaved=True,
    index_last=True,
    spellings={"embedding": "embed", "streams": "hc_head_", "compressed.key_norm": "attn.norm"},
    ignored=(r"(model\.)?mtp\..*",),
)


GLM_NAMES = LLAMA_NAMES.changed(
    {
        **KDA_NAMES,
        **INDEXER_NAMES,
        "indexer.gate.weight": "self_attn.indexer.index_kpool_compress_gate",
        "indexer.places": "self_attn.indexer.index_kpool_compress_ape",
        "mixture.shared": "mlp.shared_experts.",
        "attention_streams": "hc_attn_",
        "mlp_streams": "hc_ffn_",
    }
)


def read_deepseek_v4(config: ConfigReader) -> DecoderConfig:
    """DeepSeek-AI 2026. All layers have a window; some compress what lies before it, and some of them choose."""
    config.expect_all(
        {
            "attention_bias": False,
            "mlp_bias": False,
            "hidden_act": "silu",
            "num_key_value_heads": 1,
            "n_shared_experts": 1,
            "norm_topk_prob": True,
            "topk_method": "noaux_tc",
        }
    )
    config.skip("num_nextn_predict_layers expert_dtype intermediate_size")
    layers, eps = num_layers(config), config.number("rms_norm_eps", 1e-6)
    heads, head_dim = config.integer("num_attention_heads"), config.integer("head_dim", high=MAX_HEAD_DIM)
    groups = config.integer("o_groups")
    if heads % groups:
        raise config.wrong("o_groups", groups, f"a divisor of num_attention_heads ({heads})")
    kinds, norm, q_rank = _kinds(config, layers), NormConfig("rms", eps), config.integer("q_lora_rank")
    sizes = _rates(config)
    keys = {
        kind: KeysConfig(head_dim, norm, size, gated=True, overlap=kind == CSA)
        for kind, size in sizes.items()
    }
    plain, turned = _ropes(config, head_dim)
    indexer = None
    if CSA in kinds:
        index_count, dim = index_heads(config, turned.rotary_dim)
        indexer = IndexerConfig(
            config.integer("hidden_size"),
            index_count,
            KeysConfig(dim, norm, sizes[CSA], gated=True, overlap=True),
            config.integer("index_topk"),
            q_rank,
            pool=sizes[CSA],
        )
    config.skip("index_head_dim index_n_heads index_topk")
    mixer = {
        "num_heads": heads,
        "head_dim": head_dim,
        "q_rank": q_rank,
        "groups": groups,
        "out_rank": config.integer("o_lora_rank"),
        "norm": norm,
        "scores": ScoresConfig(heads, head_dim**-0.5, config.integer("sliding_window"), sinks=True),
        "rope": [plain if kind == SLIDING else turned for kind in kinds],
        "keys": [keys.get(kind) for kind in kinds],
        "indexer": [indexer if kind == CSA else None for kind in kinds],
    }
    return read_decoder(
        config,
        num_kv_heads=1,
        head_dim=head_dim,
        rotated=0,
        rope=turned,
        kinds="compressed",
        mixers={"compressed": mixer},
        moe=_moe(config, layers),
        activation="clamped_silu",
        **read_streams(config, ends=True),
    )


def read_glm5_next(config: ConfigReader) -> DecoderConfig:
    """Zhipu AI 2026: Kimi Delta Attention, and latent attention without positions to pools that an indexer chooses.

    Keys of the open pool are always seen.
    """
    config.expect_all({"mhc": True, "index_kpool_always_select_tail": True, "qk_rope_head_dim": 0})
    config.expect_all({"scoring_func": "sigmoid", "topk_method": "noaux_tc"})
    config.expect_all({"attention_bias": False, "hidden_act": "silu"})
    config.skip("head_dim qk_head_dim rope_theta rope_scaling rope_parameters num_nextn_predict_layers")
    layers, limit, q_rank = num_layers(config), config.positive("swiglu_limit"), config.integer("q_lora_rank")
    said = [INDEXED[0] if i % 4 == 3 else LINEAR for i in range(layers)]
    kinds = layer_kinds(config, said, (LINEAR, *INDEXED, FULL))
    types, chosen = indexer_types(config), config.integer("index_topk")
    pool = config.integer("index_kpool", low=2)
    if next((types[i] for i in range(layers) if kinds[i] != LINEAR), OWN) != OWN:
        raise config.wrong("indexer_types", types, f"{OWN} in the first layer of attention")
    if chosen % pool:
        raise config.wrong("index_topk", chosen, f"a multiple of index_kpool ({pool})")
    heads, dim = index_heads(config, 0)
    keys = KeysConfig(dim, NormConfig("layer", 1e-6, bias=True), pool, gated=True, norm_first=True)
    hidden, eps = config.integer("hidden_size"), config.number("rms_norm_eps", 1e-6)
    own = IndexerConfig(hidden, heads, keys, chosen // pool, q_rank, pool=pool, tail=True)
    latent = {
        "rope_dim": 0,
        "norm": NormConfig("rms", eps),
        "indexer": [own if kind == OWN else None for kind in types],
        "shares": [kind != OWN for kind in types],
    }
    inner = config.section("linear_attn_config") or ConfigReader({}, config.where)
    return read_kda(
        config,
        inner,
        kinds,
        64,
        _bound(config, inner, kinds),
        latent,
        layer_ropes=STILL,
        moe=v3_moe(config, sparse_after(config, default=3)) | {"limit": limit, "shared_limit": limit},
        mlp_limit=limit,
        activation="clamped_silu",
        **read_streams(config, ends=False),
    )


def _bound(config: ConfigReader, inner: ConfigReader, kinds: Sequence[str]) -> float:
    """Read the bound of decays. Lists of layers, counted from 0 or 1, repeat layer_types."""
    for key, linear in (("kda_layers", True), ("full_attn_layers", False)):
        listed = [i for i, kind in enumerate(kinds) if (kind == LINEAR) == linear]
        inner.expect(key, listed, [i + 1 for i in listed], None)
    safe, key = inner.boolean("safe_gate", True), "gate_lower_bound"
    bound = inner.get(key) if inner.given(key) else config.get("linear_lower_bound")
    bound = (-5.0 if safe else 0.0) if bound is None else bound
    return decay_bound(inner, key, bound)


def read_streams(config: ConfigReader, *, ends: bool) -> dict[str, Any]:
    """Read streams that mix. With `ends` weights read them at the end, too; else their mean is the end."""
    count = config.integer("hc_mult", high=MAX_STREAMS)
    about = (
        count,
        NormConfig("rms", config.number("rms_norm_eps", 1e-6), weight=False),
        config.positive("hc_eps"),
    )
    last = HyperConfig(*about, joins=False) if ends else None
    return {
        "streams": HyperConfig(*about, config.integer("hc_sinkhorn_iters", high=1000)),
        "additions": StreamEndsConfig(count, last),
    }


def _kinds(config: ConfigReader, layers: int) -> list[str]:
    """Read the kind of each layer; the numbers of the layers that predict further tokens may follow."""
    said = [CSA if i > 1 and i % 2 else HCA for i in range(layers)]
    numbers = config.get("compress_ratios")
    if numbers is not None:
        most = layers + config.count("num_nextn_predict_layers", 0)
        sound = isinstance(numbers, list) and all(type(one) is int and one in KINDS for one in numbers)
        if not sound or not layers <= len(numbers) <= most:
            raise config.wrong("compress_ratios", numbers, f"{layers} to {most} entries, each 0, 4 or 128")
        said = [KINDS[one] for one in numbers[:layers]]
    kinds = layer_kinds(config, said, tuple(KINDS.values()))
    if numbers is not None and kinds != said:
        raise config.wrong("layer_types", kinds, "as compress_ratios says")
    return kinds


def _rates(config: ConfigReader) -> dict[str, int]:
    """Read the tokens of an entry by the kind of layer."""
    inner = config.section("compress_rates") or ConfigReader({}, config.where)
    return {
        kind: config.integer(key, inner.integer(kind, size, low=2, high=1 << 16), low=2, high=1 << 16)
        for kind, size, key in ((CSA, 4, "compress_rate_csa"), (HCA, 128, "compress_rate_hca"))
    }


def _ropes(config: ConfigReader, head_dim: int) -> tuple[RopeSpec, RopeSpec]:
    """Read the ropes of layers without and with compressed keys. Yarn scales no cos and sin unless the file says so."""
    given, length = config.optional_integer("qk_rope_head_dim"), config.integer("max_position_embeddings")
    size = given or rotary_dim(config, head_dim, 64 / 512)
    config.skip(PARTIAL)
    if size > head_dim or size % 2:
        raise config.wrong("qk_rope_head_dim", size, f"an even number of at most head_dim ({head_dim})")
    found = config.section("rope_scaling") or config.section("rope_parameters")
    found = found or ConfigReader({}, f"{config.where}: rope_parameters")
    nested = found.given("compress") is not None
    main = found.section("main") if nested else None
    main = main or ConfigReader({}, f"{config.where}: rope_parameters: main")
    other = (found.section("compress") if nested else None) or found
    plain = parse_rope(config, main, size, length)
    turned = parse_rope(config, other, size, length, "compress_rope_theta")
    if not turned.truncate:  # transformers overlooks it here
        raise other.wrong("truncate", False, "true")
    if turned.kind == "yarn" and turned.attention_factor is None:
        turned = replace(turned, attention_factor=1.0)
    return plain, turned


def _moe(config: ConfigReader, layers: int) -> dict[str, Any]:
    """Read mixtures; in the first layers a table of tokens chooses the experts."""
    first = config.optional_integer("num_hash_layers", low=0)
    if first is not None and first > layers:
        raise config.wrong("num_hash_layers", first, f"at most num_hidden_layers ({layers})")
    first = min(3, layers) if first is None else first
    said = [HASHED if i < first else SCORED for i in range(layers)]
    hashed = [kind == HASHED for kind in layer_kinds(config, said, (HASHED, SCORED), "mlp_layer_types")]
    scoring = config.get("scoring_func")
    if not isinstance(scoring, str) or scoring not in SCORING:
        raise config.wrong("scoring_func", scoring, f"one of {', '.join(SCORING)}")
    limit = config.positive("swiglu_limit")
    moe = read_moe(
        config,
        experts="n_routed_experts",
        shared=config.integer("moe_intermediate_size"),
        scoring=SCORING[scoring],
        renormalize=True,
        scale=config.number("routed_scaling_factor", 1.0),
    )
    vocabulary = config.integer("vocab_size")
    return moe | {
        "limit": limit,
        "shared_limit": limit,
        "correction": [not table for table in hashed],
        "hashed": [vocabulary if table else 0 for table in hashed],
    }


FAMILIES = {
    "DeepseekV4ForCausalLM": Family(
        "DeepSeek-V4-Flash, V4-Pro",
        read_deepseek_v4,
        V4_NAMES,
        {
            "swiglu_limit": 10.0,
            "scoring_func": "sqrtsoftplus",
            "routed_scaling_factor": 1.5,
            "compress_rope_theta": 160000.0,
        },
        ROUTED,
    ),
    "Glm5NextForCausalLM": Family(
        "GLM-5.3-Flash (text)",
        read_glm5_next,
        GLM_NAMES,
        {"rms_norm_eps": 1e-5, "swiglu_limit": 10.0, "topk_group": 1},
        ROUTED,
        further=1,
    ),
}
