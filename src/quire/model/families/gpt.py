"""GPT-2, GPT-J, GPT-NeoX (Pythia) and OPT: LayerNorms, biases, and an MLP without a gate."""

from __future__ import annotations

from msgspec.structs import replace

from quire.model.families.config import ConfigReader
from quire.model.families.llama import Keys, head_size, llama_like
from quire.model.families.names import TensorNames
from quire.model.families.rope import rotary_dim
from quire.model.spec import ArchSpec, RopeSpec

GPT_KEYS = Keys(
    hidden="n_embd",
    layers="n_layer",
    heads="n_head",
    inner="n_inner",
    activation="activation_function",
    eps="layer_norm_epsilon",
    positions="n_positions",
)
GPT2_NAMES = TensorNames(
    base="transformer.",
    embedding="transformer.wte",
    positions="transformer.wpe",
    norm="transformer.ln_f",
    layer="transformer.h.{i}.",
    attention_norm="ln_1",
    qkv="attn.c_attn",
    out="attn.c_proj",
    mlp_norm="ln_2",
    up="mlp.c_fc",
    down="mlp.c_proj",
    transposed=True,
    ignored=(r"transformer\.h\.\d+\.attn\.(masked_)?bias",),
)
GPTJ_NAMES = TensorNames(
    base="transformer.",
    embedding="transformer.wte",
    norm="transformer.ln_f",
    layer="transformer.h.{i}.",
    attention_norm="ln_1",
    q="attn.q_proj",
    k="attn.k_proj",
    v="attn.v_proj",
    out="attn.out_proj",
    up="mlp.fc_in",
    down="mlp.fc_out",
    interleaved=True,
    ignored=(r"transformer\.h\.\d+\.attn\.(masked_)?bias",),
)
NEOX_NAMES = TensorNames(
    base="gpt_neox.",
    embedding="gpt_neox.embed_in",
    norm="gpt_neox.final_layer_norm",
    head="embed_out",
    layer="gpt_neox.layers.{i}.",
    qkv="attention.query_key_value",
    qkv_layout="grouped",
    out="attention.dense",
    up="mlp.dense_h_to_4h",
    down="mlp.dense_4h_to_h",
    ignored=(r"gpt_neox\.layers\.\d+\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)",),
)
OPT_NAMES = TensorNames(
    embedding="model.decoder.embed_tokens",
    positions="model.decoder.embed_positions",
    project_in="model.decoder.project_in",
    project_out="model.decoder.project_out",
    norm="model.decoder.final_layer_norm",
    layer="model.decoder.layers.{i}.",
    attention_norm="self_attn_layer_norm",
    attention_post_norm="self_attn_layer_norm",
    out="self_attn.out_proj",
    mlp_norm="final_layer_norm",
    mlp_post_norm="final_layer_norm",
    up="fc1",
    down="fc2",
)


def read_gpt2(config: ConfigReader) -> ArchSpec:
    """GPT-2 and its many descendants."""
    config.expect("scale_attn_by_inverse_layer_idx", False)
    config.get("n_ctx")  # n_positions by an older name
    spec = llama_like(
        config,
        "GPT2LMHeadModel",
        keys=GPT_KEYS,
        num_kv_heads=config.integer("n_head"),
        default_inner=4 * config.integer("n_embd"),
        default_max_position=1024,
        default_activation="gelu_new",
        default_eps=1e-5,
        default_tied=True,
        rotated=0,
        position_offset=0,
        norm="layer",
        norm_bias=True,
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        gated=False,
    )
    return spec if config.boolean("scale_attn_weights", True) else replace(spec, attention_scale=1.0)


def read_gptj(config: ConfigReader) -> ArchSpec:
    """GPT-J 6B: attention and MLP beside each other; part of each head is rotated, in neighbouring pairs."""
    for key in ("rotary", "scale_attn_weights"):
        config.expect(key, True)
    head_dim = config.integer("n_embd") // config.integer("n_head")
    rotated = config.integer("rotary_dim", min(64, head_dim), high=head_dim)
    if rotated % 2:
        raise config.wrong("rotary_dim", rotated, "even")
    return llama_like(
        config,
        "GPTJForCausalLM",
        keys=GPT_KEYS,
        num_kv_heads=config.integer("n_head"),
        default_inner=4 * config.integer("n_embd"),
        default_max_position=2048,
        default_activation="gelu_new",
        default_eps=1e-5,
        rotated=rotated,
        rope=RopeSpec("default", 10000.0, rotated),
        placement="parallel",
        norm="layer",
        norm_bias=True,
        mlp_bias=True,
        head_bias=True,
        gated=False,
    )


def read_neox(config: ConfigReader) -> ArchSpec:
    """GPT-NeoX 20B and Pythia. Black et al. 2022, arXiv:2204.06745."""
    bias = config.boolean("attention_bias", True)
    return llama_like(
        config,
        "GPTNeoXForCausalLM",
        keys=Keys(eps="layer_norm_eps"),
        num_kv_heads=config.integer("num_attention_heads"),
        default_max_position=2048,
        default_activation="gelu",
        default_eps=1e-5,
        default_theta=config.number("rotary_emb_base", 10000.0),
        rotated=rotary_dim(config, head_size(config), 0.25, "rotary_pct"),
        placement="parallel_two" if config.boolean("use_parallel_residual", True) else "pre",
        norm="layer",
        norm_bias=True,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=True,
        gated=False,
    )


def read_opt(config: ConfigReader) -> ArchSpec:
    """Zhang et al. 2022, arXiv:2205.01068. The 350M model has norms after the sums and a projected embedding."""
    config.expect("layer_norm_elementwise_affine", True)
    hidden, bias = config.integer("hidden_size"), config.boolean("enable_bias", True)
    before, removed = (
        config.boolean("do_layer_norm_before", True),
        config.boolean("_remove_final_layer_norm", False),
    )
    width = config.integer("word_embed_proj_dim", hidden)
    return llama_like(
        config,
        "OPTForCausalLM",
        keys=Keys(inner="ffn_dim", activation="activation_function", eps="layer_norm_eps"),
        num_kv_heads=config.integer("num_attention_heads"),
        default_max_position=2048,
        default_activation="relu",
        default_eps=1e-5,
        default_tied=True,
        rotated=0,
        position_offset=2,
        embedding_size=None if width == hidden else width,
        placement="pre" if before else "sum",
        final_norm=before and not removed,
        norm="layer",
        norm_bias=True,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bias,
        gated=False,
    )
