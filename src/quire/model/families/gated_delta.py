"""Qwen3-Next, Qwen3.5 and its successors, OLMo-hybrid: the gated delta rule, and attention in some layers."""

from __future__ import annotations

from math import isqrt
from typing import Any

from quire.model.families.config import ConfigReader
from quire.model.families.family import (
    FULL,
    Family,
    biases,
    head_size,
    layer_kinds,
    num_layers,
    read_decoder,
    read_moe,
)
from quire.model.families.names import LLAMA_NAMES, TensorNames
from quire.model.families.qwen import sparse_layers
from quire.model.families.rope import rotary_dim
from quire.model.parts.bounds import MAX_HEAD_DIM, MAX_HEADS, MAX_REACH, MAX_STREAMS
from quire.model.parts.decoder import DecoderConfig
from quire.model.parts.indexer import IndexerConfig, KeysConfig
from quire.model.parts.ngrams import NgramsConfig
from quire.model.parts.norm import NormConfig
from quire.model.parts.streams import GatedStreamsConfig, StreamEndsConfig

LINEAR, DELTA = "linear_attention", "delta"
GATES = {"silu": "silu", "swish": "silu", "sigmoid": "sigmoid"}
NAMES = LLAMA_NAMES.changed(
    {
        "attention.gate": "self_attn.q_proj",
        "delta.qkv": "linear_attn.in_proj_qkv",
        "delta.gate": "linear_attn.in_proj_z",
        "delta.beta": "linear_attn.in_proj_b",
        "delta.steps": "linear_attn.in_proj_a",
        "delta.steps.bias": "linear_attn.dt_bias",
        "delta.rates": "linear_attn.A_log",
        "delta.taps": "linear_attn.conv1d",
        "delta.norm": "linear_attn.norm",
        "delta.out": "linear_attn.out_proj",
        "norm_offset": 1.0,
        "ignored": (*LLAMA_NAMES.ignored, r"mtp\..*"),
        "further": "mtp.layers.{i}.",
        "further.join": "mtp.fc",
        "further.token_norm": "mtp.pre_fc_norm_embedding",
        "further.hidden_norm": "mtp.pre_fc_norm_hidden",
        "further.norm": "mtp.norm",
    }
)
STACKED = {
    "expert_stack": "rows",
    "expert_halves": True,
    "mixture.experts": "mlp.experts.",
    "mixture.expert.up": "gate_up_proj",
    "mixture.expert.down": "down_proj",
}


def delta_names(module: str) -> dict[str, str]:
    """Name the parts of the delta rule as the library fla does, whose projections are not fused."""
    return {
        **{f"delta.{name}": f"{module}.{name}_proj" for name in ("q", "k", "v")},
        **{f"delta.{name}_taps": f"{module}.{name}_conv1d" for name in ("q", "k", "v")},
        "delta.beta": f"{module}.b_proj",
        "delta.steps.bias": f"{module}.dt_bias",
        "delta.rates": f"{module}.A_log",
        "delta.norm": f"{module}.o_norm",
        "delta.out": f"{module}.o_proj",
    }


def kda(heads: int, size: int, taps: int, eps: float, **fields: Any) -> dict[str, Any]:
    """Make the fields of Kimi Delta Attention, whose keys and values are alike in number and size."""
    return {
        "key_heads": heads,
        "value_heads": heads,
        "key_dim": size,
        "value_dim": size,
        "taps": taps,
        "norm": NormConfig("rms", eps),
        "gate_activation": "sigmoid",
        "by_channel": True,
        **fields,
    }


def decay_bound(config: ConfigReader, key: str, bound: object) -> float:
    """Return the bound of decays, which is the value of `key`. ModelError: it is no number from -10000 to 0."""
    if isinstance(bound, bool) or not isinstance(bound, (int, float)) or not -1e4 <= bound <= 0:
        raise config.wrong(key, bound, "a number from -10000 to 0")
    return float(bound)


def read_delta(config: ConfigReader, kinds: list[str], eps: float, **fields: Any) -> dict[str, Any]:
    """Read what mixes tokens in layers of these kinds; the delta rule by Qwen's keys and other `fields`."""
    keys, values = config.integer("linear_num_key_heads"), config.integer("linear_num_value_heads")
    if values % keys:
        raise config.wrong("linear_num_value_heads", values, f"a multiple of linear_num_key_heads ({keys})")
    delta = {
        "key_heads": keys,
        "value_heads": values,
        "key_dim": config.integer("linear_key_head_dim"),
        "value_dim": config.integer("linear_value_head_dim"),
        "taps": config.integer("linear_conv_kernel_dim", low=2, high=64),
        "norm": NormConfig("rms", eps),
        **fields,
    }
    return {"kinds": [DELTA if kind == LINEAR else "attention" for kind in kinds], "mixers": {DELTA: delta}}


def delta_kinds(config: ConfigReader) -> list[str]:
    """Read the kinds of layers; by default each one whose number divides by full_attention_interval is attention."""
    every = config.integer("full_attention_interval")
    default = [LINEAR if (i + 1) % every else FULL for i in range(num_layers(config))]
    return layer_kinds(config, default, (FULL, LINEAR))


def read_qwen(config: ConfigReader, share: float = 0.25, **fields: Any) -> DecoderConfig:
    """Queries and keys are normed, and rotated, by default a `share` of them; heads are gated by element."""
    kinds, eps = delta_kinds(config), config.number("rms_norm_eps", 1e-6)
    for key, value in (
        ("attn_output_gate", True),
        ("use_sliding_window", False),
        ("mamba_ssm_dtype", "float32"),
    ):
        config.expect(key, value, None)
    config.skip("mtp_num_hidden_layers mtp_use_dedicated_embeddings")
    gate = config.get("output_gate_type") or "silu"
    if not isinstance(gate, str) or gate not in GATES:
        raise config.wrong("output_gate_type", gate, f"one of {', '.join(GATES)}")
    return read_decoder(
        config,
        rotated=rotary_dim(config, head_size(config), share),
        **biases(config),
        qk_norm="head",
        attention_gate="elements",
        attention_gate_bias=config.boolean("attention_bias", False),
        **read_delta(config, kinds, eps, gate_activation=GATES[gate]),
        **fields,
    )


def _moe(config: ConfigReader, layers: list[bool] | None) -> dict[str, Any]:
    return read_moe(
        config,
        layers=layers,
        shared=config.integer("shared_expert_intermediate_size"),
        renormalize=config.boolean("norm_topk_prob"),
        shared_gate=True,
    )


def read_qwen3_next(config: ConfigReader) -> DecoderConfig:
    return read_qwen(config, moe=_moe(config, sparse_layers(config)))


def read_qwen3_5(config: ConfigReader, **fields: Any) -> DecoderConfig:
    """Parts of a rope belong to the axes of pictures: a text's positions are the same on all."""
    rope = config.section("rope_parameters")
    if rope is not None:
        rope.skip("mrope_section mrope_interleaved")
    config.expect("mlp_only_layers", [], None)
    return read_qwen(config, **fields)


def read_qwen3_5_moe(config: ConfigReader, **fields: Any) -> DecoderConfig:
    return read_qwen3_5(config, moe=_moe(config, None), **fields)


def read_olmo_hybrid(config: ConfigReader) -> DecoderConfig:
    """Layers of the delta rule norm what they read, layers of attention what they add; a null rope_theta is no rope."""
    layers, heads = num_layers(config), config.integer("num_attention_heads")
    default = [FULL if i % 4 == 3 else LINEAR for i in range(layers)]
    kinds = layer_kinds(config, default if FULL in default else [*default[:-1], FULL], (FULL, LINEAR))
    given: dict[str, Any] = {
        key: config.optional_integer(key) or heads
        for key in ("linear_num_key_heads", "linear_num_value_heads")
    }
    width = max(1, int(0.75 * config.integer("hidden_size") / given["linear_num_key_heads"]))
    width = config.optional_integer("linear_key_head_dim") or width
    given["linear_key_head_dim"] = width
    given["linear_value_head_dim"] = config.optional_integer("linear_value_head_dim") or 2 * width
    negative = config.boolean("linear_allow_neg_eigval")
    ropes = [config, config.section("rope_parameters"), config.section("rope_scaling")]
    unturned = [
        one for one in ropes if one is not None and one.given("rope_theta") and one.get("rope_theta") is None
    ]
    for one in unturned:
        one.skip("rope_type rope_scaling rope_parameters")
    return read_decoder(
        config,
        rotated=0 if unturned else None,
        **biases(config),
        qk_norm="all_heads",
        placement=["pre" if kind == LINEAR else "post" for kind in kinds],
        **read_delta(config.derived(given), kinds, 1e-5, beta_scale=2.0 if negative else 1.0),
    )


NEXT = {
    "num_key_value_heads": 2,
    "head_dim": 256,
    "max_position_embeddings": 32768,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
MOE = {
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "num_experts_per_tok": 10,
    "num_experts": 512,
    "norm_topk_prob": True,
}


INDEXED = "indexed_attention"  # what transformers writes for full_attention
MAX_TABLES = 1024  # of all layers
MAX_ROWS = 1 << 25  # of a table, about
PLE = "model\\.layers\\.\\d+\\.ple\\.ple_embedding\\.ngram_heads_(offsets|vocab_sizes)"
QWEN4_NAMES = NAMES.changed(
    {
        **STACKED,
        "further": "",
        "streams": "model.hyper_connection_mixer.",
        "attention_streams": "attn_hyper_connection.",
        "mlp_streams": "mlp_hyper_connection.",
        "ngrams.table": "ple.ple_embedding.ngram_embedding",
        "ngrams.multipliers": "ple.ple_embedding.layer_multipliers",
        "ngrams.key": "ple.key_proj",
        "ngrams.value": "ple.value_proj",
        "ngrams.key_norm": "ple.norm_key",
        "ngrams.query_norm": "ple.norm_query",
        "ngrams.taps_norm": "ple.norm_conv",
        "ngrams.taps": "ple.conv1d",
        "indexer.qk": "self_attn.indexer.index_qk_proj",
        "indexer.q_norm": "self_attn.indexer.q_layernorm",
        "indexer.k_norm": "self_attn.indexer.k_layernorm",
        "ignored": (*NAMES.ignored, PLE),
    }
)


def read_qwen4(config: ConfigReader) -> DecoderConfig:
    """Layers have no norms but those of their streams; layers of attention have an indexer."""
    kinds = config.get("layer_types")
    if isinstance(kinds, list):
        config = config.derived({"layer_types": [FULL if kind == INDEXED else kind for kind in kinds]})
    streams, rank = config.integer("hc_count", low=2, high=MAX_STREAMS), config.integer("hc_lowrank")
    norm = NormConfig("rms", config.number("rms_norm_eps", 1e-6))
    return read_qwen3_5_moe(
        config,
        share=1.0,
        placement="none",
        final_norm=False,
        attention_indexer=_indexer(config, norm),
        streams=GatedStreamsConfig(streams, norm, rank),
        additions=StreamEndsConfig(streams, GatedStreamsConfig(streams, norm, rank, False)),
        layer_additions=_ngrams(config, streams, norm),
    )


def _indexer(config: ConfigReader, norm: NormConfig) -> IndexerConfig:
    """Read how attention chooses whole pools of keys; a pool that is still open is seen besides."""
    config.expect("indexer_kv_heads", 1)
    pool, hidden = config.integer("indexer_compress_ratio", high=MAX_REACH), config.integer("hidden_size")
    budget, turned = config.integer("indexer_budget"), rotary_dim(config, head_size(config))
    if budget % pool:
        raise config.wrong("indexer_budget", budget, f"a multiple of indexer_compress_ratio ({pool})")
    keys = KeysConfig(config.integer("indexer_head_dim", low=turned, high=MAX_HEAD_DIM), norm, pool)
    heads = config.integer("indexer_n_heads", high=MAX_HEADS)
    top_k = budget // pool
    return IndexerConfig(hidden, heads, keys, top_k, hidden, False, q_norm=norm, pool=pool, tail=True)


def _ngrams(config: ConfigReader, streams: int, norm: NormConfig) -> list[NgramsConfig | None]:
    """Read the tables of the layers that ple_layer_ids counts from 1; the sizes of all are different primes."""
    layers, found = num_layers(config), config.get("ple_layer_ids")
    config.skip("seed")  # the files have the multipliers that it gives
    keys = "ple_embed_dim ple_conv_kernel_size ngram_size heads_per_ngram ngram_vocab_size_base"
    if not found:
        config.skip(f"{keys} make_ngram_vocab_size_divisible_by split_ngram_parts")
        return [None] * layers
    kinds = delta_kinds(config)
    fits = isinstance(found, list) and all(type(i) is int and 1 <= i <= layers for i in found)
    if not fits or any(kinds[i - 1] != LINEAR for i in found):
        raise config.wrong(
            "ple_layer_ids", found, f"a list of layers of {LINEAR}, counted from 1 to {layers}"
        )
    own = sorted(set(found))
    longest, taps = config.integer("ngram_size", low=2, high=16), config.integer("ple_conv_kernel_size")
    each = (longest - 1) * config.integer("heads_per_ngram", high=MAX_TABLES)
    if each * len(own) > MAX_TABLES:
        raise config.wrong(
            "heads_per_ngram", each // (longest - 1), f"such that there are at most {MAX_TABLES} tables"
        )
    width = config.optional_integer("ple_embed_dim") or config.integer("hidden_size")
    if width % each:
        raise config.wrong("ple_embed_dim", width, f"a multiple of the number of tables of a layer ({each})")
    sizes = _primes(config.integer("ngram_vocab_size_base", high=MAX_ROWS), each * len(own))
    end, vocab = config.get("eos_token_id"), config.integer("vocab_size")
    end = end[0] if isinstance(end, list) and end else end
    if type(end) is not int or not 0 <= end < vocab:
        raise config.wrong("eos_token_id", end, f"a token id below {vocab}, which ends n-grams")
    tables: list[NgramsConfig | None] = [None] * layers
    for number, layer in enumerate(own):
        rows = tuple(sizes[number * each : (number + 1) * each])
        tables[layer - 1] = NgramsConfig(streams, norm, rows, width // each, longest, taps, end, vocab)
    return tables


def _primes(first: int, count: int) -> list[int]:
    """List the first primes that are not below a number."""
    found, number = list[int](), max(first, 2)
    while len(found) < count:
        if all(number % divisor for divisor in range(2, isqrt(number) + 1)):
            found.append(number)
        number += 1
    return found


def qwen4_names(spec: DecoderConfig, config: ConfigReader) -> TensorNames:
    """The tables of a layer lie in shards of one table, which is padded."""
    if not config.get("ple_layer_ids"):
        return QWEN4_NAMES
    multiple = config.integer("make_ngram_vocab_size_divisible_by", high=MAX_ROWS)
    shards = config.integer("split_ngram_parts", high=MAX_ROWS)
    return QWEN4_NAMES.changed({"ngram_shards": (shards, multiple)})


FAMILIES = {
    "Qwen3NextForCausalLM": Family(
        "qwen3_next",
        "Qwen3-Next-80B-A3B",
        read_qwen3_next,
        NAMES.changed({"delta.qkvz": "linear_attn.in_proj_qkvz", "delta.ba": "linear_attn.in_proj_ba"}),
        {**NEXT, **MOE, "decoder_sparse_step": 1},
    ),
    "Qwen3_5ForCausalLM": Family(
        "qwen3_5_text",
        "Qwen3.5, 3.6, 3.8 (dense, text)",
        read_qwen3_5,
        NAMES,
        {**NEXT, "num_key_value_heads": 4},
    ),
    "Qwen3_5MoeForCausalLM": Family(
        "qwen3_5_moe_text",
        "Qwen3.5, 3.6 (mixtures, text)",
        read_qwen3_5_moe,
        NAMES.changed(STACKED),
        {**NEXT, **MOE, "num_experts_per_tok": 8, "num_experts": 256},
    ),
    "OlmoHybridForCausalLM": Family(
        "olmo_hybrid",
        "OLMo-hybrid 7B",
        read_olmo_hybrid,
        {
            "attention_norm": "attention_layer_norm",
            "mlp_norm": "feedforward_layer_norm",
            "attention_post_norm": "feedforward_layer_norm",
            "mlp_post_norm": "post_feedforward_layernorm",
            "spellings": {"attention_post_norm": "post_attention_layernorm"},
            **delta_names("linear_attn"),
            "delta.gate": "linear_attn.g_proj",
            "delta.steps": "linear_attn.a_proj",
        },
        {
            "max_position_embeddings": 65536,
            "linear_conv_kernel_dim": 4,
            "linear_allow_neg_eigval": True,
        },
        unused="linear_a_log_min linear_a_log_max linear_dt_min linear_dt_max linear_dt_init_floor",
    ),
    "Qwen4ExpForCausalLM": Family(
        "qwen4_exp_text",
        "Qwen4-exp, Qwen3.8-Flash-Next (text)",
        read_qwen4,
        qwen4_names,
        {
            **NEXT,
            **MOE,
            "hc_count": 4,
            "hc_lowrank": 320,
            "ple_conv_kernel_size": 4,
            "ngram_size": 3,
            "heads_per_ngram": 8,
            "ngram_vocab_size_base": 20_000_000,
            "make_ngram_vocab_size_divisible_by": 128,
            "split_ngram_parts": 512,
        },
        unused="number_of_conv_states",
    ),
}
