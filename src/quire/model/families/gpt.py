"""GPT-2, GPT-J, GPT-NeoX (Pythia) and OPT: LayerNorms, biases, and an MLP without a gate."""

from __future__ import annotations

from typing import Any

from quire.model.families.config import ConfigReader
from quire.model.families.family import Family, head_size, num_layers, read_decoder
from quire.model.families.names import LLAMA_NAMES
from quire.model.families.rope import rotary_dim
from quire.model.parts.decoder import DecoderConfig
from quire.model.parts.rope import RopeSpec

GPT_NAMES = LLAMA_NAMES.changed(
    {
        "base": "transformer.",
        "embedding": "transformer.wte",
        "norm": "transformer.ln_f",
        "layer": "transformer.h.{i}.",
        "attention_norm": "ln_1",
        "ignored": (r"transformer\.h\.\d+\.attn\.(masked_)?bias",),
    }
)
GPT2_NAMES = GPT_NAMES.changed(
    {
        "positions": "transformer.wpe",
        "attention.qkv": "attn.c_attn",
        "attention.out": "attn.c_proj",
        "mlp_norm": "ln_2",
        "mlp.up": "mlp.c_fc",
        "mlp.down": "mlp.c_proj",
        "transposed": True,
    }
)
GPTJ_NAMES = GPT_NAMES.changed(
    {
        "attention.q": "attn.q_proj",
        "attention.k": "attn.k_proj",
        "attention.v": "attn.v_proj",
        "attention.out": "attn.out_proj",
        "mlp.up": "mlp.fc_in",
        "mlp.down": "mlp.fc_out",
        "interleaved": True,
    }
)
NEOX_NAMES = LLAMA_NAMES.changed(
    {
        "base": "gpt_neox.",
        "embedding": "gpt_neox.embed_in",
        "norm": "gpt_neox.final_layer_norm",
        "head": "embed_out",
        "layer": "gpt_neox.layers.{i}.",
        "attention.qkv": "attention.query_key_value",
        "qkv_layout": "grouped",
        "attention.out": "attention.dense",
        "mlp.up": "mlp.dense_h_to_4h",
        "mlp.down": "mlp.dense_4h_to_h",
        "ignored": (r"gpt_neox\.layers\.\d+\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)",),
    }
)
OPT_NAMES = LLAMA_NAMES.changed(
    {
        "embedding": "model.decoder.embed_tokens",
        "positions": "model.decoder.embed_positions",
        "project_in": "model.decoder.project_in",
        "project_out": "model.decoder.project_out",
        "norm": "model.decoder.final_layer_norm",
        "layer": "model.decoder.layers.{i}.",
        "attention_norm": "self_attn_layer_norm",
        "attention_post_norm": "self_attn_layer_norm",
        "attention.out": "self_attn.out_proj",
        "mlp_norm": "final_layer_norm",
        "mlp_post_norm": "final_layer_norm",
        "mlp.up": "fc1",
        "mlp.down": "fc2",
    }
)


# LayerNorms and biases everywhere, no gate.
PLAIN: dict[str, Any] = {
    "norm_kind": "layer",
    "norm_bias": True,
    "attention_qkv_bias": True,
    "attention_out_bias": True,
    "mlp_bias": True,
    "mlp_gated": False,
}


def read_gpt2(config: ConfigReader) -> DecoderConfig:
    """GPT-2 and its many descendants."""
    config.expect("scale_attn_by_inverse_layer_idx", False, None)
    config.skip("n_ctx")  # n_positions by an older name
    inner = config.optional_integer("intermediate_size") or 4 * config.integer("hidden_size")
    unscaled = {} if config.boolean("scale_attn_weights") else {"scores_scale": 1.0}
    return read_decoder(config, **PLAIN, **unscaled, intermediate_size=inner, rotated=0, positions_offset=0)


def read_gptj(config: ConfigReader) -> DecoderConfig:
    """Attention and MLP beside each other; part of each head is rotated, in neighbouring pairs."""
    for key in ("rotary", "scale_attn_weights"):
        config.expect(key, True)
    hidden = config.integer("hidden_size")
    head_dim = hidden // config.integer("num_attention_heads")
    rotated = config.integer("rotary_dim", min(64, head_dim), high=head_dim)
    if rotated % 2:
        raise config.wrong("rotary_dim", rotated, "even")
    return read_decoder(
        config,
        **{**PLAIN, "attention_qkv_bias": False, "attention_out_bias": False},
        intermediate_size=config.optional_integer("intermediate_size") or 4 * hidden,
        rotated=rotated,
        rope=RopeSpec("default", 10000.0, rotated),
        placement="parallel",
        head_bias=True,
    )


def read_neox(config: ConfigReader) -> DecoderConfig:
    """Black et al. 2022, arXiv:2204.06745."""
    config.expect("unused_theta", config.number("rope_theta", 10000.0))
    config.expect("unused_share", config.number("partial_rotary_factor", 0.25))
    bias = config.boolean("attention_bias")
    return read_decoder(
        config,
        **{**PLAIN, "attention_qkv_bias": bias, "attention_out_bias": bias},
        rotated=rotary_dim(config, head_size(config), 0.25),
        placement="parallel_two" if config.boolean("use_parallel_residual") else "pre",
    )


def read_neox_japanese(config: ConfigReader) -> DecoderConfig:
    """ABEJA 2022: one bias, after the attention of the last layer."""
    layers, hidden = num_layers(config), config.integer("hidden_size")
    last = [i == layers - 1 for i in range(layers)]
    return read_decoder(
        config,
        **{**PLAIN, "attention_qkv_bias": False, "mlp_bias": False, "attention_out_bias": last},
        intermediate_size=hidden * config.integer("intermediate_multiple_size"),
        rotated=rotary_dim(config, head_size(config), 1.0),
    )


def read_opt(config: ConfigReader) -> DecoderConfig:
    """Zhang et al. 2022, arXiv:2205.01068. The 350M model has norms after the sums and a projected embedding."""
    config.expect("layer_norm_elementwise_affine", True)
    hidden, bias = config.integer("hidden_size"), config.boolean("enable_bias")
    before = config.boolean("do_layer_norm_before")
    removed = config.boolean("_remove_final_layer_norm", False)
    width = config.optional_integer("word_embed_proj_dim") or hidden
    return read_decoder(
        config,
        **{**PLAIN, "attention_qkv_bias": bias, "attention_out_bias": bias, "mlp_bias": bias},
        rotated=0,
        positions_offset=2,
        **({} if width == hidden else {"embedding_width": width, "embedding_projected": True}),
        placement="pre" if before else "sum",
        final_norm=before and not removed,
    )


# UNGROUPED are keys that classes lack: each head has keys of its own, and the hidden size's share.
UNGROUPED = {"num_key_value_heads": "", "head_dim": ""}
GPT_KEYS = {
    "hidden_size": "n_embd hidden_size",
    "num_hidden_layers": "n_layer num_hidden_layers",
    "num_attention_heads": "n_head num_attention_heads",
    **UNGROUPED,
    "intermediate_size": "n_inner",
    "hidden_act": "activation_function",
    "rms_norm_eps": "layer_norm_epsilon",
    "max_position_embeddings": "n_positions max_position_embeddings",
}
GPT = {"hidden_act": "gelu_new", "rms_norm_eps": 1e-5}
FAMILIES = {
    "GPT2LMHeadModel": Family(
        "GPT-2, DistilGPT2",
        read_gpt2,
        GPT2_NAMES,
        {**GPT, "max_position_embeddings": 1024, "tie_word_embeddings": True, "scale_attn_weights": True},
        GPT_KEYS,
    ),
    "GPTJForCausalLM": Family(
        "GPT-J 6B", read_gptj, GPTJ_NAMES, {**GPT, "max_position_embeddings": 2048}, GPT_KEYS
    ),
    "GPTNeoXForCausalLM": Family(
        "GPT-NeoX 20B, Pythia",
        read_neox,
        NEOX_NAMES,
        {
            "hidden_act": "gelu",
            "max_position_embeddings": 2048,
            "rms_norm_eps": 1e-5,
            "attention_bias": True,
            "use_parallel_residual": True,
        },
        {
            "rms_norm_eps": "layer_norm_eps",
            "rope_theta": "rotary_emb_base",
            "partial_rotary_factor": "rotary_pct",
            "unused_theta": "rope_theta",
            "unused_share": "partial_rotary_factor",
            "num_key_value_heads": "",
        },
    ),
    "GPTNeoXJapaneseForCausalLM": Family(
        "GPT-NeoX Japanese 2.7B",
        read_neox_japanese,
        NEOX_NAMES.changed(
            {
                "base": "gpt_neox_japanese.",
                "embedding": "gpt_neox_japanese.embed_in",
                "norm": "gpt_neox_japanese.final_layer_norm",
                "layer": "gpt_neox_japanese.layers.{i}.",
                "attention.out.bias": "attention.dense_bias",
            }
        ),
        {
            "hidden_act": "gelu",
            "max_position_embeddings": 2048,
            "rms_norm_eps": 1e-5,
            "intermediate_multiple_size": 4,
            "tie_word_embeddings": True,
        },
        {
            "rms_norm_eps": "layer_norm_eps",
            "rope_theta": "rotary_emb_base",
            "partial_rotary_factor": "rotary_pct",
            "num_key_value_heads": "",
        },
    ),
    "OPTForCausalLM": Family(
        "OPT 125M to 66B, the 350M too",
        read_opt,
        OPT_NAMES,
        {
            "hidden_act": "relu",
            "max_position_embeddings": 2048,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": True,
            "enable_bias": True,
            "do_layer_norm_before": True,
        },
        {
            "intermediate_size": "ffn_dim",
            "hidden_act": "activation_function",
            "rms_norm_eps": "layer_norm_eps",
            "num_key_value_heads": "",
            "head_dim": "",
        },
    ),
}
