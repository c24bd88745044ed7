"""Names the tensors of GGUF files: one table for all architectures. weights/gguf/pieces.py names joined ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.model.families.names import LLAMA_NAMES, TensorNames
from quire.model.gguf.keys import Keys
from quire.model.parts.decoder import DecoderConfig

NAMES = LLAMA_NAMES.changed(
    {
        "base": "",
        "embedding": "token_embd",
        "positions": "position_embd",
        "embedding_norm": "token_embd_norm",
        "norm": "output_norm",
        "head": "output",
        "layer": "blk.{i}.",
        "attention_norm": "attn_norm",
        "attention_post_norm": "post_attention_norm",
        "attention.q": "attn_q",
        "attention.k": "attn_k",
        "attention.v": "attn_v",
        "attention.q_norm": "attn_q_norm",
        "attention.k_norm": "attn_k_norm",
        "attention.sinks": "attn_sinks",
        "attention.gate": "attn_gate",
        "attention.out_norm": "attn_sub_norm",
        "attention.out": "attn_output",
        "attention.q_down": "attn_q_a",
        "attention.q_down_norm": "attn_q_a_norm",
        "attention.q_up": "attn_q_b",
        "attention.kv_down": "attn_kv_a_mqa",
        "attention.kv_norm": "attn_kv_a_norm",
        "attention.kv_up": "attn_kv_b",
        "indexer.q": "indexer.attn_q_b",
        "indexer.k": "indexer.attn_k",
        "indexer.k_norm": "indexer.k_norm",
        "indexer.weights": "indexer.proj",
        "mlp_norm": "ffn_norm",
        "mlp_post_norm": "post_ffw_norm",
        "mlp.gate": "ffn_gate",
        "mlp.up": "ffn_up",
        "mlp.down": "ffn_down",
        "mlp.down_norm": "ffn_sub_norm",
        "mlp.xielu": "xielu",
        "mixture.router": "ffn_gate_inp",
        "mixture.correction": "exp_probs_b",
        "mixture.experts": "exps.{e}.",
        "mixture.expert.gate": "ffn_gate",
        "mixture.expert.up": "ffn_up",
        "mixture.expert.down": "ffn_down",
        "mixture.norm": "post_ffw_norm_2",
        "mixture.experts_norm": "pre_ffw_norm_2",
        "mixture.mlp_norm": "post_ffw_norm_1",
        "mixture.router_scale": "ffn_gate_inp.scale",
        "mixture.expert_scales": "ffn_down_exps.scale",
        "mixture.shared": "shexp.",
        "mixture.shared_gate": "ffn_gate_inp_shexp",
        "scale": "layer_output_scale",
        "layer_inputs": "per_layer_token_embd",
        "input.model": "per_layer_model_proj",
        "input.norm": "per_layer_proj_norm",
        "input.gate": "inp_gate",
        "input.out": "proj",
        "input.post_norm": "post_norm",
        "altup": "altup_",
        "spread": "altup_proj.{s}",
        "merge": "altup_unembd_proj.{s}",
        "laurel": "laurel_",
        # The last are towers for pictures and sound, and what joins them to the text: llama.cpp leaves them out too.
        "ignored": (r"rope_freqs\.weight", r"rope_factors_(long|short)\.weight", r"(v|a|mm)\..*"),
    }
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
    return NAMES.changed({"ignored": (*NAMES.ignored, *unused), **changes})
