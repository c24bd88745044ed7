"""Falcon, old and new, and BLOOM, which it came from: fused projections by group of heads, ALiBi or a rope."""

from __future__ import annotations

from msgspec.structs import replace

from quire.model.families.config import ConfigReader
from quire.model.families.llama import Keys, llama_like
from quire.model.families.names import TensorNames
from quire.model.spec import ArchSpec, Placement

BLOOM_NAMES = TensorNames(
    base="transformer.",
    embedding="transformer.word_embeddings",
    embedding_norm="transformer.word_embeddings_layernorm",
    norm="transformer.ln_f",
    layer="transformer.h.{i}.",
    qkv="self_attention.query_key_value",
    qkv_layout="grouped",
    out="self_attention.dense",
    up="mlp.dense_h_to_4h",
    down="mlp.dense_4h_to_h",
    ignored=(r"transformer\.h\.\d+\.self_attention\.rotary_emb\.inv_freq",),
)
# What BLOOM configs say beside the fields that decide: how the kernels of its training worked.
BLOOM_TRAINING = (
    "attention_softmax_in_fp32",
    "bias_dropout_fusion",
    "masked_softmax_fusion",
    "offset_alibi",
    "skip_bias_add",
    "skip_bias_add_qkv",
)


def falcon_names(spec: ArchSpec) -> TensorNames:
    """Norms are called otherwise where attention and MLP have one each."""
    if spec.placement != "parallel_two":
        return BLOOM_NAMES
    return replace(BLOOM_NAMES, attention_norm="ln_attn", mlp_norm="ln_mlp")


def read_falcon(config: ConfigReader) -> ArchSpec:
    """Almazrouei et al. 2023, arXiv:2311.16867: 7B, 40B and 180B, and the RW models with ALiBi."""
    config.expect("apply_residual_connection_post_layernorm", False)
    heads = config.integer("num_attention_heads")
    hidden, bias = _hidden(config), config.boolean("bias", False)
    newer, alibi = config.boolean("new_decoder_architecture", False), config.boolean("alibi", False)
    if alibi:
        for key in ("rope_parameters", "rope_theta", "rope_scaling"):
            config.get(key)  # written with their defaults all the same
    kv_heads, one = config.integer("num_kv_heads", heads), config.boolean("multi_query", True)
    return llama_like(
        config,
        "FalconForCausalLM",
        keys=Keys(
            hidden="hidden_size" if config.has("hidden_size") else "n_embed",
            inner="ffn_hidden_size",
            activation="activation",
            eps="layer_norm_epsilon",
        ),
        num_kv_heads=1 if one and not newer else kv_heads,
        default_inner=4 * hidden,
        default_max_position=2048,
        default_activation="gelu",
        default_eps=1e-5,
        default_tied=True,
        **({"rotated": 0, "alibi": "scaled"} if alibi else {}),
        placement=_placement(config, newer),
        norm="layer",
        norm_bias=True,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bias,
        gated=False,
    )


def _placement(config: ConfigReader, newer: bool) -> Placement:
    parallel = config.boolean("parallel_attn", True)
    norms = config.integer("num_ln_in_parallel_attn", 2 if newer else 1)
    if norms > (2 if newer else 1):
        raise config.wrong("num_ln_in_parallel_attn", norms, "1, or 2 with new_decoder_architecture")
    if newer and not parallel:
        raise config.wrong("parallel_attn", parallel, "true with new_decoder_architecture")
    if not parallel:
        return "pre"
    return "parallel_two" if norms == 2 else "parallel"


def read_bloom(config: ConfigReader) -> ArchSpec:
    """BigScience 2022, arXiv:2211.05100. There is no longest position; seq_length is what it was trained for."""
    config.expect("apply_residual_connection_post_layernorm", False)
    for key in BLOOM_TRAINING:
        config.get(key)
    heads = "n_head" if config.has("n_head") else "num_attention_heads"
    return llama_like(
        config,
        "BloomForCausalLM",
        keys=Keys(
            hidden="hidden_size" if config.has("hidden_size") else "n_embed",
            layers="n_layer" if config.has("n_layer") else "num_hidden_layers",
            heads=heads,
            eps="layer_norm_epsilon",
            positions="seq_length",
        ),
        num_kv_heads=config.integer(heads),
        intermediate_size=4 * _hidden(config),
        activation="gelu_tanh",
        default_max_position=2048,
        default_eps=1e-5,
        default_tied=True,
        rotated=0,
        alibi="scores",
        embedding_norm=True,
        norm="layer",
        norm_bias=True,
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        gated=False,
    )


def _hidden(config: ConfigReader) -> int:
    """hidden_size, or its older name."""
    return config.integer("hidden_size" if config.has("hidden_size") else "n_embed")
