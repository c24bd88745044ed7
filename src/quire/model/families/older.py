"""Decoders from before Llama: GPT-BigCode, CodeGen, GPT-Neo, GPT-1, CTRL, XGLM, BioGPT, MPT, Persimmon."""

from __future__ import annotations

from functools import partial
from typing import Any

from quire.model.families.config import ConfigReader
from quire.model.families.family import Family, head_size, num_layers, read_activation, read_decoder
from quire.model.families.gpt import (
    GPT,
    GPT2_NAMES,
    GPT_KEYS,
    GPTJ_NAMES,
    OPT_NAMES,
    PLAIN,
    UNGROUPED,
    read_gptj,
)
from quire.model.families.names import TensorNames
from quire.model.families.rope import rotary_dim
from quire.model.parts.decoder import DecoderConfig


def read_bigcode(config: ConfigReader) -> DecoderConfig:
    """StarCoder 1, SantaCoder. Li et al. 2023, arXiv:2305.06161: one key and value for all heads."""
    config.skip("attention_softmax_in_fp32 scale_attention_softmax_in_fp32 runner_max_sequence_length")
    config.skip(
        "inference_runner validate_runner_input pre_allocate_kv_cache max_batch_size max_sequence_length"
    )
    config.expect("scale_attn_weights", True)
    one = config.boolean("multi_query")
    heads = config.integer("num_attention_heads")
    inner = config.optional_integer("intermediate_size") or 4 * config.integer("hidden_size")
    kv_heads = 1 if one else heads
    return read_decoder(
        config, **PLAIN, num_kv_heads=kv_heads, intermediate_size=inner, rotated=0, positions_offset=0
    )


def bigcode_names(spec: DecoderConfig, config: ConfigReader) -> TensorNames:
    names = GPT2_NAMES.changed({"transposed": False})
    return names if spec.num_kv_heads == 1 else names.changed({"qkv_layout": "grouped"})


def read_codegen(config: ConfigReader) -> DecoderConfig:
    """Nijkamp et al. 2022, arXiv:2203.13474: GPT-J with a fused projection, in four blocks as it was trained."""
    config.skip("n_ctx")
    heads = config.integer("num_attention_heads")
    if heads % 4:
        raise config.wrong("num_attention_heads", heads, "a multiple of 4")
    return read_gptj(config)


def read_gpt_neo(config: ConfigReader) -> DecoderConfig:
    """Black et al. 2021: scores are not scaled; local layers see a window."""
    config.skip("attention_layers resid_dropout embed_dropout")
    layers, window = num_layers(config), config.integer("window_size")
    kinds: list[str] = []
    entries = config.get("attention_types") or [[["global", "local"], layers // 2]]
    for entry in entries if isinstance(entries, list) else [entries]:
        match entry:
            case [list(names), int(count)] if 0 <= count <= layers and len(names) <= layers:
                kinds += names * count
            case _:
                must = "pairs of a list of kinds and how often it repeats"
                raise config.wrong("attention_types", entry, must)
    if len(kinds) != layers or any(kind not in ("global", "local") for kind in kinds):
        raise config.wrong("attention_types", kinds, f"global or local for each of {layers} layers")
    inner = config.optional_integer("intermediate_size") or 4 * config.integer("hidden_size")
    return read_decoder(
        config,
        **{**PLAIN, "attention_qkv_bias": False},
        intermediate_size=inner,
        rotated=0,
        positions_offset=0,
        scores_scale=1.0,
        scores_window=[window if kind == "local" else None for kind in kinds],
    )


def read_openai(config: ConfigReader) -> DecoderConfig:
    """Radford et al. 2018: norms after the sums. Its "gelu" is the tanh form."""
    activation = read_activation(config)
    return read_decoder(
        config,
        **PLAIN,
        activation="gelu_tanh" if activation == "gelu" else activation,
        intermediate_size=4 * config.integer("hidden_size"),
        rotated=0,
        positions_offset=0,
        placement="sum",
        final_norm=False,
    )


def read_ctrl(config: ConfigReader) -> DecoderConfig:
    """Keskar et al. 2019, arXiv:1909.05858: computed positions beside a scaled embedding."""
    if config.number("rms_norm_eps") != 1e-6:
        raise config.wrong("rms_norm_eps", config.get("rms_norm_eps"), "1e-06, as in the layers")
    return read_decoder(
        config,
        **PLAIN,
        activation="relu",
        rotated=0,
        positions_offset=0,
        positions_sinusoid="half",
        head_bias=True,
        embedding_scale=config.integer("hidden_size") ** 0.5,
    )


def read_biogpt(config: ConfigReader, **fields: Any) -> DecoderConfig:
    """Luo et al. 2022, arXiv:2210.10341, and XGLM, arXiv:2112.10668. The epsilon of the config is not used."""
    return read_decoder(
        config,
        **PLAIN,
        **fields,
        norm_eps=1e-5,
        rotated=0,
        positions_offset=2,
        embedding_scale=config.integer("hidden_size") ** 0.5 if config.boolean("scale_embedding") else 1.0,
    )


def read_mpt(config: ConfigReader) -> DecoderConfig:
    """MosaicML 2023: ALiBi, no biases."""
    config.expect_all({"no_bias": True, "logit_scale": None, "embedding_fraction": 1, "expansion_ratio": 4})
    config.skip("learned_pos_emb norm_type init_device verbose init_config emb_pdrop")
    attention = config.section("attn_config", whole=True) or ConfigReader({}, config.where)
    attention.skip("attn_pdrop attn_impl attn_uses_sequence_id model_type")
    fixed: dict[str, Any] = {"alibi": True, "alibi_bias_max": 8, "prefix_lm": False, "qk_ln": False}
    attention.expect_all({**fixed, "attn_type": "multihead_attention"})
    scale = attention.optional_number("softmax_scale")
    return read_decoder(
        config,
        norm_kind="layer",
        mlp_gated=False,
        activation="gelu",
        intermediate_size=4 * config.integer("hidden_size"),
        rotated=0,
        scores_alibi=1.0,
        attention_clip=attention.optional_number("clip_qkv") or None,
        **({} if scale is None else {"scores_scale": scale}),
    )


def read_persimmon(config: ConfigReader) -> DecoderConfig:
    """Adept 2023: LayerNorms of queries and keys, half of each head rotated."""
    qk_norm = config.boolean("qk_layernorm")
    return read_decoder(
        config,
        **PLAIN,
        rotated=rotary_dim(config, head_size(config), 0.5),
        qk_norm="head" if qk_norm else None,
        qk_norm_bias=qk_norm,
    )


FAMILIES = {
    "GPTBigCodeForCausalLM": Family(
        "StarCoder 1, SantaCoder",
        read_bigcode,
        bigcode_names,
        {
            **GPT,
            "hidden_act": "gelu_pytorch_tanh",
            "max_position_embeddings": 1024,
            "tie_word_embeddings": True,
            "multi_query": True,
        },
        GPT_KEYS,
        unused="num_key_value_heads",  # what multi_query says
    ),
    "CodeGenForCausalLM": Family(
        "CodeGen 1",
        read_codegen,
        GPTJ_NAMES.changed(
            {
                "attention.qkv": "attn.qkv_proj",
                "qkv_layout": "blocks",
                "ignored": (r"transformer\.h\.\d+\.attn\.(causal_mask|bias|masked_bias)",),
            }
        ),
        {**GPT, "max_position_embeddings": 2048},
        GPT_KEYS,
    ),
    "GPTNeoForCausalLM": Family(
        "GPT-Neo 125M to 2.7B",
        read_gpt_neo,
        GPT2_NAMES.changed(
            {
                "attention.qkv": "",
                "attention.q": "attn.attention.q_proj",
                "attention.k": "attn.attention.k_proj",
                "attention.v": "attn.attention.v_proj",
                "attention.out": "attn.attention.out_proj",
                "transposed": False,
                "ignored": (r"transformer\.h\.\d+\.attn\.attention\.(masked_)?bias",),
            }
        ),
        {**GPT, "max_position_embeddings": 2048, "tie_word_embeddings": True, "window_size": 256},
        {
            "num_hidden_layers": "num_layers num_hidden_layers",
            "num_attention_heads": "num_heads num_attention_heads",
            **UNGROUPED,
            "hidden_act": "activation_function",
            "rms_norm_eps": "layer_norm_epsilon",
        },
    ),
    "OpenAIGPTLMHeadModel": Family(
        "GPT (2018)",
        read_openai,
        GPT2_NAMES.changed(
            {
                "embedding": "transformer.tokens_embed",
                "positions": "transformer.positions_embed",
                "attention_norm": "",
                "attention_post_norm": "ln_1",
                "mlp_norm": "",
                "mlp_post_norm": "ln_2",
                "ignored": (*GPT2_NAMES.ignored, r"transformer\.position_ids"),
            }
        ),
        {
            "hidden_act": "gelu",
            "max_position_embeddings": 512,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": True,
        },
        {**GPT_KEYS, "hidden_act": "afn", "intermediate_size": ""},
    ),
    "CTRLLMHeadModel": Family(
        "CTRL",
        read_ctrl,
        {
            "base": "transformer.",
            "embedding": "transformer.w",
            "norm": "transformer.layernorm",
            "layer": "transformer.h.{i}.",
            "attention_norm": "layernorm1",
            "mlp_norm": "layernorm2",
            "attention.q": "multi_head_attention.Wq",
            "attention.k": "multi_head_attention.Wk",
            "attention.v": "multi_head_attention.Wv",
            "attention.out": "multi_head_attention.dense",
            "mlp.up": "ffn.0",
            "mlp.down": "ffn.2",
            "ignored": (r"transformer\.pos_encoding",),
        },
        {"max_position_embeddings": 256, "rms_norm_eps": 1e-6, "tie_word_embeddings": True},
        {**GPT_KEYS, "intermediate_size": "dff"},
    ),
    "XGLMForCausalLM": Family(
        "XGLM",
        partial(read_biogpt, positions_sinusoid="half_less_one"),
        OPT_NAMES.changed(
            {
                "embedding": "model.embed_tokens",
                "norm": "model.layer_norm",
                "layer": "model.layers.{i}.",
                "ignored": (r"model\.embed_positions\.weights",),
            }
        ),
        {
            "hidden_act": "gelu",
            "max_position_embeddings": 2048,
            "tie_word_embeddings": True,
            "scale_embedding": True,
        },
        {
            "hidden_size": "d_model hidden_size",
            "num_hidden_layers": "num_layers num_hidden_layers",
            "num_attention_heads": "attention_heads num_attention_heads",
            **UNGROUPED,
            "intermediate_size": "ffn_dim",
            "hidden_act": "activation_function",
        },
    ),
    "BioGptForCausalLM": Family(
        "BioGPT",
        read_biogpt,
        OPT_NAMES.changed(
            {
                "base": "biogpt.",
                "embedding": "biogpt.embed_tokens",
                "positions": "biogpt.embed_positions",
                "norm": "biogpt.layer_norm",
                "layer": "biogpt.layers.{i}.",
                "head": "output_projection",
            }
        ),
        {
            "hidden_act": "gelu",
            "max_position_embeddings": 1024,
            "tie_word_embeddings": True,
            "scale_embedding": True,
        },
        UNGROUPED,
        unused="layer_norm_eps",
    ),
    "MptForCausalLM": Family(
        "MPT 7B, 30B",
        read_mpt,
        {
            "base": "transformer.",
            "embedding": "transformer.wte",
            "norm": "transformer.norm_f",
            "layer": "transformer.blocks.{i}.",
            "attention_norm": "norm_1",
            "attention.qkv": "attn.Wqkv",
            "attention.out": "attn.out_proj",
            "mlp_norm": "norm_2",
            "mlp.up": "ffn.up_proj",
            "mlp.down": "ffn.down_proj",
        },
        {"max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "tie_word_embeddings": True},
        {
            "hidden_size": "d_model hidden_size",
            "num_hidden_layers": "n_layers num_hidden_layers",
            "num_attention_heads": "n_heads num_attention_heads",
            **UNGROUPED,
            "max_position_embeddings": "max_seq_len",
            "rms_norm_eps": "layer_norm_epsilon",
        },
    ),
    "PersimmonForCausalLM": Family(
        "Persimmon 8B",
        read_persimmon,
        {
            "norm": "model.final_layernorm",
            "attention.qkv": "self_attn.query_key_value",
            "qkv_layout": "grouped",
            "attention.out": "self_attn.dense",
            "attention.q_norm": "self_attn.q_layernorm",
            "attention.k_norm": "self_attn.k_layernorm",
            "mlp.up": "mlp.dense_h_to_4h",
            "mlp.down": "mlp.dense_4h_to_h",
        },
        {"hidden_act": "relu2", "max_position_embeddings": 16384, "rms_norm_eps": 1e-5, "qk_layernorm": True},
        {"rms_norm_eps": "layer_norm_eps", **UNGROUPED},
    ),
}
