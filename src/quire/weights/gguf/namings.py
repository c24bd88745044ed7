"""The names of each GGUF architecture's tensors in the checkpoint that it was made of, as data.

Facts are the gguf package's table (gguf/tensor_mapping.py) and llama.cpp's conversion/*.py, read backwards.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.weights.gguf.names import Naming

ATTENTION = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
}
LLAMA = {
    **ATTENTION,
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
SANDWICH = {
    **LLAMA,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
QWEN_EXPERTS = {f"ffn_{kind}_exps": f"mlp.experts.{{e}}.{kind}_proj" for kind in ("gate", "up", "down")}
QWEN_MOE = {
    **LLAMA,
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    **{f"ffn_{kind}_shexp": f"mlp.shared_expert.{kind}_proj" for kind in ("gate", "up", "down")},
}
PLAIN = Naming(modules=LLAMA)
TURNED = Naming(modules=LLAMA, turned=True)
MIXTRAL = Naming(
    modules={**ATTENTION, "ffn_gate_inp": "block_sparse_moe.gate"},
    experts={
        "ffn_gate_exps": "block_sparse_moe.experts.{e}.w1",
        "ffn_down_exps": "block_sparse_moe.experts.{e}.w2",
        "ffn_up_exps": "block_sparse_moe.experts.{e}.w3",
    },
    turned=True,
)
QWEN_MIXTURE = Naming(modules=QWEN_MOE, experts=QWEN_EXPERTS, rows=("ffn_gate_inp_shexp",))
GEMMA = Naming(modules=LLAMA, norm_offset=1.0)
GEMMA_SANDWICH = Naming(modules=SANDWICH, norm_offset=1.0)
OLMO2 = Naming(
    modules={
        **LLAMA,
        "post_attention_norm": "post_attention_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    }
)
PHI3 = Naming(modules={**LLAMA, "attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"})
PHI2 = Naming(
    outside={
        "token_embd": "model.embed_tokens",
        "output_norm": "model.final_layernorm",
        "output": "lm_head",
    },
    modules={**ATTENTION, "attn_output": "self_attn.dense", "ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2"},
)
STARCODER2 = Naming(modules={**ATTENTION, "ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"})
STABLELM = Naming(
    modules={key: name for key, name in LLAMA.items() if key not in ("attn_q_norm", "attn_k_norm")},
    heads={
        "attn_q_norm": "self_attn.q_layernorm.norms.{e}",
        "attn_k_norm": "self_attn.k_layernorm.norms.{e}",
    },
)
GPT2 = Naming(
    layer="transformer.h.{i}.",
    outside={
        "token_embd": "transformer.wte",
        "position_embd": "transformer.wpe",
        "output_norm": "transformer.ln_f",
        "output": "lm_head",
    },
    modules={
        "attn_norm": "ln_1",
        "attn_qkv": "attn.c_attn",
        "attn_output": "attn.c_proj",
        "ffn_norm": "ln_2",
        "ffn_up": "mlp.c_fc",
        "ffn_down": "mlp.c_proj",
    },
    transposed=("attn_qkv", "attn_output", "ffn_up", "ffn_down"),
)
GPT_NEOX = Naming(
    layer="gpt_neox.layers.{i}.",
    outside={
        "token_embd": "gpt_neox.embed_in",
        "output_norm": "gpt_neox.final_layer_norm",
        "output": "embed_out",
    },
    modules={
        "attn_norm": "input_layernorm",
        "attn_qkv": "attention.query_key_value",
        "attn_output": "attention.dense",
        "ffn_norm": "post_attention_layernorm",
        "ffn_up": "mlp.dense_h_to_4h",
        "ffn_down": "mlp.dense_4h_to_h",
    },
    grouped=("attn_qkv",),
)


def _mixture(experts: str, shared: str, router: str) -> dict[str, Any]:
    """Fields for a mixture whose experts are three matrices each."""
    kinds = ("gate", "up", "down")
    shared_names = {f"ffn_{kind}_shexp": f"{shared}.{kind}_proj" for kind in kinds} if shared else {}
    return {
        "modules": {**LLAMA, "ffn_gate_inp": router, **shared_names},
        "experts": {f"ffn_{kind}_exps": f"{experts}.{{e}}.{kind}_proj" for kind in kinds},
    }


def _changed(fields: Mapping[str, Any], **modules: str) -> dict[str, Any]:
    """The fields with other names for some modules."""
    return {**fields, "modules": {**fields["modules"], **modules}}


V3 = _mixture("mlp.experts", "mlp.shared_experts", "mlp.gate")
V3_WHOLE = {"exp_probs_b": "mlp.gate.e_score_correction_bias"}
DOTS1 = Naming(**V3, whole=V3_WHOLE)
GLM4_MOE = Naming(**_changed(V3, post_attention_norm="post_attention_layernorm"), whole=V3_WHOLE)
EXAONE_MOE = Naming(**V3, whole={"exp_probs_b": "mlp.e_score_correction_bias"})
ERNIE_MOE = Naming(
    **V3, whole={"exp_probs_b": "mlp.moe_statics.e_score_correction_bias"}, rows=("exp_probs_b",)
)
AFMOE = Naming(
    **_changed(
        _mixture("mlp.experts", "mlp.shared_experts", "mlp.router.gate"),
        attn_gate="self_attn.gate_proj",
        post_attention_norm="post_attention_layernorm",
        ffn_norm="pre_mlp_layernorm",
        post_ffw_norm="post_mlp_layernorm",
    ),
    whole={"exp_probs_b": "mlp.expert_bias"},
)
MINIMAX_M2 = Naming(
    modules={**LLAMA, "ffn_gate_inp": "block_sparse_moe.gate"},
    experts=MIXTRAL.experts,
    whole={"exp_probs_b": "block_sparse_moe.e_score_correction_bias"},
)
PHIMOE = Naming(modules=MIXTRAL.modules, experts=MIXTRAL.experts)
OLMOE = Naming(**_mixture("mlp.experts", "", "mlp.gate"))
GPT_OSS = Naming(
    **_changed(_mixture("mlp.experts", "", "mlp.router"), post_attention_norm="post_attention_layernorm"),
    whole={"attn_sinks": "self_attn.sinks"},
)
LLAMA4 = Naming(
    **_changed(
        _mixture("feed_forward.experts", "feed_forward.shared_expert", "feed_forward.router"),
        ffn_gate="feed_forward.gate_proj",
        ffn_up="feed_forward.up_proj",
        ffn_down="feed_forward.down_proj",
    )
)
GRANITE_MOE = Naming(
    **_mixture("block_sparse_moe", "shared_mlp", "block_sparse_moe.router.layer"), turned=True
)
HUNYUAN_MODULES = {"attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm"}
HUNYUAN = Naming(modules={**LLAMA, **HUNYUAN_MODULES})
HUNYUAN_MOE = Naming(**_changed(_mixture("mlp.experts", "mlp.shared_mlp", "mlp.gate.wg"), **HUNYUAN_MODULES))
LATENT_MODULES = {
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
}
DEEPSEEK2 = Naming(**_changed(V3, **LATENT_MODULES), whole=V3_WHOLE, latent_up="self_attn.kv_b_proj")
MINICPM3 = Naming(modules={**LLAMA, **LATENT_MODULES})
SEED_OSS = Naming(modules={**LLAMA, "post_attention_norm": "post_attention_layernorm"})
EXAONE4 = OLMO2
NEMOTRON = Naming(modules=LLAMA, norm_offset=1.0)
CHATGLM = Naming(modules={**LLAMA, "ffn_up": "mlp.gate_up_proj"})
GLM4 = Naming(
    modules={
        **CHATGLM.modules,
        "post_attention_norm": "post_self_attn_layernorm",
        "post_ffw_norm": "post_mlp_layernorm",
    }
)
BLOOM = Naming(
    layer="transformer.h.{i}.",
    outside={
        "token_embd": "transformer.word_embeddings",
        "token_embd_norm": "transformer.word_embeddings_layernorm",
        "output_norm": "transformer.ln_f",
        "output": "lm_head",
    },
    modules={
        "attn_norm": "input_layernorm",
        "attn_qkv": "self_attention.query_key_value",
        "attn_output": "self_attention.dense",
        "ffn_norm": "post_attention_layernorm",
        "ffn_up": "mlp.dense_h_to_4h",
        "ffn_down": "mlp.dense_4h_to_h",
    },
    grouped=("attn_qkv",),
)
FALCON = BLOOM
FALCON_TWO_NORMS = Naming(
    layer=BLOOM.layer,
    outside=BLOOM.outside,
    modules={**BLOOM.modules, "attn_norm": "ln_mlp", "attn_norm_2": "ln_attn"},
    grouped=BLOOM.grouped,
)
PER_LAYER = {
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
}
PER_LAYER_OUTSIDE = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
}
GEMMA3N = Naming(
    outside=PER_LAYER_OUTSIDE,
    modules={
        **SANDWICH,
        **PER_LAYER,
        "altup_correct_coef": "altup.correction_coefs",
        "altup_predict_coef": "altup.prediction_coefs",
        "altup_router": "altup.modality_router",
        "altup_router_norm": "altup.router_norm",
        "laurel_l": "laurel.linear_left",
        "laurel_r": "laurel.linear_right",
        "laurel_post_norm": "laurel.post_laurel_norm",
    },
    whole={"altup_correct_scale": "altup.correct_output_scale"},
    stacks={
        "altup_proj": "model.altup_projections.{e}",
        "altup_unembd_proj": "model.altup_unembed_projections.{e}",
    },
)
GEMMA4 = Naming(
    outside=PER_LAYER_OUTSIDE,
    modules={
        **SANDWICH,
        **PER_LAYER,
        "ffn_gate_inp": "router.proj",
        "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
        "post_ffw_norm_1": "post_feedforward_layernorm_1",
        "post_ffw_norm_2": "post_feedforward_layernorm_2",
    },
    whole={
        "layer_output_scale": "layer_scalar",
        "ffn_gate_inp.scale": "router.scale",
        "ffn_down_exps.scale": "router.per_expert_scale",
    },
    experts={f"ffn_{kind}_exps": f"experts.{{e}}.{kind}_proj" for kind in ("gate", "up", "down")},
)
MIMO2 = Naming(
    **_mixture("mlp.experts", "", "mlp.gate"),
    whole={**V3_WHOLE, "attn_sinks": "self_attn.attention_sink_bias"},
)
BITNET = Naming(
    modules={**LLAMA, "attn_sub_norm": "self_attn.attn_sub_norm", "ffn_sub_norm": "mlp.ffn_sub_norm"}
)
APERTUS = Naming(modules={**LLAMA, "attn_norm": "attention_layernorm", "ffn_norm": "feedforward_layernorm"})
EXAONE = Naming(
    layer="transformer.h.{i}.",
    outside={"token_embd": "transformer.wte", "output_norm": "transformer.ln_f", "output": "lm_head"},
    modules={
        "attn_norm": "ln_1",
        "attn_q": "attn.attention.q_proj",
        "attn_k": "attn.attention.k_proj",
        "attn_v": "attn.attention.v_proj",
        "attn_output": "attn.attention.out_proj",
        "ffn_norm": "ln_2",
        "ffn_gate": "mlp.c_fc_0",
        "ffn_up": "mlp.c_fc_1",
        "ffn_down": "mlp.c_proj",
    },
)
BAILING_OUTSIDE = {
    "token_embd": "model.word_embeddings",
    "output_norm": "model.norm",
    "output": "lm_head",
}
BAILING_MIXTURE = _changed(V3, attn_output="attention.dense")
BAILING = Naming(**BAILING_MIXTURE, outside=BAILING_OUTSIDE, turned=True)
BAILING2 = Naming(
    **_changed(
        BAILING_MIXTURE,
        attn_qkv="attention.query_key_value",
        attn_q_norm="attention.query_layernorm",
        attn_k_norm="attention.key_layernorm",
    ),
    outside=BAILING_OUTSIDE,
    whole={"exp_probs_b": "mlp.gate.expert_bias"},
)
STARCODER = Naming(layer=GPT2.layer, outside=GPT2.outside, modules=GPT2.modules)
MPT = Naming(
    layer="transformer.blocks.{i}.",
    outside={
        "token_embd": "transformer.wte",
        "output_norm": "transformer.norm_f",
        "output": "lm_head",
    },
    modules={
        "attn_norm": "norm_1",
        "attn_qkv": "attn.Wqkv",
        "attn_output": "attn.out_proj",
        "ffn_norm": "norm_2",
        "ffn_up": "ffn.up_proj",
        "ffn_down": "ffn.down_proj",
    },
)
