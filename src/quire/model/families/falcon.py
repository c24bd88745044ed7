"""Falcon, old and new, and BLOOM, which it came from: fused projections by group of heads, ALiBi or a rope."""

from __future__ import annotations

from quire.model.families.config import ConfigReader
from quire.model.families.family import Family, head_size, read_decoder
from quire.model.families.gpt import PLAIN, UNGROUPED
from quire.model.families.names import LLAMA_NAMES, TensorNames
from quire.model.parts.decoder import DecoderConfig
from quire.model.parts.layer import Placement

BLOOM_NAMES = LLAMA_NAMES.changed(
    {
        "base": "transformer.",
        "embedding": "transformer.word_embeddings",
        "embedding_norm": "transformer.word_embeddings_layernorm",
        "norm": "transformer.ln_f",
        "layer": "transformer.h.{i}.",
        "attention.qkv": "self_attention.query_key_value",
        "qkv_layout": "grouped",
        "attention.out": "self_attention.dense",
        "mlp.up": "mlp.dense_h_to_4h",
        "mlp.down": "mlp.dense_4h_to_h",
        "ignored": (r"transformer\.h\.\d+\.self_attention\.rotary_emb\.inv_freq",),
    }
)
# BLOOM_TRAINING keys tell how the kernels of training worked; they decide nothing.
BLOOM_TRAINING = """attention_softmax_in_fp32 bias_dropout_fusion masked_softmax_fusion offset_alibi skip_bias_add
    skip_bias_add_qkv"""


def falcon_names(spec: DecoderConfig, config: ConfigReader) -> TensorNames:
    """Attention and MLP with a norm each have other names for them."""
    if spec.layers[0].placement != "parallel_two":
        return BLOOM_NAMES
    return BLOOM_NAMES.changed({"attention_norm": "ln_attn", "mlp_norm": "ln_mlp"})


def read_falcon(config: ConfigReader) -> DecoderConfig:
    """Almazrouei et al. 2023, arXiv:2311.16867: 7B, 40B and 180B, and the RW models with ALiBi."""
    config.expect("apply_residual_connection_post_layernorm", False)
    bias, newer = config.boolean("bias", False), config.boolean("new_decoder_architecture", False)
    alibi = config.boolean("alibi", False)
    if alibi:
        config.skip("rope_parameters rope_theta rope_scaling")  # written with their defaults all the same
    heads = config.integer("num_attention_heads")
    kv_heads, one = config.optional_integer("num_kv_heads") or heads, config.boolean("multi_query")
    inner = config.optional_integer("intermediate_size") or 4 * config.integer("hidden_size")
    return read_decoder(
        config,
        **{**PLAIN, "attention_qkv_bias": bias, "attention_out_bias": bias, "mlp_bias": bias},
        num_kv_heads=1 if one and not newer else kv_heads,
        intermediate_size=inner,
        **({"rotated": 0, "scores_alibi": head_size(config) ** -0.5} if alibi else {}),
        placement=_placement(config, newer),
    )


def _placement(config: ConfigReader, newer: bool) -> Placement:
    parallel = config.boolean("parallel_attn")
    norms = config.optional_integer("num_ln_in_parallel_attn") or (2 if newer else 1)
    if norms > (2 if newer else 1):
        raise config.wrong("num_ln_in_parallel_attn", norms, "1, or 2 with new_decoder_architecture")
    if newer and not parallel:
        raise config.wrong("parallel_attn", parallel, "true with new_decoder_architecture")
    if not parallel:
        return "pre"
    return "parallel_two" if norms == 2 else "parallel"


def read_bloom(config: ConfigReader) -> DecoderConfig:
    """BigScience 2022, arXiv:2211.05100. There is no longest position; seq_length is what it was trained for."""
    config.expect("apply_residual_connection_post_layernorm", False)
    config.skip(BLOOM_TRAINING)
    return read_decoder(
        config,
        **PLAIN,
        intermediate_size=4 * config.integer("hidden_size"),
        activation="gelu_tanh",
        rotated=0,
        scores_alibi=1.0,
        embedding_norm=True,
    )


FAMILIES = {
    "FalconForCausalLM": Family(
        "Falcon 7B, 40B, 180B, RW",
        read_falcon,
        falcon_names,
        {
            "max_position_embeddings": 2048,
            "hidden_act": "gelu",
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": True,
            "multi_query": True,
            "parallel_attn": True,
        },
        {
            "hidden_size": "hidden_size n_embed",
            "intermediate_size": "ffn_hidden_size",
            "hidden_act": "activation",
            "rms_norm_eps": "layer_norm_epsilon",
            **UNGROUPED,
        },
    ),
    "BloomForCausalLM": Family(
        "BLOOM, BLOOMZ",
        read_bloom,
        BLOOM_NAMES,
        {"max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "tie_word_embeddings": True},
        {
            "hidden_size": "hidden_size n_embed",
            "num_hidden_layers": "n_layer num_hidden_layers",
            "num_attention_heads": "n_head num_attention_heads",
            "max_position_embeddings": "seq_length",
            "rms_norm_eps": "layer_norm_epsilon",
            **UNGROUPED,
        },
    ),
}
