"""Qwen4: the gated delta rule, attention over chosen pools of keys, gated residual streams, tables of n-grams."""

from __future__ import annotations

from math import isqrt

from quire.model.families.config import ConfigReader
from quire.model.families.family import FULL, Family, head_size, num_layers
from quire.model.families.gated_delta import LINEAR, MOE, NAMES, NEXT, STACKED, delta_kinds, read_qwen3_5_moe
from quire.model.families.names import TensorNames
from quire.model.families.rope import rotary_dim
from quire.model.parts.bounds import MAX_HEAD_DIM, MAX_HEADS, MAX_REACH, MAX_STREAMS
from quire.model.parts.decoder import DecoderConfig
from quire.model.parts.indexer import IndexerConfig, KeysConfig
from quire.model.parts.ngrams import NgramsConfig
from quire.model.parts.norm import NormConfig
from quire.model.parts.streams import GatedStreamsConfig, StreamEndsConfig

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
    "Qwen4ExpForCausalLM": Family(
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
    )
}
