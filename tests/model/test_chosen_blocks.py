"""Attention that sees blocks or pools that an indexer chose: which configs are read, and which refused in one line."""

from __future__ import annotations

from typing import Any

import pytest

from quire.devices.kv import KVLayer
from quire.errors import ConfigError, ModelError
from quire.model.families import read_model
from quire.model.packing import wanted_tensors
from quire.model.parts.attention import AttentionConfig
from quire.model.parts.decoder import DecoderConfig
from quire.model.shard import WHOLE, Shard

COMMON: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 128,
    "eos_token_id": 2,
}
SPARSE: dict[str, Any] = {
    "sparse_num_index_heads": 2,
    "sparse_index_dim": 12,
    "sparse_block_size": 8,
    "sparse_topk_blocks": 3,
    "sparse_local_block": 1,
    "sparse_attention_freq": [0, 1, 1, 1],
}
M3: dict[str, Any] = {
    **COMMON,
    "architectures": ["MiniMaxM3ForCausalLM"],
    "intermediate_size": 24,
    "dense_intermediate_size": 40,
    "shared_intermediate_size": 24,
    "num_local_experts": 6,
    "moe_layer_freq": [0, 1, 1, 1],
    "partial_rotary_factor": 0.5,
    "routed_scaling_factor": 2.0,
    "swiglu_limit": 7.0,
    "sparse_attention_config": SPARSE,
}
LINEAR = "linear_attention"
QWEN4: dict[str, Any] = {
    **COMMON,
    "architectures": ["Qwen4ExpForCausalLM"],
    "layer_types": [LINEAR, LINEAR, LINEAR, "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 10,
    "linear_value_head_dim": 12,
    "moe_intermediate_size": 12,
    "shared_expert_intermediate_size": 14,
    "num_experts": 6,
    "hc_count": 3,
    "hc_lowrank": 8,
    "ple_layer_ids": [2, 3],
    "ple_embed_dim": 24,
    "ngram_size": 3,
    "heads_per_ngram": 2,
    "ngram_vocab_size_base": 97,
    "make_ngram_vocab_size_divisible_by": 16,
    "split_ngram_parts": 3,
    "indexer_n_heads": 5,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 20,
    "indexer_budget": 16,
    "indexer_compress_ratio": 4,
}


def read(config: dict[str, Any]) -> DecoderConfig:
    return read_model(config, "config.json")[0]


def sparse(**changes: Any) -> dict[str, Any]:
    return {"sparse_attention_config": {**SPARSE, **changes}}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (sparse(sparse_block_size=0), "sparse_block_size must be an integer from 1"),
        (sparse(sparse_block_size=1 << 20), "sparse_block_size must be an integer from 1"),
        (sparse(sparse_topk_blocks=0), "sparse_topk_blocks must be an integer from 1"),
        (sparse(sparse_local_block=4), "sparse_local_block must be an integer from 0 to 3"),
        (sparse(sparse_local_block=-1), "sparse_local_block must be an integer from 0 to 3"),
        (sparse(sparse_index_dim=4), "sparse_index_dim must be an integer from 8"),
        (sparse(sparse_index_dim=1 << 30), "sparse_index_dim must be an integer from 8"),
        (
            sparse(sparse_num_index_heads=4),
            "num_key_value_heads must be the number of an indexer's heads .4.",
        ),
        (sparse(sparse_attention_freq=[1, 1]), "sparse_attention_freq must be 4 entries, each one of 0, 1"),
        (sparse(sparse_attention_freq=[0, 1, 2, [1]]), "sparse_attention_freq must be 4 entries"),
        (sparse(sparse_disable_index_value=[0] * 4), "sparse_disable_index_value must be 1 where"),
        (sparse(sparse_init_block=1), "sparse_init_block must be 0"),
        (sparse(sparse_score_type="mean"), "sparse_score_type must be 'max'"),
        (sparse(use_sparse_attention=False), "use_sparse_attention must be True"),
        (sparse(sparse_window=8), "sparse_window = 8 is not understood"),
        ({"moe_layer_freq": [0, 1]}, "moe_layer_freq must be 4 entries, each one of 0, 1"),
        ({"moe_layer_freq": [0, 1, 1, 1], "first_k_dense_replace": 2}, "dense in the first 2 layers"),
        ({"layer_types": ["full_attention"]}, "layer_types must be 4 entries"),
        ({"rotary_dim": 12}, "rotary_dim must be 8"),
        ({"swiglu_limit": 0.0}, "swiglu_limit must be greater than 0"),
        ({"swiglu_alpha": 1.0}, "swiglu_alpha must be 1.702"),
        ({"moe_intermediate_size": 25}, "moe_intermediate_size must be 24"),
        ({"use_gemma_norm": False}, "use_gemma_norm must be True"),
        ({"hidden_act": "gelu"}, "hidden_act must be 'swigluoai'"),
    ],
)
def test_blocks_that_do_not_fit_are_refused(changes: dict[str, Any], says: str) -> None:
    read(M3)
    with pytest.raises(ModelError, match=says) as caught:
        read({**M3, **changes})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"indexer_compress_ratio": 0}, "indexer_compress_ratio must be an integer from 1"),
        ({"indexer_compress_ratio": 5}, "indexer_budget must be a multiple of indexer_compress_ratio .5."),
        ({"indexer_budget": 0}, "indexer_budget must be an integer from 1"),
        ({"indexer_head_dim": 12}, "indexer_head_dim must be an integer from 16"),
        ({"indexer_head_dim": 1 << 30}, "indexer_head_dim must be an integer from 16"),
        ({"indexer_n_heads": 1 << 20}, "indexer_n_heads must be an integer from 1"),
        ({"indexer_n_heads": None}, "indexer_n_heads must be an integer from 1"),
        ({"indexer_kv_heads": 2}, "indexer_kv_heads must be 1"),
        (
            {"ple_layer_ids": [0]},
            "ple_layer_ids must be a list of layers of linear_attention, counted from 1 to 4",
        ),
        ({"ple_layer_ids": [5]}, "ple_layer_ids must be a list"),
        ({"ple_layer_ids": [4]}, "ple_layer_ids must be a list of layers of linear_attention"),
        ({"ple_layer_ids": [[2]]}, "ple_layer_ids must be a list"),
        ({"ple_layer_ids": "all"}, "ple_layer_ids must be a list"),
        ({"ple_embed_dim": 25}, "ple_embed_dim must be a multiple of the number of tables of a layer .4."),
        ({"heads_per_ngram": 0}, "heads_per_ngram must be an integer from 1"),
        ({"heads_per_ngram": 1 << 20}, "heads_per_ngram must be an integer from 1 to 1024"),
        ({"heads_per_ngram": 400, "ple_embed_dim": 800}, "heads_per_ngram must be such that .* 1024 tables"),
        ({"ngram_size": 1}, "ngram_size must be an integer from 2 to 16"),
        ({"ngram_size": 1 << 30}, "ngram_size must be an integer from 2 to 16"),
        ({"ngram_vocab_size_base": 1 << 30}, "ngram_vocab_size_base must be an integer from 1"),
        ({"make_ngram_vocab_size_divisible_by": 0}, "make_ngram_vocab_size_divisible_by must be"),
        ({"split_ngram_parts": 0}, "split_ngram_parts must be an integer from 1"),
        ({"ple_conv_kernel_size": 65}, "taps must be from 2 to 64"),
        ({"eos_token_id": None}, "eos_token_id must be a token id below 97"),
        ({"eos_token_id": []}, "eos_token_id must be a token id below 97"),
        ({"eos_token_id": [97]}, "eos_token_id must be a token id below 97"),
        ({"hc_count": 1}, "hc_count must be an integer from 2 to 16"),
        ({"hc_lowrank": 0}, "hc_lowrank must be an integer from 1"),
        ({"hc_lowrank": 1 << 28}, "rank must be from 0"),
        ({"layer_types": [LINEAR, "conv", LINEAR, LINEAR]}, "layer_types must be 4 entries"),
        ({"output_gate_type": "relu"}, "output_gate_type must be one of"),
    ],
)
def test_pools_and_tables_that_do_not_fit_are_refused(changes: dict[str, Any], says: str) -> None:
    read(QWEN4)
    with pytest.raises(ModelError, match=says) as caught:
        read({**QWEN4, **changes})
    assert "\n" not in str(caught.value)


def test_layers_keep_index_keys_beside_their_own() -> None:
    dense, *chosen = read(M3).kv_spec("float32").layers or ()
    assert dense == KVLayer(2, 16)
    assert chosen == [KVLayer(2, 16)] * 3 + [KVLayer(1, 12, value_dim=12)] * 3
    model = read(QWEN4)
    layers = model.kv_spec("float32").layers or ()
    assert layers[4:] == (KVLayer(1, 20, value_dim=20, every=4), KVLayer(1, 20, 4, value_dim=20))
    assert [len(layer.states) for layer in layers[:4]] == [2, 4, 4, 0]


def test_both_spellings_of_indexers_and_kinds_are_read() -> None:
    others = {
        "index_n_heads": 2,
        "index_head_dim": 12,
        "index_block_size": 8,
        "index_topk_blocks": 3,
        "index_local_blocks": 1,
        "layer_types": ["full_attention", *["minimax_m3_sparse"] * 3],
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
    }
    apart = {
        key: value for key, value in M3.items() if key not in ("sparse_attention_config", "moe_layer_freq")
    }
    assert read({**apart, **others}) == read(M3)
    assert read({**M3, **others, "index_block_size": 99}) == read(M3)  # the inner object prevails
    kinds = [LINEAR, LINEAR, LINEAR, "indexed_attention"]
    assert read({**QWEN4, "layer_types": kinds}) == read({**QWEN4, "layer_types": None}) == read(QWEN4)
    plain = read({**apart, "mlp_layer_types": ["dense"] * 4})
    assert all(isinstance(layer.mixer, AttentionConfig) and not layer.mixer.indexer for layer in plain.layers)
    assert read({**QWEN4, "ple_layer_ids": None}).layers[1].additions is None


def test_tables_lie_in_shards_of_equal_sizes_with_the_padding() -> None:
    """Primes from 97 on: 97, 101, 103 and 107 in the first layer with tables, the next four in the second."""
    spec, names = read_model(QWEN4, "config.json")
    wanted = wanted_tensors(spec, names)
    for layer, whole, each in ((1, 416, 139), (2, 480, 160)):
        name = f"model.layers.{layer}.ple.ple_embedding.ngram_embedding.shard_"
        shards = [tensor.shape for key, tensor in wanted.items() if key.startswith(name)]
        assert shards == [(each, 6), (each, 6), (whole - 2 * each, 6)]
        assert wanted[f"model.layers.{layer}.ple.ple_embedding.layer_multipliers"].numbers
    tables = [layer.additions for layer in spec.layers]
    assert [getattr(table, "rows", None) for table in tables] == [
        None,
        (97, 101, 103, 107),
        (109, 113, 127, 131),
        None,
    ]


def test_ranks_divide_heads_with_their_choices_and_stages_keep_their_tables() -> None:
    for config in (M3, QWEN4):
        model = read(config)
        model.check_share(Shard(rank=0, size=2))
        for stage in (0, 1):
            spec = model.kv_spec("float32", Shard(stage=stage, stages=2))
            assert spec.num_layers == 2 + len([layer for layer in spec.layers or () if layer.value_dim])
    with pytest.raises(ConfigError, match="a table of tokens for some layers"):
        read(QWEN4).with_spare_tokens(4)
    share = read(M3).kv_spec("float32", Shard(rank=1, size=2))
    assert (share.layers or ())[1] == KVLayer(1, 16)
    assert (share.layers or ())[-1] == KVLayer(1, 12, value_dim=12)
    assert read(M3).layers[1].further(WHOLE) == (KVLayer(1, 12, value_dim=12),)
