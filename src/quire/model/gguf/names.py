"""Names the tensors of GGUF files: one table for all architectures. weights/gguf/pieces.py names joined ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from quire.model.families.names import GGUF_LAYER, TensorNames
from quire.model.gguf.keys import Keys
from quire.model.parts.decoder import DecoderConfig

NAMES = TensorNames(
    base="",
    embedding="token_embd",
    positions="position_embd",
    embedding_norm="token_embd_norm",
    norm="output_norm",
    head="output",
    layer=GGUF_LAYER,
    attention_norm="attn_norm",
    attention_post_norm="post_attention_norm",
    q="attn_q",
    k="attn_k",
    v="attn_v",
    q_norm="attn_q_norm",
    k_norm="attn_k_norm",
    sinks="attn_sinks",
    attention_gate="attn_gate",
    out_norm="attn_sub_norm",
    out="attn_output",
    q_down="attn_q_a",
    q_down_norm="attn_q_a_norm",
    q_up="attn_q_b",
    kv_down="attn_kv_a_mqa",
    kv_down_norm="attn_kv_a_norm",
    kv_up="attn_kv_b",
    mlp_norm="ffn_norm",
    mlp_post_norm="post_ffw_norm",
    gate="ffn_gate",
    up="ffn_up",
    down="ffn_down",
    down_norm="ffn_sub_norm",
    xielu="xielu",
    router="ffn_gate_inp",
    correction="exp_probs_b",
    experts="exps.{e}.",
    expert_gate="ffn_gate",
    expert_up="ffn_up",
    expert_down="ffn_down",
    moe_norm="post_ffw_norm_2",
    moe_pre_norm="pre_ffw_norm_2",
    mlp_beside_norm="post_ffw_norm_1",
    router_scale="ffn_gate_inp.scale",
    expert_scales="ffn_down_exps.scale",
    shared="shexp.",
    shared_gate="ffn_gate_inp_shexp",
    layer_scale="layer_output_scale",
    per_layer_table="per_layer_token_embd",
    per_layer_model="per_layer_model_proj",
    per_layer_norm="per_layer_proj_norm",
    per_layer_gate="inp_gate",
    per_layer_out="proj",
    per_layer_post_norm="post_norm",
    altup="altup_",
    spread="altup_proj.{s}",
    merge="altup_unembd_proj.{s}",
    laurel="laurel_",
    # Factors of frequencies, which the spec has.
    ignored=(r"rope_freqs\.weight", r"rope_factors_(long|short)\.weight"),
)


def tensor_names(keys: Keys, spec: DecoderConfig, changes: Mapping[str, Any]) -> TensorNames:
    """Return the names of one file; `changes` are its architecture's.

    They ignore blocks after the last layer, which predict further tokens, and keys of layers that read another's.
    """
    unused = [rf"blk\.{i}\..*" for i in range(keys.layers, keys.blocks)]
    for i, layer in enumerate(spec.layers):
        if layer.mixer is not None and layer.mixer.back:
            unused.append(rf"blk\.{i}\.attn_[kv](_norm)?\..*")
    if spec.layers[0].placement == "parallel_two" and keys.has("blk.0.attn_norm_2.weight"):  # Falcon's
        changes = {**changes, "attention_norm": "attn_norm_2", "mlp_norm": "attn_norm"}
    return replace(NAMES, ignored=(*NAMES.ignored, *unused), **changes)
